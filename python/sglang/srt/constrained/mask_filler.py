"""Fills the grammar masks of a step in one call of the library, over several threads where that is faster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.constrained.grammar import Grammar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SLOW_FILL_S = 0.005
"""Seconds for all masks beyond which a step is slow; a single one may take as long on average (FOLLOW_REFILL_S)."""
METERED_FILLS = 16
"""Steps after a slow one whose masks are filled one by one, to charge each request for its own."""
MAX_THREADS = 4
PROBE_EVERY = 64
"""Steps after which the other number of threads is tried once."""
_WEIGHT_OF_NEWEST = 0.25


def usual_threads() -> int:
    """Returns half of the processors that this process may use, within limits."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))


class MaskFiller:
    """Fills the masks of one scheduler process."""

    def __init__(self, num_threads: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        """num_threads: most threads; by default `usual_threads()`."""
        self._clock = clock
        threads = usual_threads() if num_threads is None else num_threads
        self._seconds_per_row: dict[int, float] = dict.fromkeys((1, threads), 0.0)
        """The measured time by number of threads, newer steps weighing more. Nothing measured yet: 0."""
        self._num_filled = 0
        self._num_metered = 0
        """Steps that are still to be metered."""

    def fill(self, grammars: list[Grammar], mask: npt.NDArray[np.int32], rows: list[int]) -> None:
        """Fills the mask's row of each grammar, as Grammar.fill_mask does. mask: [R, ceil(vocab / 32)], contiguous,
        with all tokens allowed so far. All grammars must be of one library."""
        if self._num_metered or len(grammars) == 1:
            self._num_metered = max(0, self._num_metered - 1)
            for grammar, row in zip(grammars, rows, strict=True):
                grammar.fill_mask(mask[row])
            return
        going_on = [(grammar, row) for grammar, row in zip(grammars, rows, strict=True) if not grammar.is_terminated()]
        if not going_on:
            return
        threads = self.next_threads()
        started = self._clock()
        matchers = [grammar.matcher for grammar, _ in going_on]
        going_on[0][0].compiled.fill_masks(matchers, mask, [row for _, row in going_on], threads)
        seconds = self._clock() - started
        self._measured(threads, seconds / len(going_on))
        for grammar, _ in going_on:  # one that takes more than its share makes the step slow, and is measured again
            grammar.note_mask_time(min(grammar.mask_s, seconds / len(going_on)))
        if seconds > SLOW_FILL_S:
            self._num_metered = METERED_FILLS

    def next_threads(self) -> int:
        """Returns the number of threads that was faster lately, and every PROBE_EVERY steps the other one."""
        fastest = min(self._seconds_per_row, key=self._seconds_per_row.__getitem__)
        if (self._num_filled + 1) % PROBE_EVERY:
            return fastest
        return next((threads for threads in self._seconds_per_row if threads != fastest), fastest)

    def _measured(self, threads: int, seconds_per_row: float) -> None:
        before = self._seconds_per_row[threads] or seconds_per_row
        self._seconds_per_row[threads] = before + _WEIGHT_OF_NEWEST * (seconds_per_row - before)
        self._num_filled += 1
