"""A replica as the front sees it: its channels, its load, and what it last said."""

from __future__ import annotations

import asyncio
from typing import Any

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.replica_router import ReplicaLoad
from sglang.srt.managers.wire import ipc
from sglang.srt.managers.wire.io_struct import (
    AbortReq,
    ArrayPart,
    ArraysGone,
    ControlReply,
    ControlReq,
    SchedulerStats,
)


class Replica:
    """`index` counts from 0, as the ranks of data parallelism do."""

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
        self.arrays_gone: list[str] = []
        """Names of shared arrays that its machines have and nothing needs, which it has not been told yet."""

    def refuse_when_lost(self) -> None:
        """Raises RequestError where it has ended."""
        if self.failure is not None:
            raise RequestError(f"Replica {self.index} of the server has failed: {self.failure}", 503)

    def ask(self, message: ControlReq | ArrayPart) -> asyncio.Future[ControlReply]:
        """Sends it now. Returns the answer to come, which is an error when the replica fails; who does not wait for it
        any more cancels it. Raises RequestError where the channel is full or the replica has ended."""
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
        """Sends the aborts in one message, and what is gone in another. False: the channel is full, and they wait here,
        no more of them than there are sequences and arrays."""
        try:
            if self.aborts:
                self.outbox.try_send(AbortReq(list(self.aborts)))
                self.aborts.clear()
            if self.arrays_gone:
                self.outbox.try_send(ArraysGone(self.arrays_gone))
                self.arrays_gone = []
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
