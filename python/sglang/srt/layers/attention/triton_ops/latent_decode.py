"""Decode attention over latents (MLA): one key head for all query heads, whose first columns are the values.

`decode_attention` splits the work and merges the pieces. A program computes BLOCK_H heads over one piece; each tile of
latents is read once into shared memory and used twice: as keys and, transposed on the way to registers, as values.
These points decide the speed:

- Cache slots are loaded one tile ahead. A load whose address is loaded in the same iteration is not
  overlapped with the products: Triton gives each level of indirection a stage of its own.
- float8 latents are read as pairs of bytes, because the instruction that transposes moves 16 bits. A pair becomes two
  float16 numbers in registers, so that no wider copy of the tile is ever stored; even and odd columns are multiplied
  apart. float16 holds every float8 number exactly, and the softmax's weights more exactly than bfloat16. Queries in
  bfloat16 are multiplied by a power of two first, so that the largest of a program is in [1, 2).

Reference: `reference_decode` in test/srt/layers/attention/reference.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.triton_ops.common import LOG2E, first_seen, load_rows, visible
from sglang.srt.layers.attention.triton_ops.decode_workspace import DecodePlan
from sglang.srt.layers.triton_ops import pdl


@triton.jit
def _halves(pairs, E5M2: tl.constexpr):
    """Pairs of float8 numbers [R, C] as int16 -> the first of each and the second, float16 [R, C]."""
    first = (pairs & 0xFF).to(tl.uint8)
    second = ((pairs >> 8) & 0xFF).to(tl.uint8)
    if E5M2:
        return first.to(tl.float8e5, bitcast=True).to(tl.float16), second.to(tl.float8e5, bitcast=True).to(tl.float16)
    return first.to(tl.float8e4nv, bitcast=True).to(tl.float16), second.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def _split_columns(x, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """[R, 2 C] -> even and odd columns as float16."""
    even, odd = tl.split(tl.reshape(x, [ROWS, PAIRS, 2]))
    return even.to(tl.float16), odd.to(tl.float16)


@triton.jit
def _peak(x):
    return tl.max(tl.max(tl.abs(x), 1), 0).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens"],
            do_not_specialize_on_alignment=["req_pool_indices_ptr", "seq_lens_ptr", "prefix_lens_ptr"])  # fmt: skip
def latent_decode_kernel(
    q_ptr, o_ptr, cache_ptr, req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr, prefix_lens_ptr, sinks_ptr, work_ptr,
    part_o_ptr, part_lse_ptr, num_head_tiles, num_heads, num_tokens, scale, v_scale, window, stride_qb, stride_qh,
    stride_ob, stride_oh, stride_cs, stride_rt, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, FP8: tl.constexpr, E5M2: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_GUESSES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q [B, H, rank + rope], latents [S, rank + rope] (FP8: pairs, as int16) -> o [B, H, rank] for sequences of one
    piece, otherwise part_o [pieces, H, rank] and part_lse [pieces, H] of `decode_kernel`, with its windows, sinks and
    guesses. Grid: (pieces * head tiles,)."""
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
    if HAS_GUESSES:
        prefix = tl.load(prefix_lens_ptr + tl.maximum(seq, 0))
    length = 0
    if HAS_WINDOW:
        length = tl.load(seq_lens_ptr + tl.maximum(seq, 0))
        begin = tl.maximum(begin, first_seen(prefix + 1 if HAS_GUESSES else length, window, False))
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if seq < 0:
        return

    HALF: tl.constexpr = RANK // 2
    head = head_tile * BLOCK_H + tl.arange(0, BLOCK_H)
    out_head = head
    first = seq.to(tl.int64)
    row_end = prefix
    if HAS_GUESSES:
        token = head // num_heads
        head = head % num_heads
        first = first * num_tokens + token
        row_end = prefix + 1 + token
        if HAS_WINDOW:
            row_end = tl.minimum(row_end, length)  # a row of padding sees keys, too: its output is a number
        num_heads *= num_tokens
    head_ok = out_head < num_heads
    q_rows = first * stride_qb + head * stride_qh
    if FP8:
        q = load_rows(q_ptr, q_rows, head_ok, 0, RANK, RANK, True)
        q_pe = load_rows(q_ptr, q_rows, head_ok, RANK, ROPE, RANK + ROPE, True)
        if q.dtype != tl.float16:
            # The product with a power of two is exact.
            peak = tl.maximum(_peak(q), _peak(q_pe))
            exponent = tl.floor(tl.log2(tl.where(peak > 0.0, peak, 1.0)))
            scale *= tl.exp2(exponent)
            shrink = tl.exp2(-exponent).to(q.dtype)
            q *= shrink
            q_pe *= shrink
        q0, q1 = _split_columns(q, BLOCK_H, HALF)
        q_pe0, q_pe1 = _split_columns(q_pe, BLOCK_H, ROPE // 2)
    else:
        q0 = load_rows(q_ptr, q_rows, head_ok, 0, HALF, RANK, True)
        q1 = load_rows(q_ptr, q_rows, head_ok, HALF, HALF, RANK, True)
        q_pe0 = load_rows(q_ptr, q_rows, head_ok, RANK, ROPE, RANK + ROPE, True)

    slot_ptr = req_to_token_ptr + row * stride_rt
    acc0 = tl.zeros([BLOCK_H, HALF], dtype=tl.float32)
    acc1 = tl.zeros([BLOCK_H, HALF], dtype=tl.float32)
    row_max = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_H], dtype=tl.float32)
    offs_n = tl.arange(0, BLOCK_N)
    slots = tl.load(slot_ptr + begin + offs_n, mask=begin + offs_n < end, other=0)
    for n in range(begin, end, BLOCK_N):
        pos = n + offs_n
        keep = pos < end
        next_slots = tl.load(slot_ptr + pos + BLOCK_N, mask=pos + BLOCK_N < end, other=0)
        rows = slots.to(tl.int64) * stride_cs
        if FP8:
            pairs = load_rows(cache_ptr, rows, keep, 0, HALF, HALF, True)
            pairs_pe = load_rows(cache_ptr, rows, keep, HALF, ROPE // 2, (RANK + ROPE) // 2, True)
            k0, k1 = _halves(pairs, E5M2)
            k_pe0, k_pe1 = _halves(pairs_pe, E5M2)
            scores = tl.dot(q0, tl.trans(k0))
            scores = tl.dot(q1, tl.trans(k1), scores)
            scores = tl.dot(q_pe0, tl.trans(k_pe0), scores)
            scores = tl.dot(q_pe1, tl.trans(k_pe1), scores)
        else:
            k0 = load_rows(cache_ptr, rows, keep, 0, HALF, RANK, True)
            k1 = load_rows(cache_ptr, rows, keep, HALF, HALF, RANK, True)
            k_pe0 = load_rows(cache_ptr, rows, keep, RANK, ROPE, RANK + ROPE, True)
            scores = tl.dot(q0, tl.trans(k0))
            scores = tl.dot(q1, tl.trans(k1), scores)
            scores = tl.dot(q_pe0, tl.trans(k_pe0), scores)
        seen = keep[None, :]
        if HAS_GUESSES:
            seen = visible(seen, pos, row_end, window, HAS_WINDOW, False)
        scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        # Every tile of a piece has a key to keep, so that the maximum is a number, but for an earlier guess.
        base = new_max
        if HAS_GUESSES:
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores * scale - base[:, None])
        decay = tl.exp2(row_max - base)
        row_sum = row_sum * decay + tl.sum(p, 1)
        weights = p.to(k0.dtype)
        acc0 = tl.dot(weights, k0, acc0 * decay[:, None])
        acc1 = tl.dot(weights, k1, acc1 * decay[:, None])
        row_max = new_max
        slots = next_slots

    if HAS_SINKS:
        if num_pieces == 1:  # otherwise the merging of pieces adds them
            row_sum += tl.exp2(tl.load(sinks_ptr + head, mask=head_ok, other=0.0) * 1.4426950408889634 - row_max)
    final = (v_scale / row_sum)[:, None]
    cols = tl.arange(0, HALF)
    if FP8:
        out = tl.interleave(acc0 * final, acc1 * final)
        cols = tl.arange(0, RANK)
    else:
        out = acc0 * final
    mask = head_ok[:, None] & (cols < RANK)[None, :]
    if num_pieces == 1:
        o_rows = first * stride_ob + head * stride_oh
        tl.store(o_ptr + o_rows[:, None] + cols[None, :], out.to(o_ptr.dtype.element_ty), mask=mask)
        if not FP8:
            second = (acc1 * final).to(o_ptr.dtype.element_ty)
            tl.store(o_ptr + o_rows[:, None] + (HALF + cols)[None, :], second, mask=mask)
    else:
        part = piece.to(tl.int64) * num_heads + out_head
        tl.store(part_o_ptr + part[:, None] * RANK + cols[None, :], out, mask=mask)
        if not FP8:
            tl.store(part_o_ptr + part[:, None] * RANK + (HALF + cols)[None, :], acc1 * final, mask=mask)
        tl.store(part_lse_ptr + part, row_max + tl.log2(row_sum), mask=head_ok)


