"""`sglang.Engine`: the engine inside a Python program, without HTTP.

    if __name__ == "__main__":                       # the child processes import the script again
        with sglang.Engine(model_path="...") as engine:
            print(engine.generate("Hello", {"max_new_tokens": 8})["text"])

Keyword arguments are the server's flags. Results are the dicts of `/generate`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from sglang.srt.entrypoints.engine_weights import EngineWeights
from sglang.srt.environ import adopt_environment
from sglang.srt.errors import UserError
from sglang.srt.managers.front.adapters import ServedAdapters
from sglang.srt.managers.front.generate_request import GenerateRequest, RequestError
from sglang.srt.managers.front.media.native_media import NativeMedia, native_media
from sglang.srt.managers.front.native_output import native_results, native_stream
from sglang.srt.managers.front.sleeper import Sleeper
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.managers.launch import launch_engine
from sglang.srt.managers.reap import close_together
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from sglang.srt.entrypoints.http_state import ServerState
    from sglang.srt.entrypoints.trainer_server import LaunchedManager

T = TypeVar("T")
Result = dict[str, Any]


def _part_of_the_engine(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses to be called: the engine starts its processes itself. Trainers hand these names on to it."""
    raise NotImplementedError("the engine starts its processes itself; call Engine._launch_subprocesses")


init_tokenizer_manager = run_scheduler_process = run_detokenizer_process = _part_of_the_engine


