"""The waiting requests, kept sorted: a change costs a binary search, and a step sorts nothing."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter

from sglang.srt.managers.scheduler.schedule_batch import Req

Rank = Callable[[Req], int]
FEW = 16
"""Requests that are removed one by one; for more, the queue is rebuilt."""


class WaitingQueue:
    """Requests sorted by rank; those of equal rank in the order of arrival. A rank must not change while its request
    waits."""

    def __init__(self, *ranks: Rank) -> None:
        """ranks: sort keys, the first one most significant; smaller values go first."""
        self._ranks = ranks
        self._first = self._last = 0
        """Places of those that came to its two ends, so that no two entries are equal."""
        self._entries: list[tuple[tuple[int, ...], int, Req]] = []
        self._entry_of: dict[Req, tuple[tuple[int, ...], int, Req]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Req]:
        return map(itemgetter(2), self._entries)

    def __getitem__(self, index: int) -> Req:
        return self._entries[index][2]

    def append(self, req: Req) -> None:
        """Adds a request after those of its rank."""
        self._last += 1
        self._add(req, self._last)

    def appendleft(self, req: Req) -> None:
        """Adds a request before those of its rank."""
        self._first -= 1
        self._add(req, self._first)

    def _add(self, req: Req, place: int) -> None:
        entry = tuple(rank(req) for rank in self._ranks), place, req
        self._entry_of[req] = entry
        insort(self._entries, entry)

    def remove(self, reqs: Iterable[Req]) -> None:
        """Removes requests, all of which must be waiting. Raises KeyError."""
        gone = [self._entry_of.pop(req) for req in reqs]
        if len(gone) > FEW:
            self._entries = [entry for entry in self._entries if entry[2] in self._entry_of]
            return
        for entry in gone:
            del self._entries[bisect_left(self._entries, entry)]
