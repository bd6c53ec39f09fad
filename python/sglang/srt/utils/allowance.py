"""Processor time budget of one request in a loop that serves all requests."""

from __future__ import annotations

import time
from collections.abc import Callable


class Allowance:
    """Processor seconds that a request may spend: `burst_s` at once, `refill_s` a token on average.

    It depends on a clock, so with tensor parallelism only the leader may ask.
    """

    __slots__ = ("_burst_s", "_clock", "_left_s", "_refill_s", "_started")

    def __init__(self, burst_s: float, refill_s: float, clock: Callable[[], float] = time.thread_time) -> None:
        self._burst_s = burst_s
        self._refill_s = refill_s
        self._clock = clock
        self._left_s = burst_s
        self._started = 0.0

    @property
    def left_s(self) -> float:
        """Returns the seconds that are left; negative if more were spent."""
        return self._left_s

    @left_s.setter
    def left_s(self, seconds: float) -> None:
        self._left_s = seconds

    @property
    def spent_s(self) -> float:
        """Returns the seconds that are missing from the burst."""
        return self._burst_s - self._left_s

    @property
    def exhausted(self) -> bool:
        """Returns whether no time is left."""
        return self._left_s <= 0

    def refill(self) -> None:
        """Adds the time for one more token."""
        self._left_s = min(self._burst_s, self._left_s + self._refill_s)

    def __enter__(self) -> Allowance:
        """Begins to charge the time until the block ends."""
        self._started = self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        self._left_s -= self._clock() - self._started
