"""Attention over selected packed latents: e4m3 with a scale per 128 columns, and rotary columns in bfloat16.

Programs, splits and packed entries are those of `sparse_attention`. An entry has 656 bytes: 512 numbers in four groups,
four fp32 scales, 64 rotary columns. Scales multiply the products of a group, and the softmax weights before these are
multiplied with the group's values.

Numbers are multiplied in float16, which holds every e4m3 number: the conversion is one instruction, and weights keep
eleven bits. Queries in bfloat16 are multiplied by a power of two first, so that the largest of a program is in [1, 2).
Weights times scales are multiplied by 256, so that they are normal numbers from 2.4e-7 to 255: groups of latents
may have peaks of 1e-4 to 1e5. Reference: `native_sparse_ops.attend_selected`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.attention.triton_ops.common import load_rows
from sglang.srt.layers.attention.triton_ops.sparse_steps import (
    finish,
    share_of,
    softmax_step,
    store_columns,
    store_lse,
)

PACKED_BYTES = 656


@triton.jit
def _query_peak(q_ptr, q_rows, head_ok):
    """The largest of 512 columns of all heads."""
    q = load_rows(q_ptr, q_rows, head_ok, 0, 512, 512, True)
    return tl.max(tl.max(tl.abs(q), 1), 0).to(tl.float32)


@triton.jit
def _query_columns(q_ptr, q_rows, head_ok, shrink, FIRST: tl.constexpr, BLOCK_H: tl.constexpr):
    """128 columns -> even ones and odd ones [H, 64] in float16."""
    q = load_rows(q_ptr, q_rows, head_ok, FIRST, 128, FIRST + 128, True)
    even, odd = tl.split(tl.reshape((q.to(tl.float32) * shrink).to(tl.float16), [BLOCK_H, 64, 2]))
    return even, odd


@triton.jit
def _numbers(pairs):
    """Pairs of e4m3 numbers [N, 64] as int16 -> the first of each and the second [N, 64] in float16."""
    first = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    second = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return first.to(tl.float16), second.to(tl.float16)


@triton.jit
def _group_scores(scores, q0, q1, k0, k1, scales):
    products = tl.dot(q0, tl.trans(k0))
    products = tl.dot(q1, tl.trans(k1), products)
    return scores + products * scales[None, :]


@triton.jit
def _group_values(acc0, acc1, weights, decay, k0, k1, scales):
    scaled = (weights * (scales * 256.0)[None, :]).to(tl.float16)
    return tl.dot(scaled, k0, acc0 * decay[:, None]), tl.dot(scaled, k1, acc1 * decay[:, None])


@triton.jit
def _store_group(
    o_ptr, part_o_ptr, acc0, acc1, final, token, split, num_splits, num_heads, stride_ot, stride_oh, head, head_ok,
    FIRST: tl.constexpr,
):  # fmt: skip
    values = tl.interleave(acc0, acc1) * (final * 0.00390625)[:, None]
    store_columns(
        o_ptr, part_o_ptr, values, token, split, num_splits, num_heads, stride_ot, stride_oh, head, head_ok, FIRST, 512,
        128,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_heads", "num_head_tiles", "num_splits", "stride_slots"],
    do_not_specialize_on_alignment=["counts_ptr"],
)
def packed_attention_kernel(
    q_ptr, o_ptr, lse_ptr, sinks_ptr, pairs_ptr, scales_ptr, rope_ptr, slots_ptr, counts_ptr, part_o_ptr,
    part_lse_ptr, num_heads, num_head_tiles, num_splits, scale, stride_qt, stride_qh, stride_ot, stride_oh,
    stride_slots, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q [T, H, 576], one packed cache as int16 [S, 328], fp32 [S, 164] and bf16 [S, 328], slots [T, K] and counts [T]
    int32 -> as `sparse_attention_kernel`. Grid: (T * splits * head tiles,)."""
    pid = tl.program_id(0)
    head_tile = pid % num_head_tiles
    split = pid // num_head_tiles % num_splits
    token = pid // num_head_tiles // num_splits
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = head_tile * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = head < num_heads
    q_rows = token.to(tl.int64) * stride_qt + head * stride_qh
    # Products with powers of two are exact.
    peak = _query_peak(q_ptr, q_rows, head_ok)
    exponent = tl.floor(tl.log2(tl.where(peak > 0.0, peak, 1.0)))
    stretch = tl.exp2(exponent)
    shrink = tl.exp2(-exponent)
    qa0, qa1 = _query_columns(q_ptr, q_rows, head_ok, shrink, 0, BLOCK_H)
    qb0, qb1 = _query_columns(q_ptr, q_rows, head_ok, shrink, 128, BLOCK_H)
    qc0, qc1 = _query_columns(q_ptr, q_rows, head_ok, shrink, 256, BLOCK_H)
    qd0, qd1 = _query_columns(q_ptr, q_rows, head_ok, shrink, 384, BLOCK_H)
    q_pe = load_rows(q_ptr, q_rows, head_ok, 512, 64, 576, True)

    acc_a0 = tl.zeros([BLOCK_H, 64], dtype=tl.float32)
    acc_a1 = tl.zeros([BLOCK_H, 64], dtype=tl.float32)
    acc_b0 = tl.zeros([BLOCK_H, 64], dtype=tl.float32)
    acc_b1 = tl.zeros([BLOCK_H, 64], dtype=tl.float32)
    acc_c0 = tl.zeros([BLOCK_H, 64], dtype=tl.float32)
    acc_c1 = tl.zeros([BLOCK_H, 64], dtype=tl.float32)
    acc_d0 = tl.zeros([BLOCK_H, 64], dtype=tl.float32)
    acc_d1 = tl.zeros([BLOCK_H, 64], dtype=tl.float32)
    row_max = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_H], dtype=tl.float32)
    begin, end = share_of(counts_ptr, token, split, num_splits, BLOCK_N)
    slots_ptr += token.to(tl.int64) * stride_slots
    offs_n = tl.arange(0, BLOCK_N)
    slots = tl.load(slots_ptr + begin + offs_n, mask=begin + offs_n < end, other=-1)
    for n in range(begin, end, BLOCK_N):
        ahead = n + BLOCK_N + offs_n
        next_slots = tl.load(slots_ptr + ahead, mask=ahead < end, other=-1)
        keep = slots >= 0
        # Numbers of which the compiler knows that 16 bytes divide them.
        rows = slots.to(tl.int64) * 328
        scale_rows = scales_ptr + slots.to(tl.int64) * 164 + 128
        sa = tl.load(scale_rows, mask=keep, other=0.0)
        sb = tl.load(scale_rows + 1, mask=keep, other=0.0)
        sc = tl.load(scale_rows + 2, mask=keep, other=0.0)
        sd = tl.load(scale_rows + 3, mask=keep, other=0.0)
        ka0, ka1 = _numbers(load_rows(pairs_ptr, rows, keep, 0, 64, 256, True))
        kb0, kb1 = _numbers(load_rows(pairs_ptr, rows, keep, 64, 64, 256, True))
        kc0, kc1 = _numbers(load_rows(pairs_ptr, rows, keep, 128, 64, 256, True))
        kd0, kd1 = _numbers(load_rows(pairs_ptr, rows, keep, 192, 64, 256, True))
        k_pe = load_rows(rope_ptr, rows, keep, 264, 64, 328, True).to(q_pe.dtype)
        scores = tl.dot(q_pe, tl.trans(k_pe)) * shrink
        scores = _group_scores(scores, qa0, qa1, ka0, ka1, sa)
        scores = _group_scores(scores, qb0, qb1, kb0, kb1, sb)
        scores = _group_scores(scores, qc0, qc1, kc0, kc1, sc)
        scores = _group_scores(scores, qd0, qd1, kd0, kd1, sd)
        weights, decay, row_max, row_sum = softmax_step(row_max, row_sum, scores, keep, scale * stretch)
        acc_a0, acc_a1 = _group_values(acc_a0, acc_a1, weights, decay, ka0, ka1, sa)
        acc_b0, acc_b1 = _group_values(acc_b0, acc_b1, weights, decay, kb0, kb1, sb)
        acc_c0, acc_c1 = _group_values(acc_c0, acc_c1, weights, decay, kc0, kc1, sc)
        acc_d0, acc_d1 = _group_values(acc_d0, acc_d1, weights, decay, kd0, kd1, sd)
        slots = next_slots

    final, lse = finish(row_max, row_sum, head, head_ok, sinks_ptr, HAS_SINKS)
    store_lse(lse_ptr, part_lse_ptr, lse, token, split, num_splits, num_heads, head, head_ok, HAS_LSE)
    _store_group(o_ptr, part_o_ptr, acc_a0, acc_a1, final, token, split, num_splits, num_heads, stride_ot, stride_oh,
                 head, head_ok, 0)  # fmt: skip
    _store_group(o_ptr, part_o_ptr, acc_b0, acc_b1, final, token, split, num_splits, num_heads, stride_ot, stride_oh,
                 head, head_ok, 128)  # fmt: skip
    _store_group(o_ptr, part_o_ptr, acc_c0, acc_c1, final, token, split, num_splits, num_heads, stride_ot, stride_oh,
                 head, head_ok, 256)  # fmt: skip
    _store_group(o_ptr, part_o_ptr, acc_d0, acc_d1, final, token, split, num_splits, num_heads, stride_ot, stride_oh,
                 head, head_ok, 384)  # fmt: skip
