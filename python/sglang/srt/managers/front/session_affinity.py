"""Which replica has a client's session (--load-balance-method prefix_affinity).

A client names its session in a header. The id only says where a request is computed: it is no part of the prompt, gives
access to nothing, and two clients that use the same one share no more than without it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from contextvars import ContextVar

SESSION_HEADERS = (b"x-session-id", b"x-smg-routing-key")
"""Headers that name a session; the first one that is there counts. The second is that of SGLang's gateway."""
MAX_ID_BYTES = 256
"""A longer id is ignored."""
MAX_SESSIONS = 1 << 16
"""Sessions that are remembered, about 10 MB; the one that was used longest ago is forgotten first."""

session_id: ContextVar[bytes | None] = ContextVar("session_id", default=None)
"""The session of the HTTP request that is being answered."""


def session_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Returns the session that a request's headers name; None without one. Names of headers are in lower case."""
    given = {name: value.strip() for name, value in headers if name in SESSION_HEADERS}
    session = next((given[name] for name in SESSION_HEADERS if given.get(name)), None)
    return None if session is None or len(session) > MAX_ID_BYTES else session


class SessionReplicas:
    """The replica that computed the last request of each session."""

    def __init__(self, capacity: int = MAX_SESSIONS) -> None:
        self._capacity = capacity
        self._replicas: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def get(self, session: bytes) -> int | None:
        """Returns the replica of a session; None if it is not known."""
        return self._replicas.get(session)

    def put(self, session: bytes, replica: int) -> None:
        """Remembers the replica of a session, which is the last one to be forgotten now."""
        self._replicas[session] = replica
        self._replicas.move_to_end(session)
        if len(self._replicas) > self._capacity:
            self._replicas.popitem(last=False)

    def clear(self) -> None:
        """Forgets all sessions."""
        self._replicas.clear()
