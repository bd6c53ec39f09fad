"""Where a flat grid of blocks finds its sequence. The grid depends on shapes only, so that a CUDA graph can hold it.

Sequence i of a ragged batch owns the block numbers from start_loc[i] // BLOCK + i on, which leaves room for its last
partial block. Tokens before start_loc[0] belong to nobody here: their blocks do nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


def num_blocks(num_tokens: int, num_seqs: int, block: int) -> int:
    """Returns the size of a grid over `num_tokens` tokens of `num_seqs` sequences."""
    return num_tokens // block + num_seqs


@triton.jit
def locate(start_loc, num_seqs, block, BLOCK: tl.constexpr):
    """start_loc [num_seqs + 1] ascending -> (sequence, its first token, its length, the block's first token within it,
    which lies outside the sequence where the block has no tokens)."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(start_loc + middle) // BLOCK + middle <= block:
            low = middle
        else:
            high = middle
    start = tl.load(start_loc + low)
    length = tl.load(start_loc + low + 1) - start
    return low, start, length, (block - (start // BLOCK + low)) * BLOCK
