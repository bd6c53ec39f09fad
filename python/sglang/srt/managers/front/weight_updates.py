"""New weights for the running engine, as clients ask for them: one update at a time, all replicas together.

An update waits until no request runs, and holds back new ones, unless generation is paused.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.errors import UserError
from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.sent_weights import check_specs
from sglang.srt.managers.wire.io_struct import ControlReply

if TYPE_CHECKING:
    from sglang.srt.managers.front.sleeper import Sleeper
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.engine_state import EngineState

logger = logging.getLogger(__name__)

UPDATE_LIMIT_S = 3600.0
"""Seconds for reading a checkpoint on all ranks, or for a trainer to come and to send."""
WAIT_LIMIT_S = 600.0
"""Seconds that an update waits for requests that run."""
POLL_S = 0.01


class UpdateOptions(msgspec.Struct):
    """What most updates have in common."""

    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    selector: str = "all"
    keep_pause: bool = False


class Front(Protocol):
    """What an update needs of the front (`TokenizerManager`)."""

    args: ServerArgs
    state: EngineState
    sleeper: Sleeper | None
    weight_version: str

    @property
    def num_unfinished(self) -> int:
        """Returns the number of sequences that have not ended."""

    def abort_all(self) -> None:
        """Ends every request."""

    async def control(self, kind: str, args: dict[str, Any] | None = None, timeout: float = 60.0) -> ControlReply:
        """Asks the schedulers of all replicas."""

    async def control_each(
        self, kind: str, timeout: float = 60.0, args: dict[str, Any] | None = None
    ) -> dict[int, ControlReply]:
        """Asks like `control`, and returns the replies by replica."""


class WeightUpdates:
    """The updates of one engine."""

    def __init__(self, manager: Front) -> None:
        self._manager = manager
        self.model_path = manager.args.model_path
        """Where the weights are from."""
        self.paused = False
        """Whether a client has paused generation."""
        self._one = asyncio.Lock()
        self.under_way: asyncio.Event | None = None
        """Set at the end of an update, for which new requests wait; None: there is none."""

    # --- calls --------------------------------------------------------------------------------------------------------

    async def from_disk(self, model_path: str, load_format: str | None, how: UpdateOptions) -> tuple[str, int]:
        """Replaces all weights by those of a directory. Returns what to say, and the number of requests that were
        paused. Raises RequestError; the old weights serve on then."""
        args = self._manager.args
        try:
            folder = await asyncio.to_thread(resolve_model_path, model_path, None, args.download_dir, True)
        except (UserError, OSError) as error:
            raise RequestError(f"The weights were not replaced: {error}") from None
        async with self._quiet(how):
            try:
                await self._ask("stage_weights", {"path": str(folder), "load_format": load_format or "auto"})
                await self._ask("commit_weights", self._change(how))
            except RequestError:
                await self._manager.control("drop_weights", {}, UPDATE_LIMIT_S)
                raise
            self.model_path = model_path
            return await self._settle("The weights were replaced.", how), self._num_paused()

    async def from_files(self, files: Sequence[Path], bucket: list[dict[str, Any]] | None, how: UpdateOptions) -> str:
        """Writes tensors of safetensors files, one for all ranks of tensor parallelism or one for each."""
        self._refuse_elsewhere()
        async with self._quiet(how):
            args = {"files": [str(file) for file in files], "bucket": bucket, "selector": how.selector}
            await self._ask("weights_from_tensors", args | self._change(how))
            return await self._settle("The tensors were written.", how)

    async def from_group(self, group: str, tensors: list[tuple[str, str, list[int]]], how: UpdateOptions) -> str:
        """Receives tensors from a trainer: (name, type, shape) each."""
        self._refuse_replicas()
        check_specs(tensors)
        async with self._quiet(how):
            args = {"group_name": group, "tensors": tensors, "selector": how.selector}
            await self._ask("weights_from_group", args | self._change(how))
            return await self._settle("The tensors were written.", how)

    async def begin(self, selector: str) -> str:
        """Begins an update in several calls."""
        await self._ask("begin_weights", {"selector": selector})
        return "The update has begun."

    async def end(self) -> str:
        """Ends an update in several calls: with quantized weights, only now they are replaced."""
        async with self._quiet(UpdateOptions()):
            await self._ask("end_weights", self._change(UpdateOptions()))
            await self._go_on()
        return "The update has ended."

    async def init_group(self, values: dict[str, Any]) -> str:
        """Connects all ranks with a trainer."""
        self._refuse_replicas()
        await self._ask("init_weights_group", values)
        return f"The group {values['group_name']} is connected."

    async def destroy_group(self, name: str) -> str:
        """Leaves a trainer's group."""
        await self._ask("destroy_weights_group", {"group_name": name})
        return f"The group {name} is closed."

    async def set_version(self, version: str, abort_all: bool) -> str:
        """Gives the served weights another name."""
        if abort_all:
            self._manager.abort_all()
        await self._ask("weight_version", {"version": version})
        self._manager.weight_version = version
        return "The version was changed."

    async def by_name(self, name: str, truncate_size: int) -> list[Any]:
        """Returns the first values of a tensor; with several replicas a list for each."""
        replies = await self._manager.control_each(
            "weights_by_name", 60.0, {"name": name, "truncate_size": truncate_size}
        )
        values = []
        for reply in replies.values():
            if not reply.ok:
                raise RequestError(reply.message)
            values.append(reply.data["values"])
        return values[0] if len(values) == 1 else values

    async def check(self, action: str, selector: str, skip: list[str]) -> dict[str, Any]:
        """Hashes, keeps or compares the weights."""
        asked = {"action": action, "selector": selector, "skip": skip, "key": uuid.uuid4().hex}
        if action == "reset_tensors":  # requests that run would go on with zeros
            async with self._quiet(UpdateOptions()):
                data = await self._ask("check_weights", asked)
        else:
            data = await self._ask("check_weights", asked)
        if "per_gpu_checksum" not in data:
            return {}
        layout = self._manager.args
        about = {"tp_size": layout.tp_size, "pp_size": layout.pp_size, "dp_size": layout.dp_size}
        ranks = [
            {"checksums": data["checksums"] if i == 0 else {}, "per_gpu_checksum": each, "parallelism_info": about}
            for i, each in enumerate(data["per_gpu_checksum"])
        ]
        return {"ranks": ranks, "per_engine_checksum": data["per_gpu_checksum"][0] if len(ranks) == 1 else ranks}

    async def wait(self) -> None:
        """Returns once no update holds requests back."""
        while self.under_way is not None:
            await self.under_way.wait()

    # --- inside -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _quiet(self, how: UpdateOptions) -> AsyncIterator[None]:
        """Has the engine for one update: nothing runs, or generation is paused."""
        manager = self._manager
        async with self._one:
            self.under_way = asyncio.Event()
            try:
                if how.abort_all_requests:
                    manager.abort_all()
                end = time.monotonic() + WAIT_LIMIT_S
                while manager.num_unfinished and not self.paused:
                    if time.monotonic() > end:
                        raise RequestError("Requests run: pause generation, or send abort_all_requests.", 503)
                    await asyncio.sleep(POLL_S)
                yield
                if how.keep_pause and not self.paused:
                    await manager.control("pause", {"mode": "in_place"})
            finally:
                ended, self.under_way = self.under_way, None
                ended.set()

    def _num_paused(self) -> int:
        return self._manager.num_unfinished if self.paused else 0

    def _change(self, how: UpdateOptions) -> dict[str, Any]:
        return {"key": uuid.uuid4().hex, "version": how.weight_version}

    async def _settle(self, said: str, how: UpdateOptions) -> str:
        manager = self._manager
        if how.weight_version is not None:
            manager.weight_version = how.weight_version
        flushed = not how.flush_cache or (await manager.control("flush_cache")).ok
        await self._go_on()
        if flushed:
            return said
        return f"{said} The cache was not flushed, as requests have a part of it; no other request is given that."

    async def _go_on(self) -> None:
        """Lets requests go on that waited for weights since a sleep."""
        if self._manager.sleeper is not None:
            await self._manager.sleeper.go_on()

    async def _ask(self, kind: str, args: dict[str, Any]) -> dict[str, Any]:
        reply: ControlReply = await self._manager.control(kind, args, UPDATE_LIMIT_S)
        if (state := reply.data.get("state")) is not None:
            self._manager.state.follow(state)
        if not reply.ok:
            raise RequestError(reply.message)
        return reply.data

    def _refuse_elsewhere(self) -> None:
        args = self._manager.args
        if args.nnodes > 1 or args.use_ray:
            raise RequestError("Tensors reach the ranks of one machine only; use /update_weights_from_distributed.")

    def _refuse_replicas(self) -> None:
        if self._manager.args.dp_size > 1:
            raise RequestError("A trainer's group has the ranks of one replica: this needs --dp-size 1.")
