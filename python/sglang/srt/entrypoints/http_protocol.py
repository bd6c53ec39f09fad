"""uvicorn's HTTP/1.1 protocol, with limits and corrections against misbehaving clients."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sglang.srt.entrypoints.http_middleware import MAX_HEAD_BYTES
from sglang.srt.entrypoints.http_stream import BODY_WRITER

_PROBE_RESPONSE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""An interim response, which clients ignore; it provokes a reset (RST) from the system of a client that has left."""
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class ChunkWriter:
    """BodyWriter of a response with chunked transfer encoding, as all responses without a length have. Writes nothing
    after the response has ended, because the connection may then carry the next one."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def write(self, body: bytes) -> bool:
        """Writes a chunk, or nothing once the response has ended or the client is gone. `body` must not be empty, which
        would end the response. Returns False if the client reads too slowly: await `drain` before the next chunk."""
        cycle = self._cycle
        if self._is_over:
            return True
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return not cycle.flow.write_paused

    async def drain(self) -> None:
        """Waits until the client has read enough, or has gone."""
        if not self._is_over:
            await self._cycle.flow.drain()

    @property
    def _is_over(self) -> bool:
        return self._cycle.disconnected or self._cycle.response_complete


class HttpProtocol(HttpToolsProtocol):
    """Limits the time in which a request must arrive, the size of its head, and how long a client may leave its answer
    unread. When the client is gone, tells every unanswered request of the connection.

    uvicorn waits for ever for the rest of a request, and tells only the latest request that the client is gone. With
    pipelined requests, the latest one has not begun; the running one would go on for nobody, and fail when it writes.

    A client may close its sending side and still read. A client that leaves also begins with a FIN, so that the two
    look alike. Therefore an interim response is sent, to which the system of a client that has left answers with a
    reset.
    """

    head_limit_s: ClassVar[float] = 30.0
    body_limit_s: ClassVar[float] = 300.0
    unread_limit_s: ClassVar[float] = 300.0
    half_closed_poll_s: ClassVar[float] = 0.1
    max_head_bytes: ClassVar[int] = MAX_HEAD_BYTES
    """Limit of the bytes read since the request, or the last piece of its body, began: bounds heads that never end, and
    trailers. `HeadGate` checks complete heads."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._in_head = True
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._unread_deadline: asyncio.TimerHandle | None = None
        self._half_closed: asyncio.TimerHandle | None = None
        """The timer of `_poll_for_reset`; None while the client has not closed its sending side."""
        super().connection_made(transport)
        self._arm(self.head_limit_s)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        if self._deadline is None:  # the next request of the connection begins
            self._arm(self.head_limit_s)
        super().data_received(data)
        if self._head_bytes > self.max_head_bytes:
            self._refuse(_TOO_LARGE)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Ignores trailers: they follow a body, whose request has been checked already."""
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._arm(self.body_limit_s)
        super().on_headers_complete()
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        if self.cycle is not None:
            self._unanswered.append(self.cycle)
            self.cycle.scope[BODY_WRITER] = ChunkWriter(self.cycle)  # type: ignore[literal-required]

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._disarm()
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Starts the time limit for a client that does not read; a stream waits here without other limits."""
        self._unread_deadline = self.loop.call_later(self.unread_limit_s, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._disarm_unread()
        super().resume_writing()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns True to keep the connection open while complete requests of HTTP/1.1 are unanswered. Otherwise
        returns False, and the transport closes."""
        waiting = [cycle for cycle in self._unanswered if not cycle.response_complete]
        if not waiting or not self._in_head or self._head_bytes or waiting[0].scope["http_version"] != "1.1":
            return False
        self._disarm()
        if not waiting[0].response_started:  # otherwise the next part of the answer has the same effect
            self.transport.write(_PROBE_RESPONSE)
        self._half_closed = self.loop.call_later(self.half_closed_poll_s, self._poll_for_reset)
        return True

    def _poll_for_reset(self) -> None:
        """Checks for a reset, which the event loop does not notice because it reads nothing more."""
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._half_closed = self.loop.call_later(self.half_closed_poll_s, self._poll_for_reset)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed is not None and not self._is_answering:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._half_closed is not None:
            self._half_closed.cancel()
        self._disarm()
        self._disarm_unread()
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._unanswered.clear()
        super().connection_lost(exc)

    def _arm(self, limit_s: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(limit_s, self._on_deadline)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _disarm_unread(self) -> None:
        if self._unread_deadline is not None:
            self._unread_deadline.cancel()
            self._unread_deadline = None

    def _on_deadline(self) -> None:
        """Refuses a request that has not arrived in time. While an earlier one is being answered, only starts the time
        limit again."""
        self._deadline = None
        if self.pipeline or (self._in_head and self._is_answering):
            self._arm(self.body_limit_s)
        else:
            self._refuse(_TOO_LATE if self._head_bytes else b"")

    @property
    def _is_answering(self) -> bool:
        return any(not cycle.response_complete for cycle in self._unanswered)

    def _refuse(self, answer: bytes) -> None:
        """Closes the connection. Writes `answer` before, unless it would land in or before an earlier answer."""
        if self.transport.is_closing():
            return
        waiting = [cycle for cycle in self._unanswered if not cycle.response_complete]
        only_this_one = len(waiting) == 1 and not self._in_head and not waiting[0].response_started
        if not waiting or only_this_one:
            self.transport.write(answer)
        self.transport.close()
