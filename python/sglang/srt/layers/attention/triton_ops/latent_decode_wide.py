"""Decoding over latents with 64 heads a program, for `wgmma`: tokens in the place where products have their rows.

`latent_decode` multiplies [heads, tokens]. With `wgmma` its two groups of warps, which share the columns of the values,
both need all weights, and so compute all scores; and a tile of few tokens makes the queries be read from shared memory
as often as the latents. Here scores are [tokens, heads] and outputs [columns, heads], so that each group of warps has
rows of its own in both products, a tile of 64 tokens is read once for 64 heads, and weights go through shared memory.

For 16-bit latents. Pieces, guesses and results are those of `latent_decode`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"],
            do_not_specialize_on_alignment=["req_pool_indices_ptr", "prefix_lens_ptr"])  # fmt: skip
def latent_decode_wide_kernel(
    q_ptr, o_ptr, cache_ptr, req_to_token_ptr, req_pool_indices_ptr, prefix_lens_ptr, work_ptr, part_o_ptr,
    part_lse_ptr, num_head_tiles, num_heads, num_tokens, scale, v_scale, stride_qb, stride_qh, stride_ob, stride_oh,
    stride_cs, stride_rt, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_GUESSES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q [B, H, rank + rope], latents [S, rank + rope] -> o [B, H, rank] for sequences of one piece, otherwise part_o
    [pieces, H, rank] and part_lse [pieces, H] of `decode_kernel`, guesses too. Grid: (pieces * head tiles,)."""
    pid = tl.program_id(0)
    head_tile = pid % num_head_tiles
    piece = pid // num_head_tiles
    seq = tl.load(work_ptr + piece * 4)
    begin = tl.load(work_ptr + piece * 4 + 1)
    end = tl.load(work_ptr + piece * 4 + 2)
    num_pieces = tl.load(work_ptr + piece * 4 + 3)
    row = tl.load(req_pool_indices_ptr + tl.maximum(seq, 0))
    prefix = 0
    if HAS_GUESSES:
        prefix = tl.load(prefix_lens_ptr + tl.maximum(seq, 0))
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if seq < 0:
        return

    HALF: tl.constexpr = RANK // 2
    out_head = head_tile * BLOCK_H + tl.arange(0, BLOCK_H)
    head = out_head
    first = seq.to(tl.int64)
    row_end = prefix
    if HAS_GUESSES:
        token = head // num_heads
        head = head % num_heads
        first = first * num_tokens + token
        row_end = prefix + 1 + token
        num_heads *= num_tokens
    head_ok = out_head < num_heads
    cols = tl.arange(0, HALF)
    pe = tl.arange(0, ROPE)
    q_rows = q_ptr + (first * stride_qb + head * stride_qh)[None, :]
    q0 = tl.load(q_rows + cols[:, None], mask=head_ok[None, :], other=0.0)
    q1 = tl.load(q_rows + (HALF + cols)[:, None], mask=head_ok[None, :], other=0.0)
    q_pe = tl.load(q_rows + (RANK + pe)[:, None], mask=head_ok[None, :], other=0.0)

    slot_ptr = req_to_token_ptr + row * stride_rt
    acc0 = tl.zeros([HALF, BLOCK_H], dtype=tl.float32)
    acc1 = tl.zeros([HALF, BLOCK_H], dtype=tl.float32)
    row_max = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_H], dtype=tl.float32)
    offs_n = tl.arange(0, BLOCK_N)
    slots = tl.load(slot_ptr + begin + offs_n, mask=begin + offs_n < end, other=0)
    for n in range(begin, end, BLOCK_N):
        pos = n + offs_n
        keep = pos < end
        next_slots = tl.load(slot_ptr + pos + BLOCK_N, mask=pos + BLOCK_N < end, other=0)
        rows = cache_ptr + (slots.to(tl.int64) * stride_cs)[:, None]
        k0 = tl.load(rows + cols[None, :], mask=keep[:, None], other=0.0)
        k1 = tl.load(rows + (HALF + cols)[None, :], mask=keep[:, None], other=0.0)
        k_pe = tl.load(rows + (RANK + pe)[None, :], mask=keep[:, None], other=0.0)
        scores = tl.dot(k0, q0)
        scores = tl.dot(k1, q1, scores)
        scores = tl.dot(k_pe, q_pe, scores)
        seen = keep[:, None]
        if HAS_GUESSES:
            seen = seen & (pos[:, None] < row_end[None, :])
        scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 0) * scale)
        # Every tile of a piece has a key to keep, so that the maximum is a number, but for an earlier guess.
        base = new_max
        if HAS_GUESSES:
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores * scale - base[None, :])
        decay = tl.exp2(row_max - base)
        row_sum = row_sum * decay + tl.sum(p, 0)
        weights = p.to(k0.dtype)
        acc0 = tl.dot(tl.trans(k0), weights, acc0 * decay[None, :])
        acc1 = tl.dot(tl.trans(k1), weights, acc1 * decay[None, :])
        row_max = new_max
        slots = next_slots

    final = (v_scale / row_sum)[None, :]
    mask = head_ok[None, :] & (cols < HALF)[:, None]
    if num_pieces == 1:
        o_rows = o_ptr + (first * stride_ob + head * stride_oh)[None, :] + cols[:, None]
        tl.store(o_rows, (acc0 * final).to(o_ptr.dtype.element_ty), mask=mask)
        tl.store(o_rows + HALF, (acc1 * final).to(o_ptr.dtype.element_ty), mask=mask)
    else:
        part = piece.to(tl.int64) * num_heads + out_head
        part_rows = part_o_ptr + (part * RANK)[None, :] + cols[:, None]
        tl.store(part_rows, acc0 * final, mask=mask)
        tl.store(part_rows + HALF, acc1 * final, mask=mask)
        tl.store(part_lse_ptr + part, row_max + tl.log2(row_sum), mask=head_ok)
