"""The LoRA adapters that requests may name: loaded into every replica, unloaded when no request has them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.configs.adapters.arguments import NamedAdapter, checked, named_adapters
from sglang.srt.configs.adapters.files import content_id, read_adapter_files
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

    def __init__(self, args: ServerArgs, control: Control, in_use: Callable[[str], bool]) -> None:
        """control(kind, args, timeout, undo): the tokenizer manager's. in_use(id): whether a request of the adapter has
        not ended."""
        self._args, self._control, self._in_use = args, control, in_use
        self._by_name: dict[str, ServedAdapter] = {}
        self._leaving: set[str] = set()
        """Names of adapters that are being unloaded: requests get them no more."""
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

    async def load(self, name: str, path: str, pinned: bool = False, below: str | None = None) -> ServedAdapter:
        """Loads an adapter. below: the directory that it must be in; None: any. Raises RequestError."""
        return await asyncio.shield(asyncio.create_task(self._load(NamedAdapter(name, path, pinned), below)))

    async def unload(self, name: str) -> None:
        """Unloads an adapter once the requests that have it have ended. Raises RequestError 404 if there is none."""
        self.require(name)
        self._leaving.add(name)
        await asyncio.shield(asyncio.create_task(self._unload(name)))

    async def _load(self, adapter: NamedAdapter, below: str | None) -> ServedAdapter:
        async with self._changing:
            if adapter.name in self._by_name:
                raise RequestError(f"The LoRA adapter {adapter.name!r} is loaded already; unload it first.")
            if adapter.name == self._args.served_model_name:
                raise RequestError(f"{adapter.name!r} is the name of the model.")
            try:
                adapter_id = await asyncio.to_thread(_identify, adapter, below)
            except UserError as error:
                raise RequestError(str(error)) from None
            here = {"adapter": adapter_id}
            is_new = all(each.id != adapter_id for each in self._by_name.values())
            await self._ask("read_adapter", {**here, "path": str(Path(adapter.path).expanduser())})
            while not (await self._control("adapter_read", here, CALL_LIMIT_S, None)).ok:
                await asyncio.sleep(POLL_S)
            undo = Undo("unload_adapter", here) if is_new else None
            await self._ask("load_adapter", {**here, "pinned": adapter.pinned}, undo)
            served = ServedAdapter(adapter.name, adapter.path, adapter_id, adapter.pinned)
            self._by_name[adapter.name] = served
            return served

    async def _unload(self, name: str) -> None:
        async with self._changing:
            adapter = self._by_name.get(name)
            try:
                if adapter is None:  # another call has unloaded it meanwhile
                    return
                if not any(each.id == adapter.id for each in self._by_name.values() if each.name != name):
                    while self._in_use(adapter.id):
                        await asyncio.sleep(POLL_S)
                    await self._ask("unload_adapter", {"adapter": adapter.id})
                del self._by_name[name]
            finally:
                self._leaving.discard(name)

    async def _ask(self, kind: str, args: dict[str, Any], undo: Undo | None = None) -> None:
        reply = await self._control(kind, args, CALL_LIMIT_S, undo)
        if not reply.ok:
            raise RequestError(reply.message)


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