class Engine(EngineWeights):
    """The inference engine in this process: child processes that generate, and an event loop in a thread that talks to
    them.

    All methods may be called from any thread, the `async_` ones from any event loop. A refused request raises
    RequestError (a ValueError) with the reason.
    """

    def __init__(self, *, server_args: ServerArgs | None = None, **flags: Any) -> None:
        """Starts the engine, and returns when requests can be served. Takes flags (`model_path=...`) or complete
        `server_args`.

        Raises UserError for a wrong flag, model or file, EngineError if a process fails; no process is left then.
        """
        if server_args is not None and flags:
            raise TypeError(f"give server_args or single flags, not both: {', '.join(flags)}")
        adopt_environment()
        self.server_args = server_args or ServerArgs.from_kwargs(**{"log_level": "error", **flags})
        if self.server_args.node_rank:
            raise UserError("machines with --node-rank above 0 have no engine: start them with `sglang serve`.")
        self._closed = False
        self._state: ServerState | None = None
        """What knows the formats of outputs; created when a request first asks for them."""
        self._handle = launch_engine(self.server_args)
        self._manager: TokenizerManager = self._handle.manager
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-loop", daemon=True)
        self._thread.start()
        try:
            self._handle.wait_ready()
            self._loop.call_soon_threadsafe(self._manager.attach)
            self._run(self._manager.load_corpus_file())
            self._run(self._manager.load_adapters())
            self._loop.call_soon_threadsafe(self._manager.mark_up)
            self._handle.watch(self._engine_failed)
        except BaseException:
            self.shutdown()
            raise

    @staticmethod
    def _launch_subprocesses(
        server_args: ServerArgs, port_args: Any = None, **functions: Any
    ) -> tuple[LaunchedManager, None, dict[str, Any]]:
        """Starts an engine whose HTTP server a trainer runs in its own event loop (`trainer_server`), and returns its
        manager when it is ready; the other values have no content. functions: names of this module, or None."""
        from sglang.srt.entrypoints.trainer_server import launch

        others = [name for name, given in functions.items() if given not in (None, _part_of_the_engine)]
        if port_args is not None or others:
            raise UserError(f"{(*others, 'port_args')[0]}: processes and ports are the engine's own; leave it out.")
        return launch(server_args), None, {}

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        input_ids: list[int] | list[list[int]] | None = None,
        image_data: NativeMedia = None,
        video_data: NativeMedia = None,
        stream: bool = False,
        **options: Any,
    ) -> Result | list[Result] | Iterator[Result]:
        """Continues `prompt` (or `input_ids`). Returns a dict for one prompt, a list of dicts for a list or `n` > 1,
        and with `stream` an iterator of dicts with all text so far. `image_data` and `video_data` are URLs, data URLs
        or base64: one, a list for one prompt, or for a batch one entry a prompt. `options` are further fields of
        GenerateRequest: return_logprob, logprob_start_len, top_logprobs_num, token_ids_logprob,
        return_text_in_logprobs, return_hidden_states, rid, priority, lora_path, ...; and require_reasoning: the output
        begins with thoughts in the format of --reasoning-parser."""
        req = self._request(prompt, sampling_params, input_ids, (image_data, video_data), stream, **options)
        return self._iterate(req) if stream else self._run(native_results(self._manager, req))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        input_ids: list[int] | list[list[int]] | None = None,
        image_data: NativeMedia = None,
        video_data: NativeMedia = None,
        stream: bool = False,
        **options: Any,
    ) -> Result | list[Result] | AsyncIterator[Result]:
        """Generates like `generate`; with `stream`, awaiting it gives an asynchronous iterator."""
        req = self._request(prompt, sampling_params, input_ids, (image_data, video_data), stream, **options)
        return self._aiterate(req) if stream else await self._arun(native_results(self._manager, req))

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Ends a request, or all; its caller gets the output so far, with finish reason `abort`."""
        self._run(self._abort(rid, abort_all))

    def load_lora_adapter(
        self, lora_name: str, lora_path: str, pinned: bool = False, load_inplace: bool = False
    ) -> None:
        """Loads a LoRA adapter from a directory; needs `enable_lora`. `generate` takes its name as `lora_path`.
        load_inplace: it replaces one that has its name."""
        self._run(self._adapters().load(lora_name, lora_path, pinned, replace=load_inplace))

    def load_lora_adapter_from_tensors(
        self,
        lora_name: str,
        tensors: Sequence[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
        config_dict: Mapping[str, Any],
        pinned: bool = False,
    ) -> None:
        """Loads a LoRA adapter of which the tensors are here, by their names in PEFT's file, with the object of
        adapter_config.json."""
        import safetensors.torch

        here = {name: tensor.detach().cpu().contiguous() for name, tensor in dict(tensors).items()}
        weights = safetensors.torch.save(here)
        self._run(self._adapters().load_sent(lora_name, config_dict, weights, pinned))

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Unloads a LoRA adapter once the requests that have it have ended."""
        self._run(self._adapters().unload(lora_name))

    def _adapters(self) -> ServedAdapters:
        if self._manager.adapters is None:
            raise RequestError("this engine takes no LoRA adapters; create it with enable_lora=True")
        return self._manager.adapters

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Gives GPU memory back (`weights`, `kv_cache`, `cuda_graph`; all if not given); needs `enable_memory_saver`.
        The weights are kept in main memory with `enable_weights_cpu_backup`, and are sent or read again without."""
        self._run(self._sleeper().sleep(tags, self.server_args.enable_weights_cpu_backup))

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Takes GPU memory again that `release_memory_occupation` gave back."""
        self._run(self._sleeper().wake(tags))

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Gives all GPU memory back. level: 1 keeps the weights in main memory, 2 does not. mode: requests that run are
        aborted, waited for (`wait`) or kept (`keep`)."""
        self._run(self._sleeper().sleep(None, level == 1, mode))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wakes the engine from `sleep`."""
        self._run(self._sleeper().wake(tags))

    def is_sleeping(self) -> bool:
        """Returns whether any memory is given back."""
        return bool(self._manager.state.asleep)

    def _sleeper(self) -> Sleeper:
        if self._manager.sleeper is None:
            raise RequestError("this engine keeps its memory; create it with enable_memory_saver=True")
        return self._manager.sleeper

    def flush_cache(self) -> bool:
        """Empties the prefix cache. Returns False while requests run."""
        return self._run(self._manager.control("flush_cache")).ok

    def get_server_info(self) -> dict[str, Any]:
        """Returns all resolved flags, the plan, and `internal_states` of the schedulers."""
        states = self._run(self._manager.internal_states())  # their answer follows the message that has the plan
        return {**self.server_args.public_dict(), **self._manager.scheduler_info, "internal_states": states}

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Returns the model's tokenizer, None with --skip-tokenizer-init."""
        return self._manager.tokenizer

    def shutdown(self) -> None:
        """Ends the processes; running requests fail. May be repeated."""
        if self._closed:
            return
        self._closed = True
        self._loop.call_soon_threadsafe(self._manager.begin_shutdown)
        self._loop.call_soon_threadsafe(self._manager.mark_unhealthy, "the engine was shut down")
        parts: list[Callable[[], None]] = [self._handle.shutdown, self._manager.end_helpers]
        if self._state is not None:
            parts.append(self._state.close)
        close_together(parts)
        self._run(self._close_manager())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.shutdown()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _request(
        self,
        prompt: str | list[str] | None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None,
        input_ids: list[int] | list[list[int]] | None,
        media: tuple[NativeMedia, NativeMedia],
        stream: bool,
        require_reasoning: bool = False,
        **options: Any,
    ) -> GenerateRequest:
        given: dict[str, Any] = {"text": prompt, "input_ids": input_ids, "sampling_params": sampling_params}
        req = GenerateRequest(**given, stream=stream, **options)
        req.media = native_media(*media, req.num_prompts, req.is_batch)
        if require_reasoning:
            self._require_reasoning(req)
        return req

    def _require_reasoning(self, req: GenerateRequest) -> None:
        from sglang.srt.entrypoints.http_errors import ApiError  # imported late, as it loads HTTP modules
        from sglang.srt.entrypoints.http_state import ServerState
        from sglang.srt.entrypoints.native_reasoning import require_reasoning

        try:
            if self._state is None:
                self._state = ServerState(self.server_args)
                self._state.connect(self._manager)
            assert self._state.engine is not None
            require_reasoning(self._state.engine, req)
        except ApiError as error:
            raise RequestError(error.message, error.status) from None

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # an interrupted caller no longer wants the result
            future.cancel()
            raise

    async def _arun(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _iterate(self, req: GenerateRequest) -> Iterator[Result]:
        results = native_stream(self._manager, req, self.server_args.incremental_streaming_output)
        try:
            while (result := self._run(_next(results))) is not None:
                yield result
        finally:
            self._run(_close(results))

    async def _aiterate(self, req: GenerateRequest) -> AsyncIterator[Result]:
        results = native_stream(self._manager, req, self.server_args.incremental_streaming_output)
        try:
            while (result := await self._arun(_next(results))) is not None:
                yield result
        finally:
            await self._arun(_close(results))

    async def _abort(self, rid: str, abort_all: bool) -> None:
        if abort_all:
            self._manager.abort_all()
        else:
            self._manager.abort(rid)

    async def _close_manager(self) -> None:
        self._manager.close()

    def _engine_failed(self, replica: int, message: str) -> None:
        self._loop.call_soon_threadsafe(self._manager.lose_replica, replica, message)


async def _next(results: AsyncIterator[Result]) -> Result | None:
    return await anext(results, None)


async def _close(results: Any) -> None:
    await results.aclose()
