"""Pixels on their way to machines that do not share the front's memory: parts in order and one at a time, what is
refused, and that nothing stays of what ended on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.media import array_transfers
from sglang.srt.managers.front.media.array_transfers import ArrayTransfers
from sglang.srt.managers.front.media.media_files import MediaFiles
from sglang.srt.managers.front.replica import Replica
from sglang.srt.managers.scheduler import received_arrays
from sglang.srt.managers.scheduler.received_arrays import ReceivedArrays
from sglang.srt.managers.wire import ipc
from sglang.srt.managers.wire.io_struct import ArrayPart, ArraysReleased, ControlReply, SchedulerInput
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import shared_array
from sglang.srt.utils.media_item import MediaItem
from sglang.srt.utils.shared_array import SharedArray, SharedArrayError

PART = 1000
PIXELS = np.arange(8 * 100, dtype=np.float32).reshape(8, 100)
"""Four parts, the last of which is short."""


def machine(directory: Path, **args: Any) -> ReceivedArrays:
    """Of a server on two machines: the second one; of a Ray cluster with `use_ray`: the first."""
    several = {"tp_size": 2, "nnodes": 2, "node_rank": 1, "dist_init_addr": "host:1"}
    return ReceivedArrays(replace(ServerArgs.from_kwargs(model_path="m"), **{**several, **args}), directory)


class Bench:
    """A front whose replicas the test plays by hand; `there`: the directory of a machine of each."""

    def __init__(self, folder: Path, num_replicas: int = 1) -> None:
        self.front = folder / "front"
        self.there = [folder / str(index) for index in range(num_replicas)]
        for directory in (self.front, *self.there):
            directory.mkdir()
        self.ports = ipc.Ports.create_many(num_replicas)
        self.replicas = [Replica(index, ports) for index, ports in enumerate(self.ports)]
        self.inboxes = [ipc.scheduler_inbox(ports) for ports in self.ports]
        self.files = MediaFiles(self.front)
        self.transfers = ArrayTransfers(self.files, self.replicas, self.tell)
        self.machines = [machine(directory) for directory in self.there]

    def tell(self) -> None:
        for replica in self.replicas:
            replica.send_endings()

    def item(self) -> MediaItem:
        """Held once."""
        array = shared_array.write(self.front, PIXELS)
        item = MediaItem(kind="image", digest=bytes(32), spans=[(0, 1)], grid=(1, 2, 4), pixels=array)
        self.files.hold([item])
        return item

    async def received(self, replica: int = 0) -> SchedulerInput:
        while (message := self.inboxes[replica].recv_nowait()) is None:
            await asyncio.sleep(0.001)
        return message

    def reply(self, answer: ControlReply, replica: int = 0) -> None:
        self.replicas[replica].replies[answer.id].set_result(answer)

    async def serve(self, replica: int = 0) -> None:
        """As its machine does, for ever."""
        while True:
            message = await self.received(replica)
            if isinstance(message, ArraysReleased):
                self.machines[replica].remove(message)
            else:
                assert isinstance(message, ArrayPart) and len(message.data) <= PART
                self.reply(self.machines[replica].add(message), replica)

    def close(self) -> None:
        self.transfers.close()
        for replica in self.replicas:
            replica.close()
        for inbox in self.inboxes:
            inbox.close()
        self.ports[0].remove()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_transfers, "PART_BYTES", PART)
    monkeypatch.setattr(received_arrays.parallel_state, "rank", lambda: 1)  # of two, the one of the second machine


def play(test: Callable[[Bench], Awaitable[None]], folder: Path, num_replicas: int = 1) -> None:
    async def main() -> None:
        bench = Bench(folder, num_replicas)
        try:
            await asyncio.wait_for(test(bench), 300)
        finally:
            bench.close()

    asyncio.run(main())


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_pixels_come_to_each_replica_that_needs_them_once_and_go_with_the_front_s(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        serving = [asyncio.ensure_future(bench.serve(index)) for index in range(2)]
        item, later = bench.item(), bench.item()
        await asyncio.gather(*(bench.transfers.send_to_machines(bench.replicas[0], [item, later]) for _ in range(3)))
        assert names(bench.there[0]) == names(bench.front) and not names(bench.there[1])
        for each in (item, later):
            assert np.array_equal(shared_array.read(bench.there[0], each.pixels), PIXELS)
        await bench.transfers.send_to_machines(bench.replicas[1], [item])
        assert names(bench.there[1]) == [item.pixels.name]
        bench.files.hold([item])  # a session
        bench.files.release([item])
        await bench.transfers.send_to_machines(bench.replicas[0], [item])
        assert item.pixels.name in names(bench.there[0]), "somebody holds it"
        bench.files.release([item, later])
        await until(lambda: not names(bench.there[0]) and not names(bench.there[1]))
        for task in serving:
            task.cancel()

    play(test, tmp_path, 2)


def test_one_part_is_on_its_way_at_a_time(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        items = [bench.item() for _ in range(3)]
        calls = [asyncio.ensure_future(bench.transfers.send_to_machines(bench.replicas[0], [item])) for item in items]
        for _ in range(3 * 4):
            part = await bench.received()
            await asyncio.sleep(0.005)
            assert bench.inboxes[0].recv_nowait() is None and len(bench.replicas[0].replies) == 1
            assert isinstance(part, ArrayPart)
            bench.reply(ControlReply(part.id))
        await asyncio.gather(*calls)

    play(test, tmp_path)


def test_who_leaves_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    """And takes nothing from another request with the same picture."""

    async def test(bench: Bench) -> None:
        item = bench.item()
        bench.files.hold([item])
        calls = [asyncio.ensure_future(bench.transfers.send_to_machines(bench.replicas[0], [item])) for _ in range(2)]
        part = await bench.received()
        assert isinstance(part, ArrayPart)
        calls[0].cancel()
        bench.files.release([item])
        await asyncio.sleep(0.005)
        bench.reply(bench.machines[0].add(part))
        part = await bench.received()
        assert isinstance(part, ArrayPart) and part.offset == PART and names(bench.there[0])
        bench.files.release([item])  # the other one leaves, too
        assert await bench.received() == ArraysReleased([item.pixels.name])
        bench.reply(bench.machines[0].add(part))
        bench.machines[0].remove(ArraysReleased([item.pixels.name]))
        await calls[1]  # whose request is not sent any more
        await asyncio.sleep(0.005)
        assert bench.inboxes[0].recv_nowait() is None and not names(bench.there[0])

    play(test, tmp_path)


def test_a_machine_without_room_refuses_the_picture_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(bench: Bench) -> None:
        serving = asyncio.ensure_future(bench.serve())
        item, append = bench.item(), shared_array.append

        def full(directory: Path, array: SharedArray, offset: int, data: bytes) -> None:
            if offset:
                (directory / array.name).unlink()
                raise OSError(28, "No space left on device")
            append(directory, array, offset, data)

        with monkeypatch.context() as patch:
            patch.setattr(shared_array, "append", full)
            with pytest.raises(RequestError, match="no room in shared memory") as caught:
                await bench.transfers.send_to_machines(bench.replicas[0], [item])
        assert caught.value.status_code == 503 and not names(bench.there[0])
        await bench.transfers.send_to_machines(bench.replicas[0], [item])  # there is room again
        assert np.array_equal(shared_array.read(bench.there[0], item.pixels), PIXELS)
        serving.cancel()

    play(test, tmp_path)


def test_a_replica_that_fails_on_the_way_fails_the_request(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        replica, item = bench.replicas[0], bench.item()
        call = asyncio.ensure_future(bench.transfers.send_to_machines(replica, [item]))
        await bench.received()
        replica.failure = "it died"
        replica.fail_replies(RequestError("it died", 503))
        with pytest.raises(RequestError, match="it died"):
            await call
        with pytest.raises(RequestError, match="Replica 0 of the server has failed"):
            await bench.transfers.send_to_machines(replica, [item])
        bench.files.release([item])
        assert bench.inboxes[0].recv_nowait() is None and not replica.arrays_released

    play(test, tmp_path)


@pytest.mark.parametrize(
    ("changes", "rank", "writes"),
    [
        ({}, 1, True),
        ({"node_rank": 0}, 0, False),
        ({"tp_size": 4}, 2, True),
        ({"tp_size": 4}, 3, False),
        ({"pp_size": 2, "tp_size": 1}, 0, True),
        ({"pp_size": 2, "tp_size": 1, "node_rank": 0}, 1, False),
        ({"nnodes": 1, "node_rank": 0, "dist_init_addr": None}, 0, False),
        ({"node_rank": 0, "use_ray": True}, 0, True),
        ({"nnodes": 1, "node_rank": 0, "dist_init_addr": None, "use_ray": True}, 0, True),
        ({"nnodes": 1, "node_rank": 0, "dist_init_addr": None, "use_ray": True}, 1, False),
    ],
)
def test_one_rank_of_each_machine_without_the_front_s_memory_writes(
    changes: dict[str, Any], rank: int, writes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(received_arrays.parallel_state, "rank", lambda: rank)
    arrays = machine(tmp_path, **changes)
    shared = SharedArray("array-1", [2, 3], "uint8")
    assert arrays.add(ArrayPart("id", shared, 0, b"123456")).ok
    assert names(tmp_path) == (["array-1"] if writes else [])
    arrays.remove(ArraysReleased(["array-1", "never-there"]))
    assert not names(tmp_path)


@pytest.mark.parametrize(
    ("array", "offset", "size"),
    [
        (SharedArray("../array", [6], "uint8"), 0, 6),
        (SharedArray("array", [6], "uint8"), 0, 7),
        (SharedArray("array", [6], "uint8"), -1, 1),
        (SharedArray("array", [6], "int3"), 0, 1),
        (SharedArray("begun", [6], "uint8"), 3, 1),
    ],
)
def test_parts_that_do_not_fit_are_refused(array: SharedArray, offset: int, size: int, tmp_path: Path) -> None:
    begun = SharedArray("begun", [6], "uint8")
    shared_array.append(tmp_path, begun, 0, b"12")
    with pytest.raises(SharedArrayError):
        shared_array.append(tmp_path, array, offset, bytes(size))
    assert names(tmp_path) == ([] if array.name == "begun" else ["begun"])
    with pytest.raises((FileExistsError, FileNotFoundError)):
        shared_array.append(tmp_path, begun, 0 if names(tmp_path) else 2, b"12")
