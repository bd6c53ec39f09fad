"""Decode attention over a paged cache with score biases by distance (Inkling).

It works as `decode_attention`, whose module describes pieces and draft tokens, for keys and values of equal head dim, a
power of two. It is a separate kernel so that the code of others stays unchanged.

References: `reference_decode`, and for draft tokens `attend`, in test/srt/layers/attention/reference.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.triton_ops.biases import biased_scores
from sglang.srt.layers.attention.triton_ops.common import (
    LOG2E,
    accumulate,
    first_seen,
    load_rows,
    rows_of_tile,
    visible,
)
from sglang.srt.layers.attention.triton_ops.decode_attention import merge_pieces
from sglang.srt.layers.attention.triton_ops.decode_workspace import DecodePlan, head_tiles
from sglang.srt.layers.triton_ops import pdl


@triton.jit
def _attend(
    acc, row_max, row_sum, q, k_base, v_base, slots, k_stride, v_stride, pos, begin, end, row_end, window, scale,
    bias_base, bias_rows, extent, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_GUESSES: tl.constexpr,
):  # fmt: skip
    """One tile of keys at cache slots `slots` [N], admissible where begin <= pos < end; with HAS_GUESSES and MASKED
    only to the rows that see them, as `visible` says."""
    keep = (pos >= begin) & (pos < end)
    k = load_rows(k_base, slots.to(tl.int64) * k_stride, keep, 0, HEAD_DIM, HEAD_DIM, MASKED).to(q.dtype)
    scores = biased_scores(q, k, scale, bias_base, bias_rows, row_end - 1, pos, extent)
    v = load_rows(v_base, slots.to(tl.int64) * v_stride, keep, 0, HEAD_DIM, HEAD_DIM, MASKED)
    seen = keep[None, :]
    if HAS_GUESSES and MASKED:
        seen = visible(seen, pos, row_end, window, HAS_WINDOW, False)
    return accumulate(acc, row_max, row_sum, scores, scale, seen, v, q.dtype, MASKED)


@triton.jit(do_not_specialize=["num_tokens"],
            do_not_specialize_on_alignment=["req_pool_indices_ptr", "seq_lens_ptr", "prefix_lens_ptr"])  # fmt: skip
def decode_biased_kernel(
    q_ptr, o_ptr, k_cache_ptr, v_cache_ptr, req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr, prefix_lens_ptr,
    bias_ptr, work_ptr, part_o_ptr, part_lse_ptr, num_head_tiles, num_heads, num_tokens, scale, v_scale, window, extent,
    stride_qb, stride_qh, stride_ob, stride_oh, stride_kcs, stride_kch, stride_vcs, stride_vch, stride_rt,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_GUESSES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `decode_attention.decode_kernel`; bias [rows of q, Hq, extent]. Grid: (pieces * num_head_tiles,)."""
    pid = tl.program_id(0)
    head_tile = pid % num_head_tiles
    piece = pid // num_head_tiles
    # The plan and the batch were written before q: the kernel directly ahead, alone of all, may still run.
    seq = tl.load(work_ptr + piece * 4)
    begin = tl.load(work_ptr + piece * 4 + 1)
    end = tl.load(work_ptr + piece * 4 + 2)
    num_pieces = tl.load(work_ptr + piece * 4 + 3)
    row = tl.load(req_pool_indices_ptr + tl.maximum(seq, 0))
    length = tl.load(seq_lens_ptr + tl.maximum(seq, 0))
    prefix = 0
    if HAS_GUESSES:
        prefix = tl.load(prefix_lens_ptr + tl.maximum(seq, 0))
    if HAS_WINDOW:
        begin = tl.maximum(begin, first_seen(prefix + 1 if HAS_GUESSES else length, window, False))
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if seq < 0:
        return

    kv_head, head, q_row, part_row, part_rows, head_ok, row_end = rows_of_tile(
        seq, prefix, length, head_tile, num_heads, num_tokens, GROUP, BLOCK_H, HAS_GUESSES)  # fmt: skip
    if not HAS_GUESSES:
        row_end = tl.full([BLOCK_H], 0, dtype=tl.int32) + length
    q_rows = q_row * stride_qb + head * stride_qh
    q = load_rows(q_ptr, q_rows, head_ok, 0, HEAD_DIM, HEAD_DIM, True)
    # Rows of no head read what is the first one's.
    first_row = seq.to(tl.int64)
    if HAS_GUESSES:
        first_row *= num_tokens
    bias_base = bias_ptr + first_row * num_heads * extent
    bias_rows = tl.where(head_ok, ((q_row - first_row).to(tl.int32) * num_heads + head) * extent, 0)

    k_base = k_cache_ptr + kv_head * stride_kch
    v_base = v_cache_ptr + kv_head * stride_vch
    slot_ptr = req_to_token_ptr + row * stride_rt
    acc = tl.zeros([BLOCK_H, HEAD_DIM], dtype=tl.float32)
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
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q, k_base, v_base, tl.load(slot_ptr + pos), stride_kcs, stride_vcs, pos, begin,
                end, row_end, window, scale, bias_base, bias_rows, extent, HEAD_DIM, False, HAS_WINDOW,
                HAS_GUESSES)  # fmt: skip
    for n in range(start, end, BLOCK_N):
        pos = n + offs_n
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, k_base, v_base, tl.load(slot_ptr + pos, mask=pos < end, other=0), stride_kcs,
            stride_vcs, pos, begin, end, row_end, window, scale, bias_base, bias_rows, extent, HEAD_DIM, True,
            HAS_WINDOW, HAS_GUESSES)  # fmt: skip

    cols = tl.arange(0, HEAD_DIM)
    out = acc * (v_scale / row_sum)[:, None]
    if num_pieces == 1:
        o_rows = q_row * stride_ob + head * stride_oh
        tl.store(o_ptr + o_rows[:, None] + cols[None, :], out.to(o_ptr.dtype.element_ty), mask=head_ok[:, None])
    else:
        # A piece of which a row sees nothing has row_sum 0: its -inf makes the combination skip its output.
        part = piece.to(tl.int64) * part_rows + part_row
        tl.store(part_o_ptr + part[:, None] * HEAD_DIM + cols[None, :], out, mask=head_ok[:, None])
        tl.store(part_lse_ptr + part, row_max + tl.log2(row_sum), mask=head_ok)


