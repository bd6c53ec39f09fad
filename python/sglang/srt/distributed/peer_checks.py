"""Checks of what a group's GPUs do with one another's memory, before anything relies on it.

Patterns that are unique to a writer, reader and round go through peers' memory, through each of our all-reduce
algorithms and through the library's. The result tells errors apart: values of the round before, values that the reader
wrote itself, or anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.distributed.custom_all_reduce import StalledPeer

ROUNDS = 4
PATTERN_WORDS = 4096
REDUCED_SIZES = (16, 4096, 32768)
"""Numbers of fp32 values that are all-reduced: 64 B, 16 KiB, 128 KiB."""
LIBRARY = "nccl"
OTHERS = "the other ranks"
"""The party that a rank waits for when it can name no single rank."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One error. `kind`: stale, own, wrong, hang, failed, library (its all-reduce), waited (for others). `pair`: ranks
    (writer, reader), or a single rank if it is unknown for whom it waited."""

    kind: str
    pair: tuple[int, ...]
    detail: str


class Links(Protocol):
    """The links between the GPUs of a group."""

    ways: Sequence[str]
    """The algorithms of `reduce`: ours, then the library's."""

    def write(self, peer: int, words: torch.Tensor) -> None:
        """Writes int32 [PATTERN_WORDS] into the peer's memory, at this rank's place. Returns when the copy has
        ended."""

    def read(self, writer: int) -> torch.Tensor:
        """Returns this rank's memory at the place of `writer` (at its own place nobody writes)."""

    def reduce(self, way: str, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of fp32 values over the ranks. Raises StalledPeer."""

    def barrier(self) -> None:
        """Waits for the hosts of all ranks; writes before it are visible after it."""

    def agree(self, ok: bool) -> bool:
        """Returns whether `ok` holds on all ranks."""


def pattern(writer: int, reader: int, turn: int) -> torch.Tensor:
    """Returns int32 [PATTERN_WORDS], unique to the writer, reader and round."""
    word = torch.arange(PATTERN_WORDS, dtype=torch.int32)
    return (word << 16) ^ (1 + writer + 16 * reader + 256 * turn)


def check(links: Links, rank: int, ranks: int, say: Callable[[str, int | None], None]) -> Iterator[Finding]:
    """Yields the errors that this rank sees. `say(action, peer)` is called before anything that may not return."""
    good = True
    for turn in range(1, ROUNDS + 1):
        for finding in _memory(links, rank, ranks, turn, say):
            good = False
            yield finding
            if finding.kind == "hang":
                return  # nothing more can be asked of this GPU; the others notice that this rank has gone
    for way in links.ways:
        say(OTHERS, None)
        good = links.agree(good)
        if good or way == LIBRARY:
            for finding in _reduce(links, way, rank, ranks, say):
                good = False
                yield finding


def _memory(
    links: Links, rank: int, ranks: int, turn: int, say: Callable[[str, int | None], None]
) -> Iterator[Finding]:
    for step in range(1, ranks):
        peer = (rank + step) % ranks
        say("a write to the memory of", peer)
        try:
            links.write(peer, pattern(rank, peer, turn))
        except StalledPeer as stalled:
            yield Finding("hang", (rank, peer), str(stalled))
            return
    say(OTHERS, None)
    links.barrier()
    for step in range(1, ranks):
        writer = (rank + step) % ranks
        say("a read of what was written by", writer)
        words = links.read(writer)
        if not torch.equal(words, pattern(writer, rank, turn)):
            yield _diagnosis(words, writer, rank, ranks, turn)
    if turn == 1 and bool(links.read(rank).any()):
        yield _diagnosis(links.read(rank), rank, rank, ranks, turn)
    say(OTHERS, None)
    links.barrier()


def _diagnosis(words: torch.Tensor, writer: int, reader: int, ranks: int, turn: int) -> Finding:
    """Returns what is wrong with the words found where `writer` should have written."""
    misplaced = [peer for peer in range(ranks) if torch.equal(words, pattern(reader, peer, turn))]
    if misplaced:
        return Finding(
            "own", (reader, misplaced[0]), f"what rank {reader} writes to rank {misplaced[0]} lands in its own memory"
        )
    if torch.equal(words, pattern(writer, reader, turn - 1)) or not bool(words.any()):
        return Finding("stale", (writer, reader), f"rank {reader} reads the values from before rank {writer} wrote")
    count = int((words != pattern(writer, reader, turn)).sum())
    return Finding("wrong", (writer, reader), f"{count} of {PATTERN_WORDS} words of rank {writer} arrive altered")


def _reduce(links: Links, way: str, rank: int, ranks: int, say: Callable[[str, int | None], None]) -> Iterator[Finding]:
    for turn in range(1, ROUNDS + 1):
        for size in REDUCED_SIZES:
            say(f"the all-reduce by {way}", None)
            try:
                total = links.reduce(way, partial_sum(rank, size, turn))
            except StalledPeer as stalled:
                yield Finding("hang", (stalled.missing, rank), f"{way}: {stalled}")
                return
            wanted = torch.stack([partial_sum(r, size, turn) for r in range(ranks)]).sum(0)
            if not torch.equal(total, wanted):
                yield _wrong_sum(way, total, rank, ranks, size, turn)
                return


def partial_sum(rank: int, size: int, turn: int) -> torch.Tensor:
    """Returns fp32 [size] with one base-8 digit per rank, so that a sum below 2**24 shows what each rank
    contributed."""
    digit = (torch.arange(size) + 3 * turn + rank) % 7 + 1
    return (digit * 8**rank).float()


def _wrong_sum(way: str, total: torch.Tensor, rank: int, ranks: int, size: int, turn: int) -> Finding:
    if way == LIBRARY:
        return Finding("library", (rank,), f"its all-reduce gives rank {rank} wrong sums")
    for writer in range(ranks):
        given = (total.long() >> 3 * writer) % 8 if bool(total.isfinite().all()) else torch.zeros(size)
        if not torch.equal(given, partial_sum(writer, size, turn).long() >> 3 * writer):
            before = bool((given == partial_sum(writer, size, turn - 1).long() >> 3 * writer).all())
            kind = "stale" if before else "wrong"
            return Finding(kind, (writer, rank), f"{way}: rank {rank} does not add what rank {writer} gives")
    return Finding("wrong", (rank,), f"{way}: rank {rank} computes wrong sums")
