"""A server inside a trainer's process and event loop, by SGLang's names, as verl starts it in an actor of Ray:

    manager, template, info, *_ = Engine._launch_subprocesses(server_args=args)
    set_global_state(_GlobalState(tokenizer_manager=manager, template_manager=template, scheduler_info=info))
    uvicorn.Server(uvicorn.Config(app)).serve()
    manager.server_status = ServerStatus.Up

Processes, front and routes are those of every server. The trainer calls the manager in the event loop that serves.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang.srt.entrypoints.http_app import create_app
from sglang.srt.entrypoints.http_body import Body, parse_body
from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.http_native import GenerateBody, ProfileBody
from sglang.srt.entrypoints.http_state import ServerState
from sglang.srt.environ import adopt_environment
from sglang.srt.errors import UserError
from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.native_output import native_results, native_stream
from sglang.srt.managers.front.sleeper import Sleeper
from sglang.srt.managers.front.tokenizer_manager import ServerStatus
from sglang.srt.managers.launch import EngineHandle, launch_engine
from sglang.srt.managers.reap import close_together
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.common import set_ulimit

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)


def launch(args: ServerArgs) -> LaunchedManager:
    """Starts an engine, and returns when its processes are ready. Raises UserError for a wrong flag, model or file,
    EngineError if a process fails; no process is left then."""
    adopt_environment()
    args.check()
    if args.node_rank:
        raise UserError("machines with --node-rank above 0 have no engine: start them with `sglang serve`.")
    set_ulimit()
    state = ServerState(args)
    handle = launch_engine(args)
    try:
        state.connect(handle.manager)
        handle.wait_ready()
    except BaseException:
        close_together([state.close, handle.shutdown, handle.manager.end_helpers])
        handle.manager.close()
        raise
    return LaunchedManager(handle, state)


class LaunchedManager:
    """The front of such a server, by the names of SGLang's tokenizer manager. All calls raise RequestError."""

    def __init__(self, handle: EngineHandle, state: ServerState) -> None:
        self.server_args, self.state = state.args, state
        self._handle, self._manager = handle, handle.manager

    @property
    def server_status(self) -> ServerStatus:
        """Returns what /health says. Trainers set it once they serve, which changes nothing: `attach` has."""
        return self._manager.status

    @server_status.setter
    def server_status(self, status: ServerStatus) -> None:
        pass

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[dict[str, Any]]:
        """Yields the dicts of `/generate`: one, or with `stream` one a step."""
        body = _body(vars(obj), GenerateBody)
        if body.session_params or body.require_reasoning:
            raise RequestError("session_params and require_reasoning are for /generate: send the call there")
        call = body.to_request()
        if not call.stream:
            yield await native_results(self._manager, call)  # type: ignore[misc]  # a list for a batch
            return
        results = native_stream(self._manager, call, self.server_args.incremental_streaming_output)
        async with contextlib.aclosing(results):
            async for result in results:
                yield result

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Ends a request, or all."""
        if abort_all:
            self._manager.abort_all()
        else:
            self._manager.abort(rid)

    async def release_memory_occupation(self, obj: Any, request: Any = None) -> None:
        """Gives the memory of `obj.tags` back."""
        await self._sleeper().sleep(obj.tags, self.server_args.enable_weights_cpu_backup)

    async def resume_memory_occupation(self, obj: Any, request: Any = None) -> None:
        """Takes the memory of `obj.tags` again."""
        await self._sleeper().wake(obj.tags)

    async def flush_cache(self) -> bool:
        """Empties the prefix cache. Returns False while requests run."""
        return (await self._manager.control("flush_cache")).ok

    async def pause_generation(self, obj: Any) -> None:
        """Stops generation; `obj.mode` (abort, retract, in_place) says what happens to the requests of now."""
        await self._ask("pause", {"mode": obj.mode})

    async def continue_generation(self, obj: Any = None) -> None:
        """Goes on with generation."""
        await self._ask("resume", {})

    async def start_profile(self, **options: Any) -> None:
        """Traces the schedulers; refuses what /start_profile refuses."""
        _body(options, ProfileBody)
        await self._ask("start_profile", {})

    async def stop_profile(self) -> None:
        """Writes the traces."""
        await self._ask("stop_profile", {})

    async def attach(self) -> None:
        """Begins to listen to the processes, in the event loop that serves, and loads what flags name."""
        loop, manager = asyncio.get_running_loop(), self._manager
        manager.attach()

        def report(index: int, why: str) -> None:
            loop.call_soon_threadsafe(manager.lose_replica, index, why)

        self._handle.watch(report)
        await manager.load_corpus_file()
        await manager.load_adapters()
        manager.mark_up()

    def close(self) -> None:
        """Ends the processes; requests that run fail."""
        self._manager.begin_shutdown()
        self._manager.fail_all(RequestError("The server is shutting down.", 503))
        close_together([self._handle.shutdown, self._manager.end_helpers, self.state.close])
        self._manager.close()

    async def _ask(self, kind: str, args: dict[str, Any]) -> None:
        reply = await self._manager.control(kind, args)
        if not reply.ok:
            raise RequestError(reply.message or f"{kind} failed")

    def _sleeper(self) -> Sleeper:
        if self._manager.sleeper is None:
            raise RequestError("this engine keeps its memory; start it with enable_memory_saver=True")
        return self._manager.sleeper


@dataclass
class _GlobalState:
    """What a trainer serves."""

    tokenizer_manager: LaunchedManager
    template_manager: None = None
    scheduler_info: Any = None


class LaunchedApp:
    """The ASGI application of the server that this process has launched. Trainers may set attributes."""

    def __init__(self) -> None:
        self._manager: LaunchedManager | None = None
        self._app: ASGIApp | None = None

    def serve(self, manager: LaunchedManager) -> None:
        """Answers for this manager from now on."""
        self._manager, self._app = manager, create_app(manager.state)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._manager is None or self._app is None:
            raise RuntimeError("no server was launched: call Engine._launch_subprocesses and set_global_state first")
        if scope["type"] == "lifespan":
            await _live(self._manager, receive, send)
        else:
            await self._app(scope, receive, send)


async def _live(manager: LaunchedManager, receive: Receive, send: Send) -> None:
    """Begins with the start of the HTTP server in the event loop, and ends with it or with the loop."""
    await receive()
    try:
        await manager.attach()
    except BaseException as error:  # uvicorn takes one that leaves for an application without a start, and serves
        manager.close()
        if not isinstance(error, Exception):
            raise
        if not isinstance(error, (RequestError, UserError)):
            logger.exception("The server cannot start")
        await send({"type": "lifespan.startup.failed", "message": str(error)})
        return
    await send({"type": "lifespan.startup.complete"})
    try:
        await receive()
    finally:  # a loop that ends without the server cancels this
        manager.close()
    await send({"type": "lifespan.shutdown.complete"})


app = LaunchedApp()


def set_global_state(state: _GlobalState) -> None:
    """Makes `app` answer for a manager that `Engine._launch_subprocesses` has returned."""
    app.serve(state.tokenizer_manager)


def _body(fields: dict[str, Any], model: type[B]) -> B:
    """Returns a call as the routes read it, with their checks. Raises RequestError."""
    try:
        return parse_body(msgspec.json.encode(fields, enc_hook=_sendable), model)
    except ApiError as error:
        raise RequestError(error.message, error.status) from None


def _sendable(value: Any) -> Any:
    """Returns what a client would send in the place of an array or a picture. Raises RequestError for others."""
    from PIL import Image

    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Image.Image):
        written = io.BytesIO()
        value.convert("RGBA" if value.has_transparency_data else "RGB").save(written, "PNG")
        return base64.b64encode(written.getvalue()).decode()
    raise RequestError(f"a call cannot hold a {type(value).__name__}: send numbers, texts, arrays or pictures")
