"""Sessions: token sequences that clients extend by name instead of sending them again. The prefix cache has their KV.

A session is a tree of requests. Each has its prompt and, once it has ended, its output; a later one continues any of
them. A streaming session is a list: each request continues the last one that ended well, which is all that is kept.
Sessions are kept in memory, bounded in number and tokens: the least recently used is closed first, and one with a
timeout when it has been idle that long. A session whose request runs is never closed for another.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.media.media_files import MediaFiles, media_bytes
from sglang.srt.managers.wire.io_struct import MediaItem

MAX_SESSIONS = 1024
MAX_TOKENS = 1 << 24
"""Largest number of tokens of all sessions together, 4 bytes each."""
MAX_TURNS = 1 << 16
"""Largest number of turns of all sessions together."""
MAX_MEDIA_BYTES = 4 << 30
"""Shared memory that the images of all sessions together may take, counted once for each turn."""
MAX_ID_LENGTH = 256


@dataclass(slots=True)
class Turn:
    """One request of a session. `tokens`: its prompt, followed by its output once it has ended."""

    rid: str
    parent: str | None
    tokens: np.ndarray  # [N] int32
    prompt_len: int
    ended: bool = False
    media: list[MediaItem] = field(default_factory=list)
    """The images and videos in `tokens`."""


@dataclass(slots=True)
class Usage:
    """What turns hold."""

    tokens: int = 0
    turns: int = 0
    media_bytes: int = 0

    def add(self, other: Usage) -> None:
        self.tokens += other.tokens
        self.turns += other.turns
        self.media_bytes += other.media_bytes

    def subtract(self, other: Usage) -> None:
        self.add(Usage(-other.tokens, -other.turns, -other.media_bytes))

    def exceeds(self, limits: Usage) -> bool:
        return self.tokens > limits.tokens or self.turns > limits.turns or self.media_bytes > limits.media_bytes


def usage_of(turns: Iterable[Turn]) -> Usage:
    """Returns what these turns hold together."""
    usage = Usage()
    for turn in turns:
        usage.tokens += len(turn.tokens)
        usage.turns += 1
        usage.media_bytes += media_bytes(turn.media) if turn.media else 0
    return usage


@dataclass(slots=True)
class Session:
    """One session. `capacity`: the longest sequence, in tokens. `timeout`: idle seconds after which it is closed."""

    capacity: int
    streaming: bool = False
    timeout: float | None = None
    last_used: float = 0.0
    """Time of the last use, by the store's clock."""
    replica: int | None = None
    """The replica that has its KV."""
    turns: dict[str, Turn] = field(default_factory=dict)
    children: defaultdict[str | None, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    """The turns that continue a turn, by its rid, in the order of their arrival; no entry is empty."""
    usage: Usage = field(default_factory=Usage)
    num_running: int = 0
    """Turns that have not ended."""

    def is_overdue(self, now: float) -> bool:
        """Returns whether the session has been idle beyond its timeout."""
        if self.timeout is None or now - self.last_used <= self.timeout:
            return False
        return not self.num_running

    def branch(self, rid: str | None) -> list[str]:
        """Returns all turns that continue this one, directly or indirectly; None: all of the session."""
        if rid is None:
            return list(self.turns)
        later = list(self.children.get(rid, ()))
        for child in later:  # the list grows during the loop
            later += self.children.get(child, ())
        return later

    def add(self, turn: Turn) -> None:
        """Adds a turn that runs."""
        self.turns[turn.rid] = turn
        self.children[turn.parent][turn.rid] = None
        self.num_running += 1

    def pop(self, rid: str) -> Turn | None:
        """Removes and returns a turn; None if there is none of this rid."""
        turn = self.turns.pop(rid, None)
        if turn is None:
            return None
        self.num_running -= not turn.ended
        siblings = self.children[turn.parent]
        del siblings[rid]
        if not siblings:
            del self.children[turn.parent]
        return turn


class SessionStore:
    """All sessions of a server."""

    def __init__(
        self,
        max_sessions: int = MAX_SESSIONS,
        max_tokens: int = MAX_TOKENS,
        max_turns: int = MAX_TURNS,
        max_media_bytes: int = MAX_MEDIA_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._max_sessions = max_sessions
        self._limits = Usage(max_tokens, max_turns, max_media_bytes)
        self._usage = Usage()
        self.media_files: MediaFiles | None = None
        """The files that hold the images of the turns."""
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_tokens(self) -> int:
        return self._usage.tokens

    def open(self, capacity: int, session_id: str | None, streaming: bool = False, timeout: float | None = None) -> str:
        """Opens a session. Raises RequestError if the id is in use, or if requests of all other sessions run and there
        are as many as may be."""
        self._close_overdue()
        session_id = session_id or uuid.uuid4().hex
        if len(session_id) > MAX_ID_LENGTH:
            raise RequestError(f"session_id may have at most {MAX_ID_LENGTH} characters.")
        if session_id in self._sessions:
            raise RequestError(f"There is a session {session_id!r} already; close it, or leave the id out.")
        if len(self._sessions) >= self._max_sessions and self._oldest_idle(session_id) is None:
            message = f"{self._max_sessions} sessions are open, and requests of all of them run; try again later."
            raise RequestError(message, 503)
        self._sessions[session_id] = Session(capacity, streaming, timeout, self._clock())
        self._make_room(session_id)
        return session_id

    def close(self, session_id: str) -> None:
        """Closes a session. Raises RequestError if there is none of this id."""
        self.forget(session_id, *self._session(session_id).turns)
        del self._sessions[session_id]

    def is_streaming(self, session_id: str) -> bool:
        """Returns whether the session is a streaming one. Raises RequestError if there is no such session."""
        self._close_overdue()
        return self._session(session_id).streaming

    def replica(self, session_id: str) -> int | None:
        """Returns the replica that the session's requests go to; None if there was none yet. Raises RequestError if
        there is no such session."""
        return self._session(session_id).replica

    def bind(self, session_id: str, replica: int) -> None:
        """Sends the session's requests to `replica` from now on. Raises RequestError if there is no such session."""
        self._session(session_id).replica = replica

    def last_turn(self, session_id: str) -> Turn | None:
        """Returns the turn of a streaming session from which it continues. Raises RequestError while one runs."""
        turns = self._session(session_id).turns.values()
        self._sessions.move_to_end(session_id)
        running = next((turn.rid for turn in turns if not turn.ended), None)
        if running is not None:
            raise RequestError(f"The request {running!r} of the session has not ended yet.")
        return next(iter(turns), None)

    def turn(self, session_id: str, rid: str | None) -> Turn | None:
        """Returns the turn to continue from; None: the beginning of the session. Raises RequestError."""
        self._close_overdue()
        session = self._session(session_id)
        self._sessions.move_to_end(session_id)
        if rid is None:
            return None
        if rid not in session.turns:
            raise RequestError(f"The session {session_id!r} has no request {rid!r} to go on from.")
        return session.turns[rid]

    def drop(self, session_id: str, parent: str | None) -> list[str]:
        """Forgets all turns after `parent`, or all of the session. Returns the rids of those that still run."""
        session = self._session(session_id)
        return self._drop(session_id, session, session.branch(parent))

    def _drop(self, session_id: str, session: Session, dropped: list[str]) -> list[str]:
        running = [rid for rid in dropped if not session.turns[rid].ended]
        self.forget(session_id, *dropped)
        return running

    def begin(self, session_id: str, turn: Turn, replaces: bool = False) -> list[str]:
        """Adds a turn. replaces: after all turns that follow its parent have been dropped, of which the rids of those
        that still run are returned. Raises RequestError, without a change, for a sequence that is too long, a rid that
        the session has already, and a session that alone, or together with those whose requests run, would exceed the
        limits of all."""
        session = self._session(session_id)
        dropped = session.branch(turn.parent) if replaces else []
        if turn.rid in session.turns and turn.rid not in set(dropped):
            raise RequestError(f"The session {session_id!r} has a request {turn.rid!r} already.")
        if len(turn.tokens) > session.capacity:
            raise RequestError(
                f"The sequence of {len(turn.tokens)} tokens is longer than the session's capacity_of_str_len of "
                f"{session.capacity}."
            )
        added = usage_of([turn])
        added.subtract(usage_of(session.turns[rid] for rid in dropped))
        self._refuse_too_much(session_id, session, added)
        running = self._drop(session_id, session, dropped)
        session.last_used = self._clock()
        session.add(turn)
        self._count(session, usage_of([turn]))
        if self.media_files is not None:
            self.media_files.hold(turn.media)
        self._make_room(session_id)
        return running

    def _refuse_too_much(self, session_id: str, session: Session, added: Usage) -> None:
        """Raises RequestError if there is no room for `added`, whatever other sessions are closed."""
        needed = Usage()
        needed.add(session.usage)
        needed.add(added)
        if needed.exceeds(self._limits):
            raise RequestError(
                f"The session {session_id!r} would hold {needed.turns} requests with {needed.tokens} tokens and "
                f"{needed.media_bytes >> 20} MiB of images, and more than {self._limits.turns} requests, "
                f"{self._limits.tokens} tokens or {self._limits.media_bytes >> 20} MiB "
                'are not kept; go on with "replace": true, or open another one.'
            )
        for other in self._sessions.values():
            if other.num_running and other is not session:
                needed.add(other.usage)
        if needed.exceeds(self._limits):
            raise RequestError("The sessions whose requests run hold as much as is kept; try again later.", 503)

    def _count(self, session: Session, added: Usage) -> None:
        session.usage.add(added)
        self._usage.add(added)

    def end(self, session_id: str, turn: Turn, output_ids: list[int]) -> None:
        """Adds the output, unless the session or turn is gone. A streaming session forgets earlier turns."""
        session = self._sessions.get(session_id)
        if session is None or session.turns.get(turn.rid) is not turn:
            return
        turn.tokens = np.concatenate((turn.tokens, np.array(output_ids, np.int32)))
        turn.ended = True
        session.last_used = self._clock()
        session.num_running -= 1
        self._count(session, Usage(tokens=len(output_ids)))
        if session.streaming:
            self.forget(session_id, *(session.turns.keys() - {turn.rid}))
        self._make_room(session_id)

    def forget(self, session_id: str, *rids: str) -> None:
        """Removes those turns that exist."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        turns = [turn for turn in map(session.pop, rids) if turn is not None]
        gone = usage_of(turns)
        for counted in (session.usage, self._usage):
            counted.subtract(gone)
        if self.media_files is not None:
            self.media_files.release([item for turn in turns for item in turn.media])

    def _close_overdue(self) -> None:
        now = self._clock()
        for session_id in [name for name, session in self._sessions.items() if session.is_overdue(now)]:
            self.close(session_id)

    def _session(self, session_id: str) -> Session:
        if session_id not in self._sessions:
            raise RequestError(f"There is no session {session_id[:MAX_ID_LENGTH]!r} (any more); open one.")
        return self._sessions[session_id]

    def _make_room(self, kept: str) -> None:
        """Closes the least recently used sessions, except `kept` and those whose requests run."""
        while len(self._sessions) > self._max_sessions or self._usage.exceeds(self._limits):
            oldest = self._oldest_idle(kept)
            if oldest is None:
                break
            self.close(oldest)

    def _oldest_idle(self, kept: str) -> str | None:
        idle = (name for name, session in self._sessions.items() if name != kept and not session.num_running)
        return next(idle, None)
