"""Prefill attention: ragged new tokens over a paged prefix and over themselves.

The query heads that share a KV head are packed into the rows of one tile: row r of a sequence is token r // GROUP, head
r % GROUP of the group. So no row is wasted for any group size, K and V are read once for the whole group, and a request
with one token fills GROUP rows instead of one.

The grid is flat and depends on shapes only. Sequence i owns the block numbers from start_loc[i] * GROUP // BLOCK_M + i
on, which leaves room for its last partial block; a program finds its sequence by bisection. Blocks of tokens before
start_loc[0] do nothing.

A short prompt behind a long prefix has too few blocks to fill the GPU. Several programs then share a block's prefix:
each attends to a part of it, the last one to the new tokens as well, and `merge_pieces` merges their outputs.

Reference: `reference_extend` in test/srt/layers/attention/reference.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.triton_ops.common import LOG2E, accumulate, cap_scores, load_rows, split_head_dim
from sglang.srt.layers.attention.triton_ops.decode_attention import merge_pieces
from sglang.srt.layers.attention.triton_ops.prefix_parts import PrefixParts


@triton.jit
def _attend(
    acc, row_max, row_sum, q, q_pe, k_base, v_base, slots, k_stride, v_stride, kv_pos, kv_begin, kv_end, q_pos, scale,
    cap, window, mask_base, mask_rows, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DPE: tl.constexpr, BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CHUNKS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_MASK: tl.constexpr,
    V_IN_K: tl.constexpr,
):  # fmt: skip
    """One tile of keys: rows `slots` [N] of the cache or of the new tokens, at absolute positions kv_pos [N]. Those
    from kv_end on, and with a window those before kv_begin, which no row sees, are not read."""
    in_range = kv_pos < kv_end
    if HAS_WINDOW:
        # A weight of 0 would not do: slots behind a window may be another request's by now, whose NaN would spread.
        in_range = in_range & (kv_pos >= kv_begin)
    k_rows = slots.to(tl.int64) * k_stride
    k = load_rows(k_base, k_rows, in_range, 0, BLOCK_D, HEAD_DIM, MASKED).to(q.dtype)
    scores = tl.dot(q, tl.trans(k))
    if BLOCK_DPE > 0:
        k_pe = load_rows(k_base, k_rows, in_range, BLOCK_D, BLOCK_DPE, HEAD_DIM, MASKED)
        scores = tl.dot(q_pe, tl.trans(k_pe.to(q.dtype)), scores)
    if HAS_CAP:
        scores = cap_scores(scores, scale, cap)
        scale = 1.0
    keep = in_range[None, :]
    if MASKED:
        if CAUSAL:
            keep = keep & (kv_pos[None, :] <= q_pos[:, None])
        if HAS_WINDOW:
            if HAS_CHUNKS:
                keep = keep & (kv_pos[None, :] >= (q_pos // window * window)[:, None])
            else:
                keep = keep & (kv_pos[None, :] > q_pos[:, None] - window)
        if HAS_MASK:
            keep = keep & (tl.load(mask_base + mask_rows[:, None] + kv_pos[None, :], mask=keep, other=0) != 0)
    if V_IN_K:
        v = k
    else:
        v = load_rows(v_base, slots.to(tl.int64) * v_stride, in_range, 0, BLOCK_DV, V_HEAD_DIM, MASKED)
    return accumulate(acc, row_max, row_sum, scores, scale, keep, v, q.dtype, MASKED)


# Index arrays arrive as slices of one packed buffer: their alignment must not decide about a recompilation.
@triton.jit(
    do_not_specialize=["num_seqs", "num_blocks", "num_parts"],
    do_not_specialize_on_alignment=["req_pool_indices_ptr", "prefix_lens_ptr", "start_loc_ptr", "mask_offsets_ptr"],
)
def extend_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, k_cache_ptr, v_cache_ptr, req_to_token_ptr, req_pool_indices_ptr, prefix_lens_ptr,
    start_loc_ptr, sinks_ptr, mask_ptr, mask_offsets_ptr, part_o_ptr, part_lse_ptr, num_seqs, num_blocks, num_kv_heads,
    num_parts, scale, k_scale, v_scale, cap, window, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_ot, stride_oh, stride_kcs, stride_kch, stride_vcs, stride_vch, stride_rt, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DPE: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_PREFIX: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CHUNKS: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_MASK: tl.constexpr, V_IN_K: tl.constexpr, HAS_PARTS: tl.constexpr,
):  # fmt: skip
    """q [T, Hkv * GROUP, D], k/v [T, Hkv, D/Dv], caches [S, Hkv, D/Dv] -> o [T, Hkv * GROUP, Dv]; `scale` and `cap`
    carry log2(e). Grid: (num_blocks * Hkv,). HAS_PARTS: num_parts programs share a block, and the results are part_o
    [T, num_parts, Hkv * GROUP, Dv] and part_lse [T, num_parts, Hkv * GROUP], base 2."""
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

    q_rows = (seq_start + token).to(tl.int64) * stride_qt + head * stride_qh
    q = load_rows(q_ptr, q_rows, row_ok, 0, BLOCK_D, HEAD_DIM, True)
    q_pe = q
    if BLOCK_DPE > 0:
        q_pe = load_rows(q_ptr, q_rows, row_ok, BLOCK_D, BLOCK_DPE, HEAD_DIM, True)

    prefix_len = 0
    if HAS_PREFIX:
        prefix_len = tl.load(prefix_lens_ptr + seq)
    q_pos = prefix_len + token
    mask_base = mask_ptr
    mask_rows = token
    if HAS_MASK:
        mask_base = mask_ptr + tl.load(mask_offsets_ptr + seq)
        mask_rows = tl.minimum(token, seq_len - 1) * (prefix_len + seq_len)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)

    offs_n = tl.arange(0, BLOCK_N)
    ALWAYS_MASK: tl.constexpr = HAS_WINDOW or HAS_MASK

    first_visible = 0
    if HAS_WINDOW:
        if HAS_CHUNKS:
            first_visible = (prefix_len + first_token) // window * window
        else:
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
        if not ALWAYS_MASK:
            start = tl.maximum(end // BLOCK_N * BLOCK_N, begin)
            for n in range(begin, start, BLOCK_N):
                pos = n + offs_n
                acc, row_max, row_sum = _attend(
                    acc, row_max, row_sum, q, q_pe, k_base, v_base, tl.load(slot_ptr + pos), stride_kcs, stride_vcs,
                    pos, 0, prefix_len, q_pos, prefix_scale, cap, window, mask_base, mask_rows, HEAD_DIM, V_HEAD_DIM,
                    BLOCK_D, BLOCK_DPE, BLOCK_DV, False, False, False, False, HAS_CAP, False, V_IN_K,
                )  # fmt: skip
        for n in range(start, end, BLOCK_N):
            pos = n + offs_n
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q, q_pe, k_base, v_base, tl.load(slot_ptr + pos, mask=pos < prefix_len,
                other=0), stride_kcs, stride_vcs, pos, first_visible, prefix_len, q_pos, prefix_scale, cap, window,
                mask_base, mask_rows, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DPE, BLOCK_DV, True, False, HAS_WINDOW,
                HAS_CHUNKS, HAS_CAP, HAS_MASK, V_IN_K,
            )  # fmt: skip
        acc = acc * v_scale

    k_base = k_ptr + seq_start.to(tl.int64) * stride_kt + kv_head * stride_kh
    v_base = v_ptr + seq_start.to(tl.int64) * stride_vt + kv_head * stride_vh
    kv_end = prefix_len + seq_len
    if CAUSAL:
        end = last_token + 1
        start = (first_token + 1) // BLOCK_N * BLOCK_N
    else:
        end = seq_len
        start = seq_len // BLOCK_N * BLOCK_N
    if HAS_PARTS:
        if part < num_parts - 1:
            start = 0
            end = 0
    if ALWAYS_MASK:
        start = tl.maximum(first_visible - prefix_len, 0) // BLOCK_N * BLOCK_N
    else:
        for n in range(0, start, BLOCK_N):
            pos = n + offs_n
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q, q_pe, k_base, v_base, pos, stride_kt, stride_vt, prefix_len + pos, 0, kv_end,
                q_pos, scale, cap, window, mask_base, mask_rows, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DPE, BLOCK_DV,
                False, False, False, False, HAS_CAP, False, V_IN_K,
            )  # fmt: skip
    for n in range(start, end, BLOCK_N):
        pos = n + offs_n
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, q_pe, k_base, v_base, pos, stride_kt, stride_vt, prefix_len + pos, first_visible,
            kv_end, q_pos, scale, cap, window, mask_base, mask_rows, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DPE, BLOCK_DV,
            True, CAUSAL, HAS_WINDOW, HAS_CHUNKS, HAS_CAP, HAS_MASK, V_IN_K,
        )  # fmt: skip

    if ALWAYS_MASK:
        # A row whose mask admits nothing has no weight at all; its output is defined as zero.
        row_sum = tl.where(row_sum > 0.0, row_sum, 1.0)
    if HAS_SINKS:
        # Last, not as the first maximum: the largest weight then stays exactly one when it is rounded to DTYPE.
        sink = tl.load(sinks_ptr + head, mask=row_ok, other=0.0) * 1.4426950408889634
        row_sum += tl.exp2(sink - row_max)
    cols = tl.arange(0, BLOCK_DV)
    o_mask = row_ok[:, None] & (cols < V_HEAD_DIM)[None, :]
    if HAS_PARTS:
        # Of a part without keys the sum is 0 and its logarithm -inf: the merge leaves it out.
        num_heads = num_kv_heads * GROUP
        part_rows = ((seq_start + token).to(tl.int64) * num_parts + part) * num_heads + head
        out = acc * (1.0 / tl.where(row_sum > 0.0, row_sum, 1.0))[:, None]
        tl.store(part_lse_ptr + part_rows, row_max + tl.log2(row_sum), mask=row_ok)
        tl.store(part_o_ptr + part_rows[:, None] * V_HEAD_DIM + cols[None, :], out, mask=o_mask)
    else:
        out = acc * (1.0 / row_sum)[:, None]
        o_rows = (seq_start + token).to(tl.int64) * stride_ot + head * stride_oh
        tl.store(o_ptr + o_rows[:, None] + cols[None, :], out.to(o_ptr.dtype.element_ty), mask=o_mask)


def extend_attention_fwd(
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
    causal: bool = True,
    sliding_window: int = 0,
    chunked: bool = False,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    custom_mask: torch.Tensor | None = None,
    mask_offsets: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    has_prefix: bool = True,
    parts: PrefixParts | None = None,
    share: tuple[int, int] = (0, 1),
) -> None:
    """Fills o [T, Hq, Dv] with the attention of T new tokens of B sequences over their cached prefixes and themselves.

    q [T, Hq, D] bf16/fp16; k [T, Hkv, D], v [T, Hkv, Dv] of the new tokens, in q's dtype; k_cache [S, Hkv, D], v_cache
    [S, Hkv, Dv] in q's dtype or float8 (a uint8 pool must be viewed by the caller), with real value = stored value *
    k_scale / v_scale. The last dimension of each must be contiguous; other strides are free. If v and v_cache start
    where k and k_cache do, they are taken to be their first columns (MLA). req_to_token [reqs, ctx] int32 and
    req_pool_indices [B] int64 give the cache slot of every prefix position, for any page size; prefix_lens [B] int32;
    start_loc [B + 1] int32, ascending; o keeps its rows before start_loc[0].

    custom_mask: uint8, for each sequence a [new, prefix + new] matrix of less than 2^31 elements (1: visible, on top of
    causality), flattened one after another; sequence i starts at mask_offsets[i] (int64). sinks [Hq] fp32.
    sliding_window counts the query itself; 0 means none; with `chunked` a query sees the tokens up to itself from the
    last multiple of it on. has_prefix False: the caller knows that all prefixes are empty. parts: buffers if several
    programs share a prefix, not allowed with a window or mask. share (i, n), without parts: launches only the i-th of n
    ranges of blocks; together they give bitwise the result of one launch. Never synchronizes; CUDA-graph safe. Raises
    TypeError for uint8 caches.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, v_head_dim = v.shape[1], v.shape[2]
    if num_tokens == 0:
        return
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype == torch.uint8:
            raise TypeError(f"{name} is uint8 storage: pass .view(torch.float8_e4m3fn) or .view(torch.float8_e5m2)")
    group = num_heads // num_kv_heads
    num_seqs = start_loc.shape[0] - 1
    num_blocks = num_tokens * group // tile["BLOCK_M"] + num_seqs
    first_block, num_blocks = (num_blocks * (share[0] + i) // share[1] for i in (0, 1))
    if first_block == num_blocks:
        return
    block_d, block_dpe = split_head_dim(head_dim)
    v_in_k = (
        v_head_dim == block_d < head_dim
        and v.data_ptr() == k.data_ptr()
        and (v_cache.data_ptr() == k_cache.data_ptr() or not has_prefix)
    )
    num_parts = 1 if parts is None else parts.count
    assert parts is None or (sliding_window == 0 and custom_mask is None and has_prefix and share == (0, 1))
    extend_kernel[((num_blocks - first_block) * num_kv_heads * num_parts,)](
        q, k, v, o, k_cache, v_cache, req_to_token, req_pool_indices, prefix_lens, start_loc,
        q if sinks is None else sinks,
        q if custom_mask is None else custom_mask,
        start_loc if mask_offsets is None else mask_offsets,
        q if parts is None else parts.part_o,
        q if parts is None else parts.part_lse,
        num_seqs, num_blocks, num_kv_heads, num_parts, scale * LOG2E, float(k_scale), float(v_scale), logit_cap * LOG2E,
        sliding_window, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), o.stride(0),
        o.stride(1), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1), req_to_token.stride(0),
        GROUP=group, HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim, BLOCK_D=block_d, BLOCK_DPE=block_dpe,
        BLOCK_DV=triton.next_power_of_2(v_head_dim), BLOCK_M=tile["BLOCK_M"], BLOCK_N=tile["BLOCK_N"], CAUSAL=causal,
        HAS_PREFIX=has_prefix, HAS_WINDOW=sliding_window > 0, HAS_CHUNKS=chunked, HAS_CAP=logit_cap > 0,
        HAS_SINKS=sinks is not None and parts is None, HAS_MASK=custom_mask is not None, V_IN_K=v_in_k,
        HAS_PARTS=parts is not None, num_warps=tile["num_warps"], num_stages=tile["num_stages"],
    )  # fmt: skip
    if parts is not None:
        merge_pieces(o, parts, sinks)
