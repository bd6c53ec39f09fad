"""Transfer of shared arrays to machines that do not share the front's memory (--nnodes, --use-ray).

An array is sent to a replica in parts; all its machines must have a part before the next one is sent. So the bytes
under way are bounded, and a request is sent only after its arrays. An array stays until nothing here needs it.
Everything runs on the event loop of the tokenizer manager.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.media.media_files import MediaFiles
from sglang.srt.managers.front.replica import Replica
from sglang.srt.managers.wire.io_struct import ArrayPart, ControlReply, MediaItem
from sglang.srt.utils import shared_array
from sglang.srt.utils.shared_array import SharedArray

PART_BYTES = 4 << 20
"""Bytes of a part. Each is among the messages of a step, which waits for it."""
ANSWER_S = 60.0


class ArrayTransfers:
    """Sends shared arrays to the replicas of other machines."""

    def __init__(self, files: MediaFiles, replicas: Sequence[Replica], tell: Callable[[], None]) -> None:
        """tell(): sends the replicas their lists `arrays_released`."""
        self._files, self._replicas, self._tell = files, replicas, tell
        self._locks = [asyncio.Lock() for _ in replicas]
        self._sent: dict[str, dict[int, asyncio.Task[None]]] = {}
        """By the array's name: what sends it, or has sent it, to a replica."""
        self._under_way: set[asyncio.Task[None]] = set()
        files.on_removal = self._gone

    def close(self) -> None:
        for task in self._under_way:
            task.cancel()

    async def send_to_machines(self, replica: Replica, items: Sequence[MediaItem]) -> None:
        """Returns when all machines of the replica have the pixels of the items, which the caller holds. Raises
        RequestError 503."""
        for array in [item.pixels for item in items]:
            of_array = self._sent.setdefault(array.name, {})
            if replica.index not in of_array:
                task = of_array[replica.index] = asyncio.ensure_future(self._send(replica, array))
                self._under_way.add(task)
                task.add_done_callback(self._ended)
            await asyncio.shield(of_array[replica.index])  # others may wait for it too

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # marks the error as retrieved, as perhaps nobody waited for it

    async def _send(self, replica: Replica, array: SharedArray) -> None:
        total, offset = shared_array.num_bytes(array), 0
        try:
            while offset < total and array.name in self._files:
                async with self._locks[replica.index]:
                    part = await asyncio.to_thread(_part, self._files.directory, array, offset)
                    if array.name not in self._files:  # no await between this check and the sending
                        return
                    if not part:
                        raise RequestError("The pixels of an image are gone; send the request again.", 503)
                    reply = await _answer(replica, ArrayPart(uuid.uuid4().hex, array, offset, part))
                if not reply.ok:
                    raise RequestError(reply.message, 503)
                offset += len(part)
        except BaseException:
            self._forget(replica, array.name)
            raise

    def _forget(self, replica: Replica, name: str) -> None:
        """Has the replica drop the parts that it got; the next `send_to_machines` sends them again."""
        of_array = self._sent.get(name, {})
        if of_array.pop(replica.index, None) is not None:
            self._end([replica], name)

    def _gone(self, name: str) -> None:
        self._end([self._replicas[index] for index in self._sent.pop(name, {})], name)

    def _end(self, replicas: Sequence[Replica], name: str) -> None:
        told = [replica for replica in replicas if replica.failure is None]
        for replica in told:
            replica.arrays_released.append(name)
        if told:
            self._tell()


async def _answer(replica: Replica, part: ArrayPart) -> ControlReply:
    """Sends a part before anything else runs. Raises RequestError."""
    try:
        return await asyncio.wait_for(replica.ask(part), ANSWER_S)
    except asyncio.TimeoutError:
        raise RequestError(f"The server did not take an image within {ANSWER_S:g} seconds.", 503) from None


def _part(directory: Path, array: SharedArray, offset: int) -> bytes:
    """Reads a part, in a thread. It is empty if the array is gone."""
    try:
        with shared_array.opened(directory, array) as file:
            file.seek(offset)
            return file.read(PART_BYTES)
    except FileNotFoundError:
        return b""
