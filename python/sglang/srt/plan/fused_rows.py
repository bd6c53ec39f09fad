"""Rows of q, k and v in checkpoints that store them as one TP-interleaved tensor. No torch.

The tensor is made of equal, concatenated TP blocks. Each has the rows of q of its heads, then those of k, then those of
v, and groups of rows with one scale begin anew in it. With one TP block it is [q; k; v]. Checkpoints that the ranks of
a training job wrote have one block for each rank (MiMo-V2.5: 4, MiMo-V2.5-Pro: 8).

    2 TP blocks of 4 heads over 2 KV heads   q0 q1 k0 v0 | q2 q3 k1 v1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sglang.srt.plan.ranks import ShardRange

FUSED_PART = "qkv"
"""Name of the fused tensor as a part of our matrix."""


def fused_rows(parts: Sequence[tuple[ShardRange, int]], tp_blocks: int) -> tuple[ShardRange, ...]:
    """Returns the runs of the tensor's rows that hold a rank's heads, all of q before all of k before all of v. Runs
    that are contiguous in the tensor are merged.

    `parts`: the rank's heads of q, k and v, each with the rows of a head. `tp_blocks` must divide the heads.
    """
    sizes = [heads.total // tp_blocks * dims for heads, dims in parts]
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    joined: list[ShardRange] = []
    for (heads, dims), begin in zip(parts, begins, strict=True):
        for share in _split_part(heads, dims, begin, sum(sizes), tp_blocks):
            last = joined[-1] if joined else None
            if last is not None and last.part == share.part and last.run.stop == share.run.start and not last.padded:
                run = slice(last.run.start, share.run.stop)
                joined[-1] = replace(last, run=run, padded_count=last.count + share.padded_count)
            else:
                joined.append(share)
    return tuple(joined)


def _split_part(heads: ShardRange, dims: int, begin: int, tp_block: int, tp_blocks: int) -> Iterator[ShardRange]:
    """Yields the rows of `heads` in each TP block, where they begin at row `begin`. The last run has room for the heads
    that this rank has fewer than others."""
    each = heads.total // tp_blocks
    for number in range(heads.run.start // each, -(-heads.run.stop // each)):
        first = max(heads.run.start, number * each)
        last = min(heads.run.stop, (number + 1) * each)
        start = number * tp_block + begin + (first - number * each) * dims
        count = (last - first) * dims
        more = (heads.padded_count - heads.count) * dims if last == heads.run.stop else 0
        yield ShardRange(tp_blocks * tp_block, slice(start, start + count), count + more, tp_block)


def keep_groups(shares: Sequence[ShardRange], size: int) -> bool:
    """Returns whether the runs, concatenated, keep groups of `size` rows that share scales together and aligned."""
    begin = 0
    for share in shares:
        if begin % size or share.cuts(size):
            return False
        begin += share.padded_count
    return True
