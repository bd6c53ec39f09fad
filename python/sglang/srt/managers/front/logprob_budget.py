"""Limit of the log probabilities that all calls together keep in this process.

A call reserves room before it is sent, for as many values as it may get, until its answer is written and the stream
closed. A call whose output has no length of its own reserves the first tokens, and more as they come: only such a call
can end early.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from sglang.srt.managers.front.generate_request import RequestError

MAX_ALL_LOGPROBS = 1 << 26
"""Log probabilities of all calls: 8 bytes each, and up to 80 more while they are written as JSON, 6 GiB at most."""
ASSUMED_OUTPUT = 4096
"""Tokens for which a call reserves room at first where the client did not say how many it wants."""
GROWTH = 1 << 16
"""Values for which room is reserved at a time as more come."""


@dataclass(slots=True)
class _Share:
    reserved: int
    received: int = 0


class LogprobBudget:
    """The room of all calls, by their streams."""

    def __init__(self) -> None:
        self._shares: dict[Hashable, _Share] = {}
        self._reserved = 0

    def reserve(self, stream: Hashable, num_values: int) -> None:
        """Reserves room for a call. Raises RequestError (503) without room."""
        if not num_values:
            return
        if self._reserved + num_values > MAX_ALL_LOGPROBS:
            raise _no_room()
        self._shares[stream] = _Share(num_values)
        self._reserved += num_values

    def receive(self, stream: Hashable, num_values: int) -> RequestError | None:
        """Counts values that came for a call. Returns the error with which the call must end if there is no room."""
        share = self._shares.get(stream)
        if share is None:  # its reader is gone
            return None
        share.received += num_values
        missing = share.received - share.reserved
        if missing <= 0:
            return None
        room = MAX_ALL_LOGPROBS - self._reserved
        if missing > room:
            return _no_room()
        more = min(max(missing, GROWTH), room)
        share.reserved += more
        self._reserved += more
        return None

    def release(self, stream: Hashable) -> None:
        """Gives back the room of a call. Harmless if it has none."""
        share = self._shares.pop(stream, None)
        if share is not None:
            self._reserved -= share.reserved


def _no_room() -> RequestError:
    return RequestError(
        f"The calls under way may have {MAX_ALL_LOGPROBS} log probabilities together; ask for fewer (top_logprobs, "
        "max_tokens, n), or send the call again later.",
        503,
    )
