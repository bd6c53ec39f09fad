"""The front's adapters beside schedulers that are played: which stay in main memory, and which are read again."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from sglang.srt.managers.front.adapters import ServedAdapters
from sglang.srt.managers.front.control_calls import Undo
from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.managers.wire.io_struct import ControlReply, ControlReq
from sglang.srt.server_args import ServerArgs


class Schedulers:
    """Notes what the front asks for. `failure`: as a replica has it that ends."""

    failure: str | None = None
    index = 0

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.loaded: set[str] = set()
        self.most = 0
        self.refuses = ""

    def ask(self, message: ControlReq) -> asyncio.Future[ControlReply]:
        """As a replica."""
        return asyncio.ensure_future(self.control(message.kind, message.args, 1.0, None))

    async def control(self, kind: str, args: dict[str, Any], timeout: float, undo: Undo | None) -> ControlReply:
        await asyncio.sleep(0)
        adapter = args["adapter"]
        self.calls.append((kind, adapter))
        if kind == self.refuses:
            return ControlReply("", False, "refused")
        if kind == "load_adapter":
            self.loaded.add(adapter)
        elif kind == "unload_adapter":
            self.loaded.discard(adapter)
        self.most = max(self.most, len(self.loaded))
        return ControlReply("")


class Front:
    """Adapters 0 to 4 on disk, of which two stay in main memory."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.schedulers, self.running = Schedulers(), set[str]()
        flags: dict[str, Any] = {"max_loras_per_batch": 2, "max_loaded_loras": 2, "max_lora_rank": 8, **options}
        args = ServerArgs.from_kwargs(model_path="m", device="cpu", enable_lora=True, **flags)
        self.adapters = ServedAdapters(args, self.schedulers.control, self.running.__contains__, root)
        self.folders = [write(root / f"adapter {number}", number) for number in range(5)]

    async def load(self, number: int, **options: Any) -> str:
        return (await self.adapters.load(f"a{number}", str(self.folders[number]), **options)).id


def write(folder: Path, value: int) -> Path:
    folder.mkdir()
    tensors = {f"m.q_proj.lora_{side}.weight": torch.full((2, 2), float(value)) for side in "AB"}
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_the_oldest_leaves_and_is_read_again(tmp_path: Path) -> None:
    async def run() -> None:
        front = Front(tmp_path)
        adapters, schedulers = front.adapters, front.schedulers
        ids = [await front.load(number) for number in range(2)]
        adapters.release(await adapters.hold("a0"))
        ids.append(await front.load(2))  # a1 was asked for longest ago
        assert schedulers.loaded == {ids[0], ids[2]} and [*adapters.loaded] == ["a0", "a1", "a2"]
        held = await adapters.hold(["a1", None, "nobody", 7])
        assert [*held] == [ids[1]] and schedulers.loaded == {ids[1], ids[2]}
        adapters.release(held)
        assert schedulers.most == 2
        await adapters.unload("a0")  # it is not in main memory
        assert schedulers.loaded == {ids[1], ids[2]} and adapters.find("a0") is None

    asyncio.run(run())


def test_who_has_requests_stays(tmp_path: Path) -> None:
    async def run() -> None:
        front = Front(tmp_path)
        adapters, schedulers = front.adapters, front.schedulers
        ids = [await front.load(number) for number in range(2)]
        held = await adapters.hold("a0")
        front.running.add(ids[1])
        waits = asyncio.create_task(front.load(2))
        await asyncio.sleep(0.1)
        assert not waits.done() and schedulers.loaded == {*ids}
        adapters.release(held)
        assert schedulers.loaded == {ids[1], await waits} - {ids[0]}
        with pytest.raises(RequestError, match="more than --max-loaded-loras 2"):
            await adapters.hold(["a0", "a1", "a2"])

    asyncio.run(run())


def test_a_pinned_adapter_stays(tmp_path: Path) -> None:
    async def run() -> None:
        front = Front(tmp_path)
        first = await front.load(0, pinned=True)
        for number in range(1, 5):
            assert front.schedulers.loaded >= {first}
            await front.load(number)
        assert front.schedulers.loaded == {first, front.adapters.require("a4").id}

    asyncio.run(run())


def test_many_calls_at_once_end(tmp_path: Path) -> None:
    """Pairs of adapters, of which only two fit, held by twenty calls, some of which leave while they wait."""

    async def call(adapters: ServedAdapters, schedulers: Schedulers, number: int) -> None:
        held = await adapters.hold([f"a{number % 5}", f"a{(number + 1 + number % 3) % 5}"])
        try:
            for _ in range(3):
                assert schedulers.loaded >= {*held}
                await asyncio.sleep(0)
        finally:
            adapters.release(held)

    async def run() -> None:
        front = Front(tmp_path)
        for number in range(5):
            await front.load(number)
        calls = [asyncio.create_task(call(front.adapters, front.schedulers, number)) for number in range(20)]
        await asyncio.sleep(0.01)
        for each in calls[1::4]:
            each.cancel()
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert all(each is None or isinstance(each, asyncio.CancelledError) for each in done), done
        assert done.count(None) >= 15 and front.schedulers.most == 2
        for number in range(5):  # nothing is held for ever
            await asyncio.wait_for(front.adapters.unload(f"a{number}"), 300)
        assert not front.schedulers.loaded

    asyncio.run(run())


@pytest.mark.parametrize("refuses", ["read_adapter", "load_adapter"])
def test_a_refusal_changes_nothing(tmp_path: Path, refuses: str) -> None:
    async def run() -> None:
        front = Front(tmp_path, max_loaded_loras=None)
        first = await front.load(0)
        front.schedulers.refuses = refuses
        sent = (front.folders[2] / "adapter_model.safetensors").read_bytes()
        config = json.loads((front.folders[2] / "adapter_config.json").read_text())
        before = sorted(tmp_path.iterdir())
        for attempt in (
            front.adapters.load("a1", str(front.folders[1])),
            front.adapters.load("a0", str(front.folders[1]), replace=True),
            front.adapters.load_sent("sent", config, sent),
        ):
            with pytest.raises(RequestError, match="refused"):
                await attempt
        assert {name: each.id for name, each in front.adapters.loaded.items()} == {"a0": first}
        assert sorted(tmp_path.iterdir()) == before and front.schedulers.loaded == {first}

    asyncio.run(run())


@pytest.mark.parametrize("refuses", ["read_adapter", "load_adapter"])
def test_a_failure_at_one_replica_is_undone_at_the_other(tmp_path: Path, refuses: str) -> None:
    """With the tokenizer manager's own control calls. What a replica has read alone is forgotten, too."""

    async def run() -> None:
        front = Front(tmp_path, max_loaded_loras=None)
        replicas = [front.schedulers, Schedulers()]
        replicas[1].index = 1
        manager = SimpleNamespace(replicas=replicas, _asked=lambda: replicas)
        control: Any = partial(TokenizerManager.control, manager)
        front.adapters._control = control
        first = await front.load(0)
        for failing, other in (replicas, replicas[::-1]):
            failing.refuses = refuses
            before = len(other.calls)
            with pytest.raises(RequestError, match=f"Replica {failing.index}: refused"):
                await front.load(1)
            calls = other.calls[before:]
            assert calls[-1][0] == "unload_adapter" and calls[-1][1] != first
            assert failing.loaded == other.loaded == {first} and [*front.adapters.loaded] == ["a0"]
            failing.refuses = ""
        second = await front.load(1)
        assert all(replica.loaded == {first, second} for replica in replicas)

    asyncio.run(run())