def decode_biased_fwd(
    q: torch.Tensor,
    o: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    tile: Mapping[str, int],
    bias: torch.Tensor,
    sliding_window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    prefix_lens: torch.Tensor | None = None,
) -> None:
    """Does as `decode_attention_fwd`. bias [rows of q, Hq, E] contiguous is added to the scaled product of a query and
    the key at each distance from 0 to E - 1 before it."""
    plan.check_rows(req_pool_indices)
    num_seqs, (_, num_heads, head_dim) = seq_lens.shape[0], q.shape
    num_tokens = q.shape[0] // num_seqs
    num_kv_heads = v_cache.shape[1]
    tiles = head_tiles(num_heads * num_tokens, num_kv_heads, tile["BLOCK_H"])
    decode_biased_kernel[(plan.num_pieces * tiles,)](
        q, o, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
        seq_lens if prefix_lens is None else prefix_lens, bias, plan.work, plan.part_o, plan.part_lse,
        tiles, num_heads, num_tokens, scale * k_scale * LOG2E, float(v_scale), sliding_window, bias.shape[2],
        q.stride(0), q.stride(1), o.stride(0), o.stride(1), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0),
        v_cache.stride(1), req_to_token.stride(0), GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_H=tile["BLOCK_H"], BLOCK_N=tile["BLOCK_N"], HAS_WINDOW=sliding_window > 0,
        HAS_GUESSES=prefix_lens is not None, num_warps=tile["num_warps"], num_stages=tile["num_stages"],
        **pdl.options(),
    )  # fmt: skip
    if prefix_lens is not None:  # of a piece, the draft tokens are further heads
        o = o.view(num_seqs, num_tokens * num_heads, head_dim)
    merge_pieces(o, plan)
