"""Checks that a group's GPUs can write into one another's memory and add up values there, before anything relies on it.

Each rank writes patterns into the memory of every other rank, and reads what the others wrote. Then all ranks add up
values with each of our all-reduce algorithms, and with NCCL's. Patterns and values differ by rank and round, so
that an error can be named: values of the round before, values that the reader wrote itself, or anything else.
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
"""The library whose all-reduce is checked beside ours, as one of `Links.ways`."""
OTHERS = "the other ranks"
"""The party that a rank waits for when it can name no single rank."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One error that a rank has found."""

    kind: str
    """stale: zeros or values of the round before. own: a rank's write went into its own memory. wrong: other values.
    hang: an action that did not return. failed: the checks died with an error. library: NCCL's all-reduce is wrong or
    hangs. waited: a wait for the other ranks did not return."""
    pair: tuple[int, ...]
    """The ranks (writer, reader) or (rank, peer) of the failed action; the rank alone if the action has no peer."""
    detail: str
    """The error in words, for the user."""


class Links(Protocol):
    """The links between the GPUs of a group."""

    ways: Sequence[str]
    """The names of the all-reduce algorithms that `reduce` takes: ours, then LIBRARY."""

    def write(self, peer: int, words: torch.Tensor) -> None:
        """Writes int32 [PATTERN_WORDS] into the peer's memory, where each rank has a place of its own to write to.
        Returns when the copy has ended. Raises StalledPeer if it does not end."""

    def read(self, writer: int) -> torch.Tensor:
        """Returns int32 [PATTERN_WORDS] from the place of `writer` in this rank's memory. Nobody writes to this rank's
        own place, which begins as zeros."""

    def reduce(self, way: str, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of fp32 values over the ranks, by the algorithm `way`. Raises StalledPeer if a rank does not
        come."""

    def barrier(self) -> None:
        """Waits until all ranks have called it. Writes that ended before it are visible after it."""

    def agree(self, ok: bool) -> bool:
        """Returns whether `ok` holds on all ranks."""


def pattern(writer: int, reader: int, turn: int) -> torch.Tensor:
    """Returns int32 [PATTERN_WORDS], unique to the writer, reader and round."""
    word = torch.arange(PATTERN_WORDS, dtype=torch.int32)
    return (word << 16) ^ (1 + writer + 16 * reader + 256 * turn)


def check(links: Links, rank: int, ranks: int, say: Callable[[str, int | None], None]) -> Iterator[Finding]:
    """Yields the errors that this rank sees. `ranks`: their number. `say(action, peer)` is called before each action
    that may not return, so that the parent process knows where this one hangs."""
    good = True
    for turn in range(1, ROUNDS + 1):
        for finding in _check_memory(links, rank, ranks, turn, say):
            good = False
            yield finding
            if finding.kind == "hang":
                return  # nothing more can be asked of this GPU; the others notice that this rank has gone
    for way in links.ways:
        say(OTHERS, None)
        good = links.agree(good)
        # After an error our algorithms, which use the peers' memory, are not checked, but NCCL is.
        if good or way == LIBRARY:
            for finding in _check_sums(links, way, rank, ranks, say):
                good = False
                yield finding


def _check_memory(
    links: Links, rank: int, ranks: int, turn: int, say: Callable[[str, int | None], None]
) -> Iterator[Finding]:
    """Writes to all peers, then checks what all peers wrote here. turn: the round, from 1 on."""
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
            yield _memory_error(words, writer, rank, ranks, turn)
    if turn == 1 and bool(links.read(rank).any()):  # something was written to the place that nobody writes to
        yield _memory_error(links.read(rank), rank, rank, ranks, turn)
    say(OTHERS, None)
    links.barrier()


def _memory_error(words: torch.Tensor, writer: int, reader: int, ranks: int, turn: int) -> Finding:
    """Returns what is wrong with `words`, which `reader` found at the place of `writer`; at its own place, where nobody
    writes, `writer` is the reader."""
    pairs = [(source, peer) for source in range(ranks) for peer in range(ranks) if source != peer]
    misplaced = next((pair for pair in pairs if torch.equal(words, pattern(*pair, turn))), None)
    if misplaced is not None:
        source, peer = misplaced
        kind, where = ("own", "its own memory") if source == reader else ("wrong", f"the memory of rank {reader}")
        return Finding(kind, misplaced, f"what rank {source} writes to rank {peer} lands in {where}")
    if writer == reader:
        text = f"rank {reader} finds values that no rank wrote at a place in its memory where nobody writes"
        return Finding("wrong", (reader,), text)
    if torch.equal(words, pattern(writer, reader, turn - 1)) or not bool(words.any()):
        return Finding("stale", (writer, reader), f"rank {reader} reads the values from before rank {writer} wrote")
    count = int((words != pattern(writer, reader, turn)).sum())
    return Finding("wrong", (writer, reader), f"{count} of {PATTERN_WORDS} words of rank {writer} arrive altered")


def _check_sums(
    links: Links, way: str, rank: int, ranks: int, say: Callable[[str, int | None], None]
) -> Iterator[Finding]:
    """Checks the sums of one all-reduce algorithm. Ends with the first error."""
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
                yield _sum_error(way, total, rank, ranks, size, turn)
                return


def partial_sum(rank: int, size: int, turn: int) -> torch.Tensor:
    """Returns what a rank contributes to an all-reduce, fp32 [size]: values from 1 to 7, times 8**rank. So digit r of a
    sum in base 8 is what rank r contributed. The sums of up to 8 ranks are below 2**24, i.e. exact in fp32."""
    digit = (torch.arange(size) + 3 * turn + rank) % 7 + 1
    return (digit * 8**rank).float()


def _sum_error(way: str, total: torch.Tensor, rank: int, ranks: int, size: int, turn: int) -> Finding:
    """Returns what is wrong with `total`, and the first rank whose contribution is missing or altered."""
    if way == LIBRARY:
        return Finding("library", (rank,), f"its all-reduce gives rank {rank} wrong sums")
    for writer in range(ranks):
        added = (total.long() >> 3 * writer) % 8 if bool(total.isfinite().all()) else torch.zeros(size)
        if not torch.equal(added, partial_sum(writer, size, turn).long() >> 3 * writer):
            before = bool((added == partial_sum(writer, size, turn - 1).long() >> 3 * writer).all())
            kind = "stale" if before else "wrong"
            return Finding(kind, (writer, rank), f"{way}: rank {rank} does not add what rank {writer} gives")
    return Finding("wrong", (rank,), f"{way}: rank {rank} computes wrong sums")
