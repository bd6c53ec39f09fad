"""Parts shared by the sparse attention kernels: a softmax step, the splits of a token's entries, and the output stores.

Scores and log-sum-exps are in the base-2 domain, as in `common`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_step(row_max, row_sum, scores, keep, scale):
    """scores [H, N] -> (weights [H, N] fp32, what earlier sums are multiplied by [H], the new maximum and sum)."""
    scores = tl.where(keep[None, :], scores * scale, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # No entry may have been met so far; -inf - -inf would be NaN.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(row_max - base)
    return weights, decay, new_max, row_sum * decay + tl.sum(weights, 1)


@triton.jit
def finish(row_max, row_sum, head, head_ok, sinks_ptr, HAS_SINKS: tl.constexpr):
    """With the sink of each head: what sums over values are multiplied by [H], and the log-sum-exp [H], base 2."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=head_ok, other=0.0) * 1.4426950408889634
        top = tl.maximum(row_max, sink)
        decay = tl.exp2(row_max - top)
        row_sum = row_sum * decay + tl.exp2(sink - top)
        return decay / row_sum, top + tl.log2(row_sum)
    # Of a token without entries all is zero.
    return 1.0 / tl.where(row_sum > 0.0, row_sum, 1.0), row_max + tl.log2(row_sum)


@triton.jit
def share_of(counts_ptr, token, split, num_splits, BLOCK_N: tl.constexpr):
    """Begin and end of a share of a token's entries."""
    count = tl.load(counts_ptr + token)
    size = tl.cdiv(tl.cdiv(count, BLOCK_N), num_splits) * BLOCK_N
    begin = tl.minimum(split * size, count)
    return begin, tl.minimum(begin + size, count)


@triton.jit
def store_lse(lse_ptr, part_lse_ptr, lse, token, split, num_splits, num_heads, head, head_ok, HAS_LSE: tl.constexpr):
    if num_splits > 1:
        rows = (token * num_splits + split).to(tl.int64) * num_heads
        tl.store(part_lse_ptr + rows + head, lse, mask=head_ok)
    else:
        if HAS_LSE:
            rows = token.to(tl.int64) * num_heads
            tl.store(lse_ptr + rows + head, lse * 0.6931471805599453, mask=head_ok)


@triton.jit
def store_columns(
    o_ptr, part_o_ptr, values, token, split, num_splits, num_heads, stride_ot, stride_oh, head, head_ok, first,
    RANK: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Columns first .. first + COLS - 1 of the output, or of the share."""
    cols = (first + tl.arange(0, COLS))[None, :]
    if num_splits > 1:
        rows = (token * num_splits + split).to(tl.int64) * num_heads + head
        tl.store(part_o_ptr + rows[:, None] * RANK + cols, values, mask=head_ok[:, None])
    else:
        rows = token.to(tl.int64) * stride_ot + head * stride_oh
        tl.store(o_ptr + rows[:, None] + cols, values.to(o_ptr.dtype.element_ty), mask=head_ok[:, None])


@triton.jit(do_not_specialize=["num_splits"])
def merge_shares_kernel(
    o_ptr, lse_ptr, sinks_ptr, part_o_ptr, part_lse_ptr, num_splits, num_heads, stride_ot, stride_oh,
    RANK: tl.constexpr, COLS: tl.constexpr, SHARES: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """COLS columns of all shares of one (token, head). Grid: (H, T, RANK / COLS)."""
    head = tl.program_id(0)
    token = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    share = tl.arange(0, SHARES)
    rows = (token.to(tl.int64) * num_splits + share) * num_heads + head
    lse = tl.load(part_lse_ptr + rows, mask=share < num_splits, other=float("-inf"))
    top = tl.max(lse, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head) * 1.4426950408889634
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(lse - base)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - base)
    cols = tl.program_id(2) * COLS + tl.arange(0, COLS)
    # Shares without entries are not read: nobody has written there.
    parts = part_o_ptr + rows[:, None] * RANK + cols[None, :]
    values = tl.load(parts, mask=(lse > float("-inf"))[:, None], other=0.0)
    out = tl.sum(values * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(o_ptr + token.to(tl.int64) * stride_ot + head * stride_oh + cols, out.to(o_ptr.dtype.element_ty))
    if HAS_LSE:
        if tl.program_id(2) == 0:
            tl.store(lse_ptr + token.to(tl.int64) * num_heads + head, (base + tl.log2(total)) * 0.6931471805599453)
