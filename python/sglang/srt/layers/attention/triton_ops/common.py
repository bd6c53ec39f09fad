"""Parts that the attention kernels share.

Scores are in the base-2 domain: the scale handed to a kernel already contains log2(e), so that every exponential is one
`exp2`. Sums and accumulators are fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = 1.4426950408889634


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """Returns (largest power of two in head_dim, the rest padded to a power of two, or 0): 192 -> (128, 64), 72 -> (64,
    16)."""
    main = 1 << (head_dim.bit_length() - 1)
    rest = head_dim - main
    return main, 0 if rest == 0 else max(16, triton.next_power_of_2(rest))


@triton.jit
def load_rows(
    base, row_offsets, row_ok, FIRST: tl.constexpr, COLS: tl.constexpr, LIMIT: tl.constexpr, MASK_ROWS: tl.constexpr
):
    """Rows at element offsets `row_offsets` [R], columns FIRST..FIRST+COLS-1 -> [R, COLS]; columns from LIMIT on and,
    if MASK_ROWS, rows that are not `row_ok` read as zero. FIRST + COLS <= LIMIT means that no column mask is needed."""
    cols = FIRST + tl.arange(0, COLS)
    ptrs = base + row_offsets[:, None] + cols[None, :]
    if MASK_ROWS:
        if FIRST + COLS > LIMIT:
            return tl.load(ptrs, mask=row_ok[:, None] & (cols < LIMIT)[None, :], other=0.0)
        return tl.load(ptrs, mask=row_ok[:, None], other=0.0)
    if FIRST + COLS > LIMIT:
        return tl.load(ptrs, mask=(cols < LIMIT)[None, :], other=0.0)
    return tl.load(ptrs)


@triton.jit
def rows_of_tile(
    seq,
    prefix,
    length,
    head_tile,
    num_heads,
    num_tokens,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_GUESSES: tl.constexpr,
):
    """Queries of one tile: heads of one KV head, and with HAS_GUESSES those of all num_tokens tokens of a sequence. ->
    KV head; head [BLOCK_H]; row of q; row among the outputs of a piece [BLOCK_H], which are so many; which rows there
    are [BLOCK_H]; and, with HAS_GUESSES, the first position that a row does not see [BLOCK_H], at most the length."""
    if HAS_GUESSES:
        num_rows = num_tokens * GROUP
    else:
        num_rows = GROUP
    tiles = (num_rows + BLOCK_H - 1) // BLOCK_H
    kv_head = head_tile // tiles
    row = head_tile % tiles * BLOCK_H + tl.arange(0, BLOCK_H)
    head = kv_head * GROUP + row
    part = head
    q_row = seq.to(tl.int64)
    row_end = length
    if HAS_GUESSES:
        token = row // GROUP
        head = kv_head * GROUP + row % GROUP
        part = token * num_heads + head
        q_row = q_row * num_tokens + token
        row_end = tl.minimum(prefix + 1 + token, length)
        num_heads *= num_tokens
    return kv_head, head, q_row, part, num_heads, row < num_rows, row_end


@triton.jit
def first_seen(row_end, window, HAS_CHUNKS: tl.constexpr):
    """The first position that a query sees whose first unseen one is `row_end`: of its window, which may begin before
    0, or of its chunk."""
    if HAS_CHUNKS:
        return (row_end - 1) // window * window
    else:
        return row_end - window


@triton.jit
def visible(seen, pos, row_end, window, HAS_WINDOW: tl.constexpr, HAS_CHUNKS: tl.constexpr):
    """seen [.., N] of keys at pos [N], and of these each row's own [M, N]: before row_end [M], and in its window."""
    seen = seen & (pos[None, :] < row_end[:, None])
    if HAS_WINDOW:
        seen = seen & (pos[None, :] >= first_seen(row_end[:, None], window, HAS_CHUNKS))
    return seen


@triton.jit
def cap_scores(scores, scale, cap):
    """cap * tanh(scores * scale / cap), with scale, cap and the result in the base-2 domain."""
    # tanh(x) = 1 - 2 / (1 + e^(2x)); x is dimensionless, so the base-2 factors of scale and cap cancel.
    return cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (scale / cap) * 2.8853900817779268)))


@triton.jit
def accumulate(acc, row_max, row_sum, scores, scale, keep, v, DTYPE: tl.constexpr, MASKED: tl.constexpr):
    """One online-softmax step with scores [M, N] (times `scale`: base-2 domain) and v [N, Dv]."""
    if MASKED:
        scores = tl.where(keep, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    # A row that has not met an admissible key yet has maximum -inf; -inf - -inf would be NaN.
    base = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    p = tl.exp2(scores * scale - base[:, None])
    decay = tl.exp2(row_max - base)
    row_sum = row_sum * decay + tl.sum(p, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(p.to(DTYPE), v.to(DTYPE), acc)
    return acc, new_max, row_sum
