"""Attention over selected records of latents, in eight or in four bits, of one or two caches.

Programs and splits are those of `sparse_attention`. Numbers are multiplied in float16, which holds each of them times
its scale, and so are the softmax's weights. Queries in bfloat16 are multiplied by a power of two first, so that the
largest of a program is in [1, 2). Rotary columns keep bfloat16; they are keys only, or (ROPE_VALUES) the last columns
of the values, too. Reference: `native_sparse_ops.attend_selected`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.selection import Selection
from sglang.srt.layers.attention.triton_ops.common import LOG2E, load_rows
from sglang.srt.layers.attention.triton_ops.sparse_attention import Shares, sparse_attention_fwd
from sglang.srt.layers.attention.triton_ops.sparse_steps import finish, share_of, softmax_step, store_lse
from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.latent_records import check_records, load_record, record_constants

if TYPE_CHECKING:
    from sglang.srt.plan.latent_record import LatentRecord


@triton.jit
def _attend(
    acc0, acc1, acc_pe, row_max, row_sum, q0, q1, q_pe, numbers_ptr, rope_ptr, scales_ptr, slots_ptr, begin, end, scale,
    stretch, ROPE: tl.constexpr, ROPE_AT: tl.constexpr, ROPE_VALUES: tl.constexpr, BITS: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr, SCALES_AT: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Records slots[begin:end] of a cache."""
    offs_n = tl.arange(0, BLOCK_N)
    slots = tl.load(slots_ptr + begin + offs_n, mask=begin + offs_n < end, other=-1)
    for n in range(begin, end, BLOCK_N):
        ahead = n + BLOCK_N + offs_n
        next_slots = tl.load(slots_ptr + ahead, mask=ahead < end, other=-1)
        keep = slots >= 0
        rows = slots.to(tl.int64)
        k0, k1 = load_record(numbers_ptr, scales_ptr, rows, keep, BITS, GROUPS, GROUP_BLOCK, SCALES_AT, SIZE, BLOCK_N)
        scores = tl.dot(q0, tl.trans(k0))
        scores = tl.dot(q1, tl.trans(k1), scores) * stretch
        if ROPE > 0:
            k_pe = load_rows(rope_ptr, rows * (SIZE // 2), keep, ROPE_AT // 2, ROPE, SIZE // 2, True).to(q_pe.dtype)
            scores = tl.dot(q_pe, tl.trans(k_pe), scores)
        weights, decay, row_max, row_sum = softmax_step(row_max, row_sum, scores, keep, scale)
        halves = weights.to(tl.float16)
        acc0 = tl.dot(halves, k0, acc0 * decay[:, None])
        acc1 = tl.dot(halves, k1, acc1 * decay[:, None])
        if ROPE_VALUES:
            acc_pe = tl.dot(weights.to(k_pe.dtype), k_pe, acc_pe * decay[:, None])
        slots = next_slots
    return acc0, acc1, acc_pe, row_max, row_sum


@triton.jit
def _store(
    o_ptr, part_o_ptr, values, token, split, num_splits, num_heads, stride_ot, stride_oh, head, head_ok, cols, cols_ok,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Columns `cols` of the output, or of the share."""
    mask = head_ok[:, None] & cols_ok[None, :]
    if num_splits > 1:
        rows = (token * num_splits + split).to(tl.int64) * num_heads + head
        tl.store(part_o_ptr + rows[:, None] * WIDTH + cols[None, :], values, mask=mask)
    else:
        rows = token.to(tl.int64) * stride_ot + head * stride_oh
        tl.store(o_ptr + rows[:, None] + cols[None, :], values.to(o_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["num_heads", "num_head_tiles", "num_splits", "stride_slots", "stride_more_slots"],
    do_not_specialize_on_alignment=["counts_ptr", "more_counts_ptr", "rows_ptr"],
)
def record_attention_kernel(
    q_ptr, o_ptr, lse_ptr, sinks_ptr, numbers_ptr, rope_ptr, scales_ptr, slots_ptr, counts_ptr, rows_ptr,
    more_numbers_ptr, more_rope_ptr, more_scales_ptr, more_slots_ptr, more_counts_ptr, part_o_ptr, part_lse_ptr,
    num_heads, num_head_tiles, num_splits, scale, outer, stride_qt, stride_qh, stride_ot, stride_oh, stride_slots,
    stride_more_slots, RANK: tl.constexpr, ROPE: tl.constexpr, ROPE_AT: tl.constexpr, ROPE_VALUES: tl.constexpr,
    BITS: tl.constexpr, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr, SCALES_AT: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_MORE: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q [T, H, RANK + ROPE], records [S, SIZE] (numbers as int16 or uint8, rotary columns as bfloat16, scales as uint8)
    whose numbers are real values divided by `outer` -> o [T, H, RANK, or RANK + ROPE if ROPE_VALUES] and the rest as
    `sparse_attention_kernel`. HAS_ROWS: the first cache's slots are rows rows[T] of a table. Grid: (T * splits * head
    tiles,)."""
    pid = tl.program_id(0)
    head_tile = pid % num_head_tiles
    split = pid // num_head_tiles % num_splits
    token = pid // num_head_tiles // num_splits
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    PAIRS: tl.constexpr = GROUP_BLOCK * (32 if BITS == 8 else 8)
    WIDTH: tl.constexpr = RANK + ROPE if ROPE_VALUES else RANK
    head = head_tile * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = head < num_heads
    q_rows = token.to(tl.int64) * stride_qt + head * stride_qh
    q = load_rows(q_ptr, q_rows, head_ok, 0, 2 * PAIRS, RANK, True)
    # Products with powers of two are exact.
    peak = tl.max(tl.max(tl.abs(q), 1), 0).to(tl.float32)
    exponent = tl.floor(tl.log2(tl.where(peak > 0.0, peak, 1.0)))
    stretch = tl.exp2(exponent) * outer
    q0, q1 = tl.split(tl.reshape((q.to(tl.float32) * tl.exp2(-exponent)).to(tl.float16), (BLOCK_H, PAIRS, 2)))
    q_pe = q0
    if ROPE > 0:
        q_pe = load_rows(q_ptr, q_rows, head_ok, RANK, ROPE, RANK + ROPE, True)

    acc0 = tl.zeros([BLOCK_H, PAIRS], dtype=tl.float32)
    acc1 = tl.zeros([BLOCK_H, PAIRS], dtype=tl.float32)
    acc_pe = tl.zeros([BLOCK_H, ROPE if ROPE_VALUES else 1], dtype=tl.float32)
    row_max = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_H], dtype=tl.float32)
    begin, end = share_of(counts_ptr, token, split, num_splits, BLOCK_N)
    row = token.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(rows_ptr + token).to(tl.int64)
    acc0, acc1, acc_pe, row_max, row_sum = _attend(
        acc0, acc1, acc_pe, row_max, row_sum, q0, q1, q_pe, numbers_ptr, rope_ptr, scales_ptr,
        slots_ptr + row * stride_slots, begin, end, scale, stretch, ROPE, ROPE_AT, ROPE_VALUES, BITS,
        GROUPS, GROUP_BLOCK, SCALES_AT, SIZE, BLOCK_N,
    )  # fmt: skip
    if HAS_MORE:
        begin, end = share_of(more_counts_ptr, token, split, num_splits, BLOCK_N)
        acc0, acc1, acc_pe, row_max, row_sum = _attend(
            acc0, acc1, acc_pe, row_max, row_sum, q0, q1, q_pe, more_numbers_ptr, more_rope_ptr, more_scales_ptr,
            more_slots_ptr + token.to(tl.int64) * stride_more_slots, begin, end, scale, stretch, ROPE, ROPE_AT,
            ROPE_VALUES, BITS, GROUPS, GROUP_BLOCK, SCALES_AT, SIZE, BLOCK_N,
        )  # fmt: skip

    final, lse = finish(row_max, row_sum, head, head_ok, sinks_ptr, HAS_SINKS)
    store_lse(lse_ptr, part_lse_ptr, lse, token, split, num_splits, num_heads, head, head_ok, HAS_LSE)
    cols = tl.arange(0, 2 * PAIRS)
    _store(
        o_ptr, part_o_ptr, tl.interleave(acc0, acc1) * (final * outer)[:, None], token, split, num_splits, num_heads,
        stride_ot, stride_oh, head, head_ok, cols, cols < RANK, WIDTH,
    )  # fmt: skip
    if ROPE_VALUES:
        cols = RANK + tl.arange(0, ROPE)
        _store(
            o_ptr, part_o_ptr, acc_pe * final[:, None], token, split, num_splits, num_heads, stride_ot, stride_oh, head,
            head_ok, cols, cols < WIDTH, WIDTH,
        )  # fmt: skip


def record_attention_fwd(
    q: torch.Tensor,
    sources: Sequence[tuple[torch.Tensor, Selection]],
    out: torch.Tensor,
    *,
    scale: float,
    tile: Mapping[str, int],
    num_sms: int,
    record: LatentRecord,
    record_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Does as `sparse_attention_fwd` for one or two caches of records [S, 1, size] uint8."""
    if len(q) == 0:
        return
    num_tokens, num_heads, _ = q.shape
    numbers = torch.int16 if record.bits == 8 else torch.uint8
    views = []
    for cache, _ in sources:
        check_records(cache, record)
        views.append((cache.view(numbers), cache.view(torch.bfloat16), cache))
    selection, more = sources[0][1], sources[-1][1]
    shares = Shares.cut(q, out, sources, tile, num_sms)
    into_lse, from_sinks, flags = shares.outputs(sinks, lse)
    record_attention_kernel[(num_tokens * shares.count * shares.head_tiles,)](
        q, out, into_lse, from_sinks, *views[0], selection.slots, selection.counts,
        selection.counts if selection.rows is None else selection.rows, *views[-1], more.slots, more.counts,
        shares.part_o, shares.part_lse, num_heads, shares.head_tiles, shares.count, scale * LOG2E, float(record_scale),
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), selection.slots.stride(0), more.slots.stride(0),
        RANK=record.rank, ROPE=record.rope, ROPE_AT=record.rope_at, ROPE_VALUES=out.shape[2] > record.rank,
        **record_constants(record), BLOCK_H=tile["BLOCK_H"], BLOCK_N=tile["BLOCK_N"],
        HAS_ROWS=selection.rows is not None, HAS_MORE=len(sources) > 1, num_warps=tile["num_warps"],
        num_stages=tile["num_stages"], **flags, **pdl.options(),
    )  # fmt: skip
    shares.merge(out, sinks, lse)


def attention_fwd(
    q: torch.Tensor,
    sources: Sequence[tuple[torch.Tensor, Selection]],
    out: torch.Tensor,
    *,
    record: LatentRecord | None = None,
    record_scale: float = 1.0,
    **how: Any,
) -> None:
    """Computes `native_sparse_ops.attend_selected` over records, or over entries of other formats."""
    if record is None:
        sparse_attention_fwd(q, sources, out, **how)
    else:
        record_attention_fwd(q, sources, out, record=record, record_scale=record_scale, **how)
