"""The CPU budget of one request in a loop that serves all of them."""

from __future__ import annotations

import time
from collections.abc import Callable


class Allowance:
    """Processor seconds that a request may spend: `burst_s` at once, `refill_s` a token on average.

    A clock decides, so with tensor parallelism only the leader may ask.
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
        return self._left_s

    @property
    def exhausted(self) -> bool:
        return self._left_s <= 0

    def refill(self) -> None:
        """One more token."""
        self._left_s = min(self._burst_s, self._left_s + self._refill_s)

    def __enter__(self) -> Allowance:
        """Charges what happens in the block."""
        self._started = self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        self._left_s -= self._clock() - self._started
