"""The LoRA adapters that requests may name: loaded into every replica, unloaded when no request has them.

With --max-loaded-loras some of them may have left main memory. The next request of such a one waits until it is read
again from where it came.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.configs.adapters.arguments import NamedAdapter, checked, named_adapters
from sglang.srt.configs.adapters.config import CONFIG_NAME
from sglang.srt.configs.adapters.files import WEIGHTS_NAME, content_id, read_adapter_files
from sglang.srt.errors import UserError
from sglang.srt.managers.front.control_calls import Undo
from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.wire.io_struct import ControlReply
from sglang.srt.server_args import ServerArgs

CALL_LIMIT_S = 600.0
POLL_S = 0.02

Control = Callable[[str, dict[str, Any], float, "Undo | None"], Awaitable[ControlReply]]


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter that is loaded. `id`: of its content, as the schedulers know it."""

    name: str
    path: str
    id: str
    pinned: bool


class ServedAdapters:
    """The adapters by name. Changes are made one after another, and one that has begun is completed even if its client
    leaves."""

    def __init__(self, args: ServerArgs, control: Control, in_use: Callable[[str], bool], folder: Path) -> None:
        """control(kind, args, timeout, undo): the tokenizer manager's. in_use(id): whether a request of the adapter has
        not ended. folder: a directory of this server's own, for adapters that clients send."""
        self._args, self._control, self._in_use, self._folder = args, control, in_use, folder
        self._by_name: dict[str, ServedAdapter] = {}
        self._leaving: set[str] = set()
        """Names of adapters that are being unloaded: requests get them no more."""
        self._in_memory: dict[str, bool] = {}
        """Whether each adapter that the schedulers have is pinned, by its id. The one that was asked for last is at the
        end."""
        self._held: Counter[str] = Counter()
        """How many calls that are being prepared have an adapter, by its id."""
        self._changing = asyncio.Lock()

    @property
    def loaded(self) -> Mapping[str, ServedAdapter]:
        """Returns the adapters that requests may name, by name."""
        return {name: each for name, each in self._by_name.items() if name not in self._leaving}

    def find(self, name: str) -> ServedAdapter | None:
        """Returns an adapter that requests may name; None: there is none of this name."""
        return None if name in self._leaving else self._by_name.get(name)

    def require(self, name: str) -> ServedAdapter:
        """Returns an adapter. Raises RequestError 404 if requests may not name it."""
        adapter = self.find(name)
        if adapter is None:
            raise RequestError(f"There is no LoRA adapter {name[:256]!r}; /v1/models names those that are loaded.", 404)
        return adapter

    async def load_from_flags(self) -> None:
        """Loads the adapters of --lora-paths. Raises RequestError."""
        for adapter in named_adapters(self._args.lora_paths or ()):
            await self.load(adapter.name, adapter.path, adapter.pinned)

    async def load(
        self, name: str, path: str, pinned: bool = False, below: str | None = None, replace: bool = False
    ) -> ServedAdapter:
        """Loads an adapter. below: the directory that it must be in; None: any. replace: it takes the place of one that
        has its name, which requests that run keep. Raises RequestError."""
        work = self._load(NamedAdapter(name, path, pinned), below, replace)
        return await asyncio.shield(asyncio.create_task(work))

    async def load_sent(
        self, name: str, config: Mapping[str, Any], weights: bytes, pinned: bool = False
    ) -> ServedAdapter:
        """Loads an adapter of which a client sends adapter_config.json and the bytes of a safetensors file. Raises
        RequestError."""
        if self._args.nnodes > 1:
            raise RequestError(
                "An adapter that is sent reaches the first machine alone (--nnodes). Copy it to one directory of every"
                " machine, and load it from there (/load_lora_adapter)."
            )
        return await asyncio.shield(asyncio.create_task(self._load_sent(name, config, weights, pinned)))

    async def unload(self, name: str) -> None:
        """Unloads an adapter once the requests that have it have ended. Raises RequestError 404 if there is none."""
        self.require(name)
        self._leaving.add(name)
        await asyncio.shield(asyncio.create_task(self._unload(name)))

    async def hold(self, names: Any) -> Sequence[str]:
        """Returns the ids of the adapters that a call names, for `release`; until then they stay in main memory, and
        those that have left it are read again. names: as `lora_path`; unknown ones are left out. Raises RequestError
        for what cannot be read any more."""
        wanted = self._named(names)
        if all(adapter.id in self._in_memory for adapter in wanted):
            return self._take(wanted)
        work = asyncio.create_task(self._read_and_take(names))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(self._release_result)
            raise

    def _named(self, names: Any) -> Sequence[ServedAdapter]:
        given = [names] if isinstance(names, str) else names if isinstance(names, list) else []
        adapters = [self.find(name) for name in given if isinstance(name, str)]
        return [*{adapter.id: adapter for adapter in adapters if adapter is not None}.values()]

    def _take(self, wanted: Sequence[ServedAdapter]) -> Sequence[str]:
        ids = [adapter.id for adapter in wanted]
        self._held.update(ids)
        for each in ids:
            if each in self._in_memory:
                self._in_memory[each] = self._in_memory.pop(each)
        return ids

    async def _read_and_take(self, names: Any) -> Sequence[str]:
        """Reads what has left main memory. Calls that wait for their turn hold nothing, so none waits for another."""
        async with self._changing:
            wanted = self._named(names)
            pinned = sum(
                is_pinned and all(adapter.id != each for adapter in wanted)
                for each, is_pinned in self._in_memory.items()
            )
            most = self._args.max_loaded_loras
            if most is not None and len(wanted) + pinned > most:
                raise RequestError(
                    f"lora_path names {len(wanted)} adapters, more than --max-loaded-loras {most} has room for at once."
                )
            ids = self._take(wanted)
            try:
                for adapter in wanted:
                    if adapter.id not in self._in_memory:
                        await self._read(adapter)
            except BaseException:
                self.release(ids)
                raise
            return ids

    def _release_result(self, work: asyncio.Task[Sequence[str]]) -> None:
        """Releases what a call holds that has left meanwhile."""
        if not work.cancelled() and work.exception() is None:
            self.release(work.result())

    def release(self, ids: Sequence[str]) -> None:
        """Releases what `hold` returned."""
        self._held.subtract(ids)
        self._held = +self._held

    def _is_busy(self, adapter_id: str) -> bool:
        return self._held[adapter_id] > 0 or self._in_use(adapter_id)

    async def _load_sent(self, name: str, config: Mapping[str, Any], weights: bytes, pinned: bool) -> ServedAdapter:
        folder = Path(tempfile.mkdtemp(prefix="adapter-", dir=self._folder))
        try:
            await asyncio.to_thread(_write, folder, config, weights)
            return await self._load(NamedAdapter(name, str(folder), pinned), None, False)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    async def _load(self, adapter: NamedAdapter, below: str | None, replace: bool) -> ServedAdapter:
        async with self._changing:
            before = self._by_name.get(adapter.name)
            if before is not None and not replace:
                raise RequestError(f"The LoRA adapter {adapter.name!r} is loaded already; unload it first.")
            if adapter.name == self._args.served_model_name:
                raise RequestError(f"{adapter.name!r} is the name of the model.")
            try:
                adapter_id = await asyncio.to_thread(_identify, adapter, below)
            except UserError as error:
                raise RequestError(str(error)) from None
            served = ServedAdapter(adapter.name, adapter.path, adapter_id, adapter.pinned)
            await self._read(served)
            self._by_name[adapter.name] = served
            if before is not None:
                await self._forget(before)
            return served

    async def _read(self, adapter: ServedAdapter) -> None:
        """Lets all schedulers read an adapter into main memory, or none."""
        here = {"adapter": adapter.id}
        is_new = adapter.id not in self._in_memory
        if is_new:
            await self._make_room()
        undo = Undo("unload_adapter", here) if is_new else None
        await self._ask("read_adapter", {**here, "path": str(Path(adapter.path).expanduser())}, undo)
        while not (await self._control("adapter_read", here, CALL_LIMIT_S, None)).ok:
            await asyncio.sleep(POLL_S)
        await self._ask("load_adapter", {**here, "pinned": adapter.pinned}, undo)
        self._in_memory[adapter.id] = self._in_memory.pop(adapter.id, False) or adapter.pinned

    async def _make_room(self) -> None:
        """Waits until main memory may take one more adapter: the one that was asked for longest ago leaves it, of those
        that no request has. Fewer are pinned than there are slots, and main memory has as many places as these at
        least."""
        most = self._args.max_loaded_loras
        while most is not None and len(self._in_memory) >= most:
            idle = (each for each, pinned in self._in_memory.items() if not pinned and not self._is_busy(each))
            oldest = next(idle, None)
            if oldest is None:
                await asyncio.sleep(POLL_S)
            else:
                await self._drop(oldest)

    async def _drop(self, adapter_id: str) -> None:
        """Takes an adapter from main memory."""
        pinned = self._in_memory.pop(adapter_id)
        try:
            await self._ask("unload_adapter", {"adapter": adapter_id})
        except BaseException:
            self._in_memory[adapter_id] = pinned
            raise

    def _is_named(self, adapter_id: str) -> bool:
        return any(each.id == adapter_id for each in self._by_name.values())

    async def _unload(self, name: str) -> None:
        async with self._changing:
            adapter = self._by_name.get(name)
            try:
                if adapter is None:  # another call has unloaded it meanwhile
                    return
                del self._by_name[name]
                try:
                    await self._forget(adapter)
                except BaseException:
                    self._by_name[name] = adapter
                    raise
            finally:
                self._leaving.discard(name)

    async def _forget(self, adapter: ServedAdapter) -> None:
        """Takes an adapter that has lost its name from main memory once no request has it, unless another name has
        it, and removes the files that a client sent."""
        if not self._is_named(adapter.id):
            while self._is_busy(adapter.id):
                await asyncio.sleep(POLL_S)
            if adapter.id in self._in_memory:
                await self._drop(adapter.id)
        folder = Path(adapter.path)
        if folder.parent == self._folder and all(each.path != adapter.path for each in self._by_name.values()):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _ask(self, kind: str, args: dict[str, Any], undo: Undo | None = None) -> None:
        reply = await self._control(kind, args, CALL_LIMIT_S, undo)
        if not reply.ok:
            raise RequestError(reply.message, reply.data.get("status", 400))


def _write(folder: Path, config: Mapping[str, Any], weights: bytes) -> None:
    (folder / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
    (folder / WEIGHTS_NAME).write_bytes(weights)


def _identify(adapter: NamedAdapter, below: str | None) -> str:
    """Returns the id of an adapter after a look at its header. Raises UserError."""
    folder = checked(adapter).folder if below is None else _inside(checked(adapter), Path(below))
    try:
        return content_id(read_adapter_files(folder).folder)
    except OSError as error:
        raise UserError(f"the adapter {adapter.name!r} cannot be read: {error.strerror}.") from None


def _inside(adapter: NamedAdapter, root: Path) -> Path:
    """Returns the directory of an adapter. Raises UserError, which says nothing of what is elsewhere, for one that is
    not below `root`, also through links of it or of its files."""
    folder, root = Path(adapter.path).expanduser(), root.resolve()
    try:
        places = [folder.resolve(), *(each.resolve() for each in folder.glob("adapter_*") if folder.is_dir())]
    except (OSError, RuntimeError):
        places = [Path("/")]
    if not all(place.is_relative_to(root) for place in places):
        raise UserError(f"the adapter {adapter.name!r} is not below --allowed-local-lora-path.")
    return adapter.folder
