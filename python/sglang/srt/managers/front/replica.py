"""A replica from the front's point of view: its channels, its load, and its last statistics."""

from __future__ import annotations

import asyncio
from typing import Any

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.replica_router import ReplicaLoad
from sglang.srt.managers.wire import ipc
from sglang.srt.managers.wire.io_struct import (
    AbortReq,
    ArrayPart,
    ArraysReleased,
    ControlReply,
    ControlReq,
    SchedulerStats,
)


class Replica:
    """One replica. `index` counts from 0, like data parallel ranks."""

    def __init__(self, index: int, ports: ipc.Ports) -> None:
        self.index = index
        self.failure: str | None = None
        """Why it has ended."""
        self.load = ReplicaLoad(index)
        self.info: dict[str, Any] = {}
        """What its plan decided."""
        self.stats = SchedulerStats()
        self.inbox = ipc.tokenizer_inbox(ports)
        self.outbox = ipc.tokenizer_outbox(ports)
        self.replies: dict[str, asyncio.Future[ControlReply]] = {}
        """Control calls without an answer so far, by id."""
        self.aborts: dict[str, None] = {}
        """Sequences to abort, in order, that did not fit into the channel yet."""
        self.arrays_released: list[str] = []
        """Names of shared arrays that its machines have and nothing needs, which it has not been told yet."""

    def refuse_when_lost(self) -> None:
        """Raises RequestError if the replica has ended."""
        if self.failure is not None:
            raise RequestError(f"Replica {self.index} of the server has failed: {self.failure}", 503)

    def ask(self, message: ControlReq | ArrayPart) -> asyncio.Future[ControlReply]:
        """Sends a message now and returns a future of the answer, which fails when the replica does; cancel it to stop
        waiting. Raises RequestError if the channel is full or the replica has ended."""
        self.refuse_when_lost()
        try:
            self.outbox.try_send(message)
        except ipc.ChannelFull:
            raise RequestError("The server is overloaded; try again later.", 503) from None
        reply: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self.replies[message.id] = reply
        reply.add_done_callback(lambda _: self.replies.pop(message.id, None))
        return reply

    def send_endings(self) -> bool:
        """Sends pending aborts in one message, and names of arrays that are gone in another. Returns False if the
        channel is full; they then wait here, at most one for each sequence and array."""
        try:
            if self.aborts:
                self.outbox.try_send(AbortReq(list(self.aborts)))
                self.aborts.clear()
            if self.arrays_released:
                self.outbox.try_send(ArraysReleased(self.arrays_released))
                self.arrays_released = []
        except ipc.ChannelFull:
            return False
        return True

    def fail_replies(self, error: Exception) -> None:
        """Ends the control calls with an error."""
        for reply in list(self.replies.values()):
            if not reply.done():
                reply.set_exception(error)

    def close(self) -> None:
        self.inbox.close()
        self.outbox.close()
