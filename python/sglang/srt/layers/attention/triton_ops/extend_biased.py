"""Prefill attention with score biases by distance (Inkling).

It works as `extend_attention`, whose module describes how rows are packed and sequences found, for keys and values of
equal head dim, a power of two. It is a separate kernel so that the code of others stays unchanged.

Reference: `reference_extend` in test/srt/layers/attention/reference.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.triton_ops.biases import biased_scores
from sglang.srt.layers.attention.triton_ops.common import LOG2E, accumulate, load_rows
from sglang.srt.layers.attention.triton_ops.decode_attention import merge_pieces
from sglang.srt.layers.attention.triton_ops.prefix_parts import PrefixParts


@triton.jit
def _attend(
    acc, row_max, row_sum, q, k_base, v_base, slots, k_stride, v_stride, kv_pos, kv_begin, kv_end, q_pos, scale, window,
    bias_base, bias_rows, extent, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """One tile of keys: rows `slots` [N] of the cache or of the new tokens, at absolute positions kv_pos [N]. Those
    from kv_end on, and with a window those before kv_begin, which no row sees, are not read."""
    in_range = kv_pos < kv_end
    if HAS_WINDOW:
        # A weight of 0 would not do: slots behind a window may be another request's by now, whose NaN would spread.
        in_range = in_range & (kv_pos >= kv_begin)
    k = load_rows(k_base, slots.to(tl.int64) * k_stride, in_range, 0, HEAD_DIM, HEAD_DIM, MASKED).to(q.dtype)
    scores = biased_scores(q, k, scale, bias_base, bias_rows, q_pos, kv_pos, extent)
    keep = in_range[None, :]
    if MASKED:
        if CAUSAL:
            keep = keep & (kv_pos[None, :] <= q_pos[:, None])
        if HAS_WINDOW:
            keep = keep & (kv_pos[None, :] > q_pos[:, None] - window)
    v = load_rows(v_base, slots.to(tl.int64) * v_stride, in_range, 0, HEAD_DIM, HEAD_DIM, MASKED)
    return accumulate(acc, row_max, row_sum, scores, scale, keep, v, q.dtype, MASKED)


# Index arrays arrive as slices of one packed buffer: their alignment must not decide about a recompilation.
@triton.jit(
    do_not_specialize=["num_seqs", "num_blocks", "num_parts"],
    do_not_specialize_on_alignment=["req_pool_indices_ptr", "prefix_lens_ptr", "start_loc_ptr"],
)
def extend_biased_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, k_cache_ptr, v_cache_ptr, req_to_token_ptr, req_pool_indices_ptr, prefix_lens_ptr,
    start_loc_ptr, bias_ptr, part_o_ptr, part_lse_ptr, num_seqs, num_blocks, num_kv_heads, num_parts, scale, k_scale,
    v_scale, window, extent, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
    stride_kcs, stride_kch, stride_vcs, stride_vch, stride_rt, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_PREFIX: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_PARTS: tl.constexpr,
):  # fmt: skip
    """As `extend_attention.extend_kernel`; bias [T, Hkv * GROUP, extent]. Grid: (num_blocks * Hkv * num_parts,)."""
    pid = tl.program_id(0)
    part = 0
    if HAS_PARTS:
        part = pid % num_parts
        pid = pid // num_parts
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
    num_heads = num_kv_heads * GROUP

    q_rows = (seq_start + token).to(tl.int64) * stride_qt + head * stride_qh
    q = load_rows(q_ptr, q_rows, row_ok, 0, HEAD_DIM, HEAD_DIM, True)
    # Rows behind the last token read what is the last one's.
    last = tl.minimum(token, seq_len - 1)
    bias_base = bias_ptr + (seq_start + first_token).to(tl.int64) * num_heads * extent
    bias_rows = ((last - first_token) * num_heads + head) * extent

    prefix_len = 0
    if HAS_PREFIX:
        prefix_len = tl.load(prefix_lens_ptr + seq)
    q_pos = prefix_len + last

    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    offs_n = tl.arange(0, BLOCK_N)
    first_visible = 0
    if HAS_WINDOW:
        first_visible = tl.maximum(prefix_len + first_token - window + 1, 0)

    if HAS_PREFIX:
        k_base = k_cache_ptr + kv_head * stride_kch
        v_base = v_cache_ptr + kv_head * stride_vch
        slot_ptr = req_to_token_ptr + tl.load(req_pool_indices_ptr + seq) * stride_rt
        prefix_scale = scale * k_scale
        begin = first_visible // BLOCK_N * BLOCK_N
        end = prefix_len
        if HAS_PARTS:
            each = (prefix_len + BLOCK_N * num_parts - 1) // (BLOCK_N * num_parts) * BLOCK_N
            begin = part * each
            end = tl.minimum(begin + each, prefix_len)
        start = begin
        if not HAS_WINDOW:
            start = tl.maximum(end // BLOCK_N * BLOCK_N, begin)
            for n in range(begin, start, BLOCK_N):
                pos = n + offs_n
                acc, row_max, row_sum = _attend(
                    acc, row_max, row_sum, q, k_base, v_base, tl.load(slot_ptr + pos), stride_kcs, stride_vcs, pos, 0,
                    prefix_len, q_pos, prefix_scale, window, bias_base, bias_rows, extent, HEAD_DIM, False, False,
                    False,
                )  # fmt: skip
        for n in range(start, end, BLOCK_N):
            pos = n + offs_n
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q, k_base, v_base, tl.load(slot_ptr + pos, mask=pos < prefix_len, other=0),
                stride_kcs, stride_vcs, pos, first_visible, prefix_len, q_pos, prefix_scale, window, bias_base,
                bias_rows, extent, HEAD_DIM, True, False, HAS_WINDOW,
            )  # fmt: skip
        acc = acc * v_scale

    k_base = k_ptr + seq_start.to(tl.int64) * stride_kt + kv_head * stride_kh
    v_base = v_ptr + seq_start.to(tl.int64) * stride_vt + kv_head * stride_vh
    kv_end = prefix_len + seq_len
    end = last_token + 1
    start = (first_token + 1) // BLOCK_N * BLOCK_N
    if HAS_PARTS:
        if part < num_parts - 1:
            start = 0
            end = 0
    if HAS_WINDOW:
        start = tl.maximum(first_visible - prefix_len, 0) // BLOCK_N * BLOCK_N
    else:
        for n in range(0, start, BLOCK_N):
            pos = n + offs_n
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q, k_base, v_base, pos, stride_kt, stride_vt, prefix_len + pos, 0, kv_end, q_pos,
                scale, window, bias_base, bias_rows, extent, HEAD_DIM, False, False, False,
            )  # fmt: skip
    for n in range(start, end, BLOCK_N):
        pos = n + offs_n
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, k_base, v_base, pos, stride_kt, stride_vt, prefix_len + pos, first_visible,
            kv_end, q_pos, scale, window, bias_base, bias_rows, extent, HEAD_DIM, True, True, HAS_WINDOW,
        )  # fmt: skip

    cols = tl.arange(0, HEAD_DIM)
    if HAS_PARTS:
        # Of a part without keys the sum is 0 and its logarithm -inf: the merge leaves it out.
        part_rows = ((seq_start + token).to(tl.int64) * num_parts + part) * num_heads + head
        out = acc * (1.0 / tl.where(row_sum > 0.0, row_sum, 1.0))[:, None]
        tl.store(part_lse_ptr + part_rows, row_max + tl.log2(row_sum), mask=row_ok)
        tl.store(part_o_ptr + part_rows[:, None] * HEAD_DIM + cols[None, :], out, mask=row_ok[:, None])
    else:
        out = acc * (1.0 / row_sum)[:, None]
        o_rows = (seq_start + token).to(tl.int64) * stride_ot + head * stride_oh
        tl.store(o_ptr + o_rows[:, None] + cols[None, :], out.to(o_ptr.dtype.element_ty), mask=row_ok[:, None])


def extend_biased_fwd(
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
    scale: float,
    tile: Mapping[str, int],
    bias: torch.Tensor,
    sliding_window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    has_prefix: bool = True,
    parts: PrefixParts | None = None,
) -> None:
    """Does as `extend_attention_fwd`. bias [T, Hq, E] contiguous is added to the scaled product of a query and the key
    at each distance from 0 to E - 1 before it. Never synchronizes; CUDA-graph safe."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = v.shape[1]
    if num_tokens == 0:
        return
    group, num_seqs = num_heads // num_kv_heads, start_loc.shape[0] - 1
    num_blocks = num_tokens * group // tile["BLOCK_M"] + num_seqs
    num_parts = 1 if parts is None else parts.count
    assert parts is None or (sliding_window == 0 and has_prefix)
    extend_biased_kernel[(num_blocks * num_kv_heads * num_parts,)](
        q, k, v, o, k_cache, v_cache, req_to_token, req_pool_indices, prefix_lens, start_loc, bias,
        q if parts is None else parts.part_o,
        q if parts is None else parts.part_lse,
        num_seqs, num_blocks, num_kv_heads, num_parts, scale * LOG2E, float(k_scale), float(v_scale), sliding_window,
        bias.shape[2], q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), o.stride(0),
        o.stride(1), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1), req_to_token.stride(0),
        GROUP=group, HEAD_DIM=head_dim, BLOCK_M=tile["BLOCK_M"], BLOCK_N=tile["BLOCK_N"], HAS_PREFIX=has_prefix,
        HAS_WINDOW=sliding_window > 0, HAS_PARTS=parts is not None, num_warps=tile["num_warps"],
        num_stages=tile["num_stages"],
    )  # fmt: skip
    if parts is not None:
        merge_pieces(o, parts)
