"""Prefill attention of 16-bit new tokens over a paged prefix of four-bit keys and values (`fp4_rows`).

Rows, blocks and grid are those of `extend_attention`. The prefix is read in even and odd columns, as in `decode_fp4`;
then the two accumulators are joined, and the new tokens follow as in `extend_attention`.

Reference: `reference_extend` in test/srt/layers/attention/reference.py, over the dequantized cache.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.triton_ops.common import LOG2E, load_rows, split_head_dim
from sglang.srt.layers.attention.triton_ops.decode_fp4 import attend_fp4, load_pairs
from sglang.srt.layers.attention.triton_ops.extend_attention import _attend
from sglang.srt.layers.triton_ops.fp4_rows import LIFT, group_block, slot_stride


# Index arrays arrive as slices of one packed buffer: their alignment must not decide about a recompilation.
@triton.jit(
    do_not_specialize=["num_seqs", "num_blocks", "stride_kcs", "stride_kss", "stride_vcs", "stride_vss"],
    do_not_specialize_on_alignment=["req_pool_indices_ptr", "prefix_lens_ptr", "start_loc_ptr"],
)
def extend_fp4_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, k_cache_ptr, k_scales_ptr, v_cache_ptr, v_scales_ptr, req_to_token_ptr,
    req_pool_indices_ptr, prefix_lens_ptr, start_loc_ptr, sinks_ptr, num_seqs, num_blocks, num_kv_heads, scale, k_scale,
    v_scale, cap, window, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
    stride_kcs, stride_kss, stride_vcs, stride_vss, stride_rt, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DPE: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_GV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CHUNKS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """q [T, Hkv * GROUP, D], k/v [T, Hkv, D/Dv], codes [S, Hkv, D/2 or Dv/2] and scales [S, Hkv, D/16 or Dv/16], uint8
    -> o [T, Hkv * GROUP, Dv]; `scale` and `cap` carry log2(e), k_scale and v_scale LIFT. Grid: (num_blocks * Hkv,)."""
    pid = tl.program_id(0)
    kv_head = pid % num_kv_heads
    # The last blocks of a sequence see the most keys: start them first.
    block = num_blocks - 1 - pid // num_kv_heads

    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(start_loc_ptr + middle) * GROUP // BLOCK_M + middle <= block:
            low = middle
        else:
            high = middle
    seq = low
    seq_start = tl.load(start_loc_ptr + seq)
    seq_len = tl.load(start_loc_ptr + seq + 1) - seq_start
    first_row = (block - (seq_start * GROUP // BLOCK_M + seq)) * BLOCK_M
    if (first_row < 0) | (first_row >= seq_len * GROUP):
        return

    rows = first_row + tl.arange(0, BLOCK_M)
    row_ok = rows < seq_len * GROUP
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    first_token = first_row // GROUP
    last_token = tl.minimum((first_row + BLOCK_M - 1) // GROUP, seq_len - 1)
    q_rows = (seq_start + token).to(tl.int64) * stride_qt + head * stride_qh
    prefix_len = tl.load(prefix_lens_ptr + seq)
    q_pos = prefix_len + token
    offs_n = tl.arange(0, BLOCK_N)
    first_visible = 0
    if HAS_WINDOW:
        if HAS_CHUNKS:
            first_visible = (prefix_len + first_token) // window * window
        else:
            first_visible = tl.maximum(prefix_len + first_token - window + 1, 0)

    even_acc = tl.zeros([BLOCK_M, BLOCK_GV * 8], dtype=tl.float32)
    odd_acc = tl.zeros([BLOCK_M, BLOCK_GV * 8], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    even_q, odd_q = load_pairs(q_ptr, q_rows, row_ok, BLOCK_G * 8, HEAD_DIM)
    k_base = k_cache_ptr + kv_head * (HEAD_DIM // 2)
    k_scale_base = k_scales_ptr + kv_head * (HEAD_DIM // 16)
    v_base = v_cache_ptr + kv_head * (V_HEAD_DIM // 2)
    v_scale_base = v_scales_ptr + kv_head * (V_HEAD_DIM // 16)
    k_stride = stride_kcs * (8 if HEAD_DIM % 32 else 16)
    v_stride = stride_vcs * (8 if V_HEAD_DIM % 32 else 16)
    slot_ptr = req_to_token_ptr + tl.load(req_pool_indices_ptr + seq) * stride_rt
    prefix_scale = scale * k_scale
    start = first_visible // BLOCK_N * BLOCK_N
    if not HAS_WINDOW:
        start = prefix_len // BLOCK_N * BLOCK_N
        for n in range(0, start, BLOCK_N):
            pos = n + offs_n
            keep = pos < prefix_len
            even_acc, odd_acc, row_max, row_sum = attend_fp4(
                even_acc, odd_acc, row_max, row_sum, even_q, odd_q, k_base, k_scale_base, v_base, v_scale_base,
                tl.load(slot_ptr + pos), keep, keep[None, :], k_stride, stride_kss, v_stride, stride_vss,
                prefix_scale, cap, HEAD_DIM, V_HEAD_DIM, BLOCK_G, BLOCK_GV, BLOCK_N, False, HAS_CAP)  # fmt: skip
    for n in range(start, prefix_len, BLOCK_N):
        pos = n + offs_n
        # Slots behind a window may be another request's by now, whose NaN would spread: they are not read.
        keep = (pos >= first_visible) & (pos < prefix_len)
        visible = keep[None, :]
        if HAS_WINDOW:
            if HAS_CHUNKS:
                visible = visible & (pos[None, :] >= (q_pos // window * window)[:, None])
            else:
                visible = visible & (pos[None, :] > q_pos[:, None] - window)
        even_acc, odd_acc, row_max, row_sum = attend_fp4(
            even_acc, odd_acc, row_max, row_sum, even_q, odd_q, k_base, k_scale_base, v_base, v_scale_base,
            tl.load(slot_ptr + pos, mask=pos < prefix_len, other=0), keep, visible, k_stride, stride_kss, v_stride,
            stride_vss, prefix_scale, cap, HEAD_DIM, V_HEAD_DIM, BLOCK_G, BLOCK_GV, BLOCK_N, True,
            HAS_CAP)  # fmt: skip
    acc = tl.reshape(tl.join(even_acc, odd_acc), (BLOCK_M, BLOCK_DV)) * v_scale

    q = load_rows(q_ptr, q_rows, row_ok, 0, BLOCK_D, HEAD_DIM, True)
    q_pe = q
    if BLOCK_DPE > 0:
        q_pe = load_rows(q_ptr, q_rows, row_ok, BLOCK_D, BLOCK_DPE, HEAD_DIM, True)
    k_base = k_ptr + seq_start.to(tl.int64) * stride_kt + kv_head * stride_kh
    v_base = v_ptr + seq_start.to(tl.int64) * stride_vt + kv_head * stride_vh
    kv_end = prefix_len + seq_len
    if CAUSAL:
        end = last_token + 1
        start = (first_token + 1) // BLOCK_N * BLOCK_N
    else:
        end = seq_len
        start = seq_len // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        start = tl.maximum(first_visible - prefix_len, 0) // BLOCK_N * BLOCK_N
    else:
        for n in range(0, start, BLOCK_N):
            pos = n + offs_n
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q, q_pe, k_base, v_base, pos, stride_kt, stride_vt, prefix_len + pos, 0, kv_end,
                q_pos, scale, cap, window, q_ptr, token, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DPE, BLOCK_DV, False,
                False, False, False, HAS_CAP, False, False)  # fmt: skip
    for n in range(start, end, BLOCK_N):
        pos = n + offs_n
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, q_pe, k_base, v_base, pos, stride_kt, stride_vt, prefix_len + pos, first_visible,
            kv_end, q_pos, scale, cap, window, q_ptr, token, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DPE, BLOCK_DV, True,
            CAUSAL, HAS_WINDOW, HAS_CHUNKS, HAS_CAP, False, False)  # fmt: skip

    if HAS_WINDOW:
        # A row beyond the sequence may see nothing.
        row_sum = tl.where(row_sum > 0.0, row_sum, 1.0)
    if HAS_SINKS:
        # Last, not as the first maximum: the largest weight then stays exactly one when it is rounded to DTYPE.
        sink = tl.load(sinks_ptr + head, mask=row_ok, other=0.0) * 1.4426950408889634
        row_sum += tl.exp2(sink - row_max)
    out = acc * (1.0 / row_sum)[:, None]
    o_rows = (seq_start + token).to(tl.int64) * stride_ot + head * stride_oh
    cols = tl.arange(0, BLOCK_DV)
    o_mask = row_ok[:, None] & (cols < V_HEAD_DIM)[None, :]
    tl.store(o_ptr + o_rows[:, None] + cols[None, :], out.to(o_ptr.dtype.element_ty), mask=o_mask)


def extend_fp4_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    start_loc: torch.Tensor,
    *,
    k_group_scales: torch.Tensor,
    v_group_scales: torch.Tensor,
    scale: float,
    tile: Mapping[str, int],
    causal: bool = True,
    sliding_window: int = 0,
    chunked: bool = False,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    has_prefix: bool = True,
) -> None:
    """Does as `extend_attention_fwd`, over k_cache [S, Hkv, D/2] and v_cache [S, Hkv, Dv/2] uint8 with group scales [S,
    Hkv, D/16] and [S, Hkv, Dv/16] uint8, which hold e4m3. D and Dv are multiples of 16."""
    del has_prefix  # prefix_lens say so, too
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, v_head_dim = v.shape[1], v.shape[2]
    if num_tokens == 0:
        return
    group = num_heads // num_kv_heads
    num_seqs = start_loc.shape[0] - 1
    num_blocks = num_tokens * group // tile["BLOCK_M"] + num_seqs
    block_d, block_dpe = split_head_dim(head_dim)
    extend_fp4_kernel[(num_blocks * num_kv_heads,)](
        q, k, v, o, k_cache, k_group_scales, v_cache, v_group_scales, req_to_token, req_pool_indices, prefix_lens,
        start_loc, q if sinks is None else sinks, num_seqs, num_blocks, num_kv_heads, scale * LOG2E, k_scale * LIFT,
        v_scale * LIFT, logit_cap * LOG2E, sliding_window, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        v.stride(0), v.stride(1), o.stride(0), o.stride(1), slot_stride(k_cache),
        k_group_scales.stride(0), slot_stride(v_cache), v_group_scales.stride(0), req_to_token.stride(0), GROUP=group,
        HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim, BLOCK_D=block_d, BLOCK_DPE=block_dpe,
        BLOCK_DV=triton.next_power_of_2(v_head_dim), BLOCK_G=group_block(head_dim), BLOCK_GV=group_block(v_head_dim),
        BLOCK_M=tile["BLOCK_M"], BLOCK_N=tile["BLOCK_N"], CAUSAL=causal, HAS_WINDOW=sliding_window > 0,
        HAS_CHUNKS=chunked, HAS_CAP=logit_cap > 0, HAS_SINKS=sinks is not None, num_warps=tile["num_warps"],
        num_stages=tile["num_stages"],
    )  # fmt: skip