def launch_latent_decode(
    q: torch.Tensor,
    o: torch.Tensor,
    latents: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: DecodePlan,
    tiles: int,
    prefix_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    sliding_window: int,
    scale: float,
    k_scale: float,
    v_scale: float,
    tile: Mapping[str, int],
) -> None:
    """Computes the pieces of `decode_attention_fwd` for q [B, H, rank + rope], o [B, H, rank] and latents [S, 1, rank +
    rope] in q's dtype or float8. rank and rope are powers of two; `tiles`: blocks of heads, those of all draft tokens
    included. Raises TypeError for other latents."""
    num_rows, num_heads, head_dim = q.shape
    rank = o.shape[2]
    fp8 = latents.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    if not fp8 and latents.dtype != q.dtype:
        raise TypeError(f"latents are {latents.dtype}: neither float8 nor the queries' {q.dtype}; view them first")
    entries = latents.view(torch.int16) if fp8 else latents
    latent_decode_kernel[(plan.num_pieces * tiles,)](
        q, o, entries, req_to_token, req_pool_indices, seq_lens, seq_lens if prefix_lens is None else prefix_lens,
        seq_lens if sinks is None else sinks, plan.work, plan.part_o, plan.part_lse, tiles, num_heads,
        num_rows // seq_lens.shape[0],
        scale * k_scale * LOG2E, float(v_scale), sliding_window, q.stride(0), q.stride(1), o.stride(0), o.stride(1),
        entries.stride(0), req_to_token.stride(0), RANK=rank, ROPE=head_dim - rank, BLOCK_H=tile["BLOCK_H"],
        BLOCK_N=tile["BLOCK_N"], FP8=fp8, E5M2=latents.dtype == torch.float8_e5m2, HAS_WINDOW=sliding_window > 0,
        HAS_SINKS=sinks is not None, HAS_GUESSES=prefix_lens is not None, num_warps=tile["num_warps"],
        num_stages=tile["num_stages"], **pdl.options(),
    )  # fmt: skip
