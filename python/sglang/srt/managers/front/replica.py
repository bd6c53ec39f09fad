"""A replica as the front sees it: its channels, its load, and what it last said."""

from __future__ import annotations

import asyncio
from typing import Any

from sglang.srt.managers.front.replica_router import ReplicaLoad
from sglang.srt.managers.wire import ipc
from sglang.srt.managers.wire.io_struct import AbortReq, ControlReply, SchedulerStats


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

    def send_aborts(self) -> bool:
        """Sends the aborts in one message. False: the channel is full, and they wait here, no more of them than there
        are sequences."""
        if self.aborts:
            try:
                self.outbox.try_send(AbortReq(list(self.aborts)))
            except ipc.ChannelFull:
                return False
            self.aborts.clear()
        return True

    def fail_replies(self, error: Exception) -> None:
        """Ends the control calls with an error."""
        for reply in self.replies.values():
            if not reply.done():
                reply.set_exception(error)

    def close(self) -> None:
        self.inbox.close()
        self.outbox.close()
