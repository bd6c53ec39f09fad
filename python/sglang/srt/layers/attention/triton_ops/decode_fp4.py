"""Decode attention over a paged cache of four-bit keys and values (`fp4_rows`).

Work is split and merged as in `decode_attention`, with its plan and workspace. A byte holds two codes, so a tile of
keys becomes two tiles, of the even and of the odd columns: queries are loaded the same way, scores are the sum of two
products, and outputs have two accumulators. No element has to be moved.

Reference: `reference_decode` in test/srt/layers/attention/reference.py, over the dequantized cache.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.triton_ops.common import LOG2E, cap_scores, first_seen, rows_of_tile, visible
from sglang.srt.layers.attention.triton_ops.decode_attention import merge_pieces
from sglang.srt.layers.attention.triton_ops.decode_workspace import DecodePlan, head_tiles
from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.fp4_rows import LIFT, group_block, load_fp4, slot_stride


@triton.jit
def load_pairs(base, row_offsets, row_ok, HALF: tl.constexpr, LIMIT: tl.constexpr):
    """Rows of numbers at element offsets `row_offsets` [R] -> their even and odd columns, each [R, HALF]; columns from
    LIMIT on, and rows that are not `row_ok`, read as zero."""
    cols = 2 * tl.arange(0, HALF)
    at = base + row_offsets[:, None] + cols[None, :]
    there = row_ok[:, None] & (cols < LIMIT)[None, :]
    return tl.load(at, mask=there, other=0.0), tl.load(at + 1, mask=there, other=0.0)


@triton.jit
def attend_fp4(
    even_acc, odd_acc, row_max, row_sum, even_q, odd_q, k_base, k_scale_base, v_base, v_scale_base, slots, keep,
    visible, k_stride, k_scale_stride, v_stride, v_scale_stride, scale, cap, HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_GV: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """One online-softmax step with the keys at cache slots `slots` [N]: those that are `keep` [N] are read, those that
    are `visible` [M, N] or [1, N] count. Without MASKED all are both."""
    slots = slots.to(tl.int64)
    even, odd = load_fp4(
        k_base, k_scale_base, slots * k_stride, slots * k_scale_stride, keep, HEAD_DIM, BLOCK_G, BLOCK_N, even_q.dtype,
        MASKED)  # fmt: skip
    scores = tl.dot(even_q, tl.trans(even))
    scores = tl.dot(odd_q, tl.trans(odd), scores)
    if HAS_CAP:
        scores = cap_scores(scores, scale, cap)
        scale = 1.0
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    # A row that has not met an admissible key yet has maximum -inf; -inf - -inf would be NaN.
    base = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    p = tl.exp2(scores * scale - base[:, None])
    decay = tl.exp2(row_max - base)
    row_sum = row_sum * decay + tl.sum(p, 1)
    even, odd = load_fp4(
        v_base, v_scale_base, slots * v_stride, slots * v_scale_stride, keep, V_HEAD_DIM, BLOCK_GV, BLOCK_N,
        even_q.dtype, MASKED)  # fmt: skip
    p = p.to(even_q.dtype)
    even_acc = tl.dot(p, even, even_acc * decay[:, None])
    odd_acc = tl.dot(p, odd, odd_acc * decay[:, None])
    return even_acc, odd_acc, new_max, row_sum


@triton.jit(do_not_specialize_on_alignment=["req_pool_indices_ptr", "seq_lens_ptr", "prefix_lens_ptr"],
            do_not_specialize=["num_tokens", "stride_kcs", "stride_kss", "stride_vcs", "stride_vss"])  # fmt: skip
def decode_fp4_kernel(
    q_ptr, o_ptr, k_cache_ptr, k_scales_ptr, v_cache_ptr, v_scales_ptr, req_to_token_ptr, req_pool_indices_ptr,
    seq_lens_ptr, prefix_lens_ptr, sinks_ptr, work_ptr, part_o_ptr, part_lse_ptr, num_head_tiles, num_heads, num_tokens,
    scale, v_scale, cap, window, stride_qb, stride_qh, stride_ob, stride_oh, stride_kcs, stride_kss, stride_vcs,
    stride_vss, stride_rt, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_GV: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_CHUNKS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_GUESSES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """q [B, Hq, D], codes [S, Hkv, D/2 or Dv/2] and scales [S, Hkv, D/16 or Dv/16], uint8 -> as `decode_kernel`: o
    [B, Hq, Dv] for sequences of one piece, otherwise the piece's normalized output and log-sum-exp. Grid:
    (pieces * num_head_tiles,)."""
    pid = tl.program_id(0)
    head_tile = pid % num_head_tiles
    piece = pid // num_head_tiles
    # The plan and the batch were written before q: the kernel directly ahead, alone of all, may still run.
    seq = tl.load(work_ptr + piece * 4)
    begin = tl.load(work_ptr + piece * 4 + 1)
    end = tl.load(work_ptr + piece * 4 + 2)
    num_pieces = tl.load(work_ptr + piece * 4 + 3)
    row = tl.load(req_pool_indices_ptr + tl.maximum(seq, 0))
    prefix = 0
    length = 0
    if HAS_GUESSES or HAS_WINDOW:
        length = tl.load(seq_lens_ptr + tl.maximum(seq, 0))
    if HAS_GUESSES:
        prefix = tl.load(prefix_lens_ptr + tl.maximum(seq, 0))
    if HAS_WINDOW:
        begin = tl.maximum(begin, first_seen(prefix + 1 if HAS_GUESSES else length, window, HAS_CHUNKS))
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if seq < 0:
        return

    kv_head, head, q_row, part_row, part_rows, head_ok, row_end = rows_of_tile(
        seq, prefix, length, head_tile, num_heads, num_tokens, GROUP, BLOCK_H, HAS_GUESSES)  # fmt: skip
    q_rows = q_row * stride_qb + head * stride_qh
    even_q, odd_q = load_pairs(q_ptr, q_rows, head_ok, BLOCK_G * 8, HEAD_DIM)

    k_base = k_cache_ptr + kv_head * (HEAD_DIM // 2)
    k_scale_base = k_scales_ptr + kv_head * (HEAD_DIM // 16)
    v_base = v_cache_ptr + kv_head * (V_HEAD_DIM // 2)
    v_scale_base = v_scales_ptr + kv_head * (V_HEAD_DIM // 16)
    k_stride = stride_kcs * (8 if HEAD_DIM % 32 else 16)
    v_stride = stride_vcs * (8 if V_HEAD_DIM % 32 else 16)
    slot_ptr = req_to_token_ptr + row * stride_rt
    even_acc = tl.zeros([BLOCK_H, BLOCK_GV * 8], dtype=tl.float32)
    odd_acc = tl.zeros([BLOCK_H, BLOCK_GV * 8], dtype=tl.float32)
    row_max = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_H], dtype=tl.float32)
    offs_n = tl.arange(0, BLOCK_N)
    if HAS_WINDOW:
        start = begin // BLOCK_N * BLOCK_N
    else:
        whole = end - begin  # what all rows see
        if HAS_GUESSES:
            whole = tl.maximum(tl.minimum(end, prefix + 1) - begin, 0)
        start = begin + whole // BLOCK_N * BLOCK_N
        for n in range(begin, start, BLOCK_N):
            pos = n + offs_n
            keep = pos < end
            even_acc, odd_acc, row_max, row_sum = attend_fp4(
                even_acc, odd_acc, row_max, row_sum, even_q, odd_q, k_base, k_scale_base, v_base, v_scale_base,
                tl.load(slot_ptr + pos), keep, keep[None, :], k_stride, stride_kss, v_stride, stride_vss, scale,
                cap, HEAD_DIM, V_HEAD_DIM, BLOCK_G, BLOCK_GV, BLOCK_N, False, HAS_CAP)  # fmt: skip
    for n in range(start, end, BLOCK_N):
        pos = n + offs_n
        keep = (pos >= begin) & (pos < end)
        seen = keep[None, :]
        if HAS_GUESSES:
            seen = visible(seen, pos, row_end, window, HAS_WINDOW, HAS_CHUNKS)
        even_acc, odd_acc, row_max, row_sum = attend_fp4(
            even_acc, odd_acc, row_max, row_sum, even_q, odd_q, k_base, k_scale_base, v_base, v_scale_base,
            tl.load(slot_ptr + pos, mask=pos < end, other=0), keep, seen, k_stride, stride_kss, v_stride,
            stride_vss, scale, cap, HEAD_DIM, V_HEAD_DIM, BLOCK_G, BLOCK_GV, BLOCK_N, True, HAS_CAP)  # fmt: skip

    cols = 2 * tl.arange(0, BLOCK_GV * 8)
    mask = head_ok[:, None] & (cols < V_HEAD_DIM)[None, :]
    if num_pieces == 1:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=head_ok, other=0.0) * 1.4426950408889634
            row_sum += tl.exp2(sink - row_max)
        factor = (v_scale / row_sum)[:, None]
        out = o_ptr + (q_row * stride_ob + head * stride_oh)[:, None] + cols[None, :]
        tl.store(out, (even_acc * factor).to(o_ptr.dtype.element_ty), mask=mask)
        tl.store(out + 1, (odd_acc * factor).to(o_ptr.dtype.element_ty), mask=mask)
    else:
        # A piece of which a row sees nothing has row_sum 0: its -inf makes the combination skip its output.
        factor = (v_scale / row_sum)[:, None]
        part = piece.to(tl.int64) * part_rows + part_row
        part_o = part_o_ptr + part[:, None] * V_HEAD_DIM + cols[None, :]
        tl.store(part_o, even_acc * factor, mask=mask)
        tl.store(part_o + 1, odd_acc * factor, mask=mask)
        tl.store(part_lse_ptr + part, row_max + tl.log2(row_sum), mask=head_ok)


def decode_fp4_fwd(
    q: torch.Tensor,
    o: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: DecodePlan,
    *,
    k_group_scales: torch.Tensor,
    v_group_scales: torch.Tensor,
    scale: float,
    tile: Mapping[str, int],
    sliding_window: int = 0,
    chunked: bool = False,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    lse: torch.Tensor | None = None,
    prefix_lens: torch.Tensor | None = None,
) -> None:
    """Does as `decode_attention_fwd`, over k_cache [S, Hkv, D/2] and v_cache [S, Hkv, Dv/2] uint8 with group scales [S,
    Hkv, D/16] and [S, Hkv, Dv/16] uint8, which hold e4m3. D and Dv are multiples of 16."""
    plan.check_rows(req_pool_indices)
    num_seqs, (_, num_heads, head_dim) = seq_lens.shape[0], q.shape
    num_tokens = q.shape[0] // num_seqs
    num_kv_heads, v_head_dim = v_cache.shape[1], 2 * v_cache.shape[2]
    tiles = head_tiles(num_heads * num_tokens, num_kv_heads, tile["BLOCK_H"])
    decode_fp4_kernel[(plan.num_pieces * tiles,)](
        q, o, k_cache, k_group_scales, v_cache, v_group_scales, req_to_token, req_pool_indices, seq_lens,
        seq_lens if prefix_lens is None else prefix_lens, seq_lens if sinks is None else sinks, plan.work,
        plan.part_o, plan.part_lse, tiles, num_heads, num_tokens, scale * k_scale * LIFT * LOG2E,
        v_scale * LIFT, logit_cap * LOG2E, sliding_window, q.stride(0), q.stride(1), o.stride(0), o.stride(1),
        slot_stride(k_cache), k_group_scales.stride(0), slot_stride(v_cache), v_group_scales.stride(0),
        req_to_token.stride(0), GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim,
        BLOCK_G=group_block(head_dim), BLOCK_GV=group_block(v_head_dim), BLOCK_H=tile["BLOCK_H"],
        BLOCK_N=tile["BLOCK_N"],
        HAS_WINDOW=sliding_window > 0, HAS_CHUNKS=chunked, HAS_CAP=logit_cap > 0, HAS_SINKS=sinks is not None,
        HAS_GUESSES=prefix_lens is not None, num_warps=tile["num_warps"], num_stages=tile["num_stages"],
        **pdl.options(),
    )  # fmt: skip
    if prefix_lens is not None:  # of a piece, the draft tokens are further heads
        o = o.view(num_seqs, num_tokens * num_heads, v_head_dim)
    merge_pieces(o, plan, sinks, lse)
