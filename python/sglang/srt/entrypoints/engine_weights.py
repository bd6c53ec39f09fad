"""The methods of `Engine` that replace weights, by the names that trainers call."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.sent_weights import BUCKET, FLAT, LOAD_FORMATS, written
from sglang.srt.managers.front.weight_updates import UpdateOptions, WeightUpdates
from sglang.srt.utils.sent_tensors import METADATA, parts_of

if TYPE_CHECKING:
    import torch

    from sglang.srt.managers.front.tokenizer_manager import TokenizerManager

T = TypeVar("T")
Result = tuple[bool, str]


class EngineWeights:
    """Updates return (success, message), as trainers expect; none of them raises for wrong weights."""

    _manager: TokenizerManager

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    @property
    def _weights(self) -> WeightUpdates:
        return self._manager.weights

    def _result(self, work: Coroutine[Any, Any, str]) -> Result:
        try:
            return True, self._run(work)
        except RequestError as error:
            return False, error.message

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | None = None,
        abort_all_requests: bool = False,
        keep_pause: bool = False,
    ) -> tuple[bool, str, int]:
        """Replaces all weights by those of a directory. Returns (success, message, requests that were paused)."""
        how = UpdateOptions(flush_cache, abort_all_requests, weight_version, keep_pause=keep_pause)
        try:
            return (True, *self._run(self._weights.from_disk(model_path, load_format, how)))
        except RequestError as error:
            return False, error.message, 0

    def update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | None = None,
        selector: str = "all",
    ) -> Result:
        """Writes tensors, in the names of the checkpoint. With load_format `flattened_bucket`: pairs of the name
        `flattened_tensor` and the tensor, and `metadata` and a list of objects with name, dtype, shape and
        start_idx (an element of the flat tensor)."""
        how = UpdateOptions(flush_cache, False, weight_version, selector)
        return self._result(self._from_tensors(dict(named_tensors), load_format, how))

    async def _from_tensors(self, named: dict[str, Any], load_format: str | None, how: UpdateOptions) -> str:
        from safetensors.torch import save_file

        if load_format not in LOAD_FORMATS:
            raise RequestError(f"load_format must be one of {LOAD_FORMATS}")
        bucket = None
        if load_format == BUCKET:
            bucket = parts_of(named.pop(METADATA), named[FLAT].element_size())
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named.items()}
        async with written([partial(save_file, tensors)]) as files:
            return await self._weights.from_files(files, bucket, how)

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
    ) -> Result:
        """Connects all ranks with a trainer, which is rank 0."""
        values = {
            "master_address": master_address, "master_port": master_port, "rank_offset": rank_offset,
            "world_size": world_size, "group_name": group_name, "backend": backend,
        }  # fmt: skip
        return self._result(self._weights.init_group(values))

    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> Result:
        """Leaves a trainer's group."""
        return self._result(self._weights.destroy_group(group_name))

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[Any],
        shapes: list[Any],
        group_name: str = "weight_update_group",
        flush_cache: bool = True,
        weight_version: str | None = None,
        selector: str = "all",
    ) -> Result:
        """Receives tensors that the trainer broadcasts, one after the other."""
        kinds = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        tensors = list(zip(names, kinds, map(list, shapes), strict=True))
        how = UpdateOptions(flush_cache, False, weight_version, selector)
        return self._result(self._weights.from_group(group_name, tensors, how))

    def begin_weight_update(self, selector: str = "all") -> Result:
        """Begins an update in several calls."""
        return self._result(self._weights.begin(selector))

    def end_weight_update(self, selector: str = "all") -> Result:
        """Ends an update in several calls; quantized weights are replaced now."""
        return self._result(self._weights.end())

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """Returns the first values of a tensor of the first rank. Raises RequestError."""
        return self._run(self._weights.by_name(name, truncate_size))

    def check_weights(self, action: str = "checksum", selector: str = "all") -> dict[str, Any]:
        """Hashes the weights, or compares them with a snapshot, as /weights_checker does. Raises RequestError."""
        return self._run(self._weights.check(action, selector, []))

    def update_weight_version(self, new_version: str, abort_all_requests: bool = True) -> Result:
        """Gives the served weights another name in replies."""
        return self._result(self._weights.set_version(new_version, abort_all_requests))

    def pause_generation(self, mode: str = "abort") -> None:
        """Stops generation; `mode` (abort, retract, in_place) says what happens to the requests of now."""
        self._run(self._manager.control("pause", {"mode": mode}))

    def continue_generation(self) -> None:
        """Goes on with generation."""
        self._run(self._manager.control("resume"))
