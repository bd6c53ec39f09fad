"""uvicorn's HTTP/1.1 protocol, corrected where a client can defeat it."""

from __future__ import annotations

import asyncio
from collections import deque

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


class HttpProtocol(HttpToolsProtocol):
    """Tells every unanswered request of a connection that the client is gone.

    uvicorn tells the latest only. When requests are pipelined that is one that has not begun; the one that runs would
    go on for nobody, and fail when it writes.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._unanswered: deque[RequestResponseCycle] = deque()
        super().connection_made(transport)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        if self.cycle is not None:
            self._unanswered.append(self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._unanswered.clear()
        super().connection_lost(exc)
