"""Prefill attention over keys and values that are expanded from latents (MLA), chunk by chunk.

Absorbed attention reads latents directly and costs 2 * rank + rotary multiplications per query, key and head; expanded
keys and values cost nope + rotary + v, and one expansion per key. So long prompts expand: first their own tokens, which
they see causally, then the latents of their cached prefix, one chunk at a time. Each launch continues from the output
and log-sum-exp of the one before (`part_o`, `part_lse`), so that the chunks form one softmax, and memory is bounded by
a chunk. Where layers have a window, what is cached in it is one chunk, and tiles of keys that no query of a program
sees are skipped.

Reference: `reference.expanded_latent_attention`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.triton_ops.common import LOG2E, load_rows, split_head_dim
from sglang.srt.layers.attention.triton_ops.extend_attention import _attend
from sglang.srt.layers.triton_ops.latent_records import load_record, record_constants

if TYPE_CHECKING:
    from sglang.srt.layers.attention.latent_chunks import LatentChunk
    from sglang.srt.plan.latent_record import LatentRecord

GATHER = {"HEADS": 16, "num_warps": 4}


@triton.jit
def gather_latents_kernel(
    cache_ptr, slots_ptr, latent_ptr, k_ptr, num_heads, scale, slot_stride, key_stride, RANK: tl.constexpr,
    ROT: tl.constexpr, NOPE: tl.constexpr, RANK_BLOCK: tl.constexpr, ROT_BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """cache [S, RANK + ROT] at slots [C] -> latent [C, RANK] * scale, and the last ROT dims of k [C, H, NOPE + ROT].
    Grid: (C,)."""
    row = tl.program_id(0).to(tl.int64)
    entry = cache_ptr + tl.load(slots_ptr + row).to(tl.int64) * slot_stride
    dtype = latent_ptr.dtype.element_ty
    cols = tl.arange(0, RANK_BLOCK)
    values = tl.load(entry + cols, mask=cols < RANK, other=0.0).to(tl.float32) * scale
    tl.store(latent_ptr + row * RANK + cols, values.to(dtype), mask=cols < RANK)
    rot = tl.arange(0, ROT_BLOCK)
    key = (tl.load(entry + RANK + rot, mask=rot < ROT, other=0.0).to(tl.float32) * scale).to(dtype)
    for first in range(0, num_heads, HEADS):
        head = first + tl.arange(0, HEADS)
        place = k_ptr + row * key_stride + head[:, None] * (NOPE + ROT) + NOPE + rot[None, :]
        mask = (head < num_heads)[:, None] & (rot < ROT)[None, :]
        tl.store(place, tl.broadcast_to(key[None, :], (HEADS, ROT_BLOCK)), mask=mask)


@triton.jit
def gather_records_kernel(
    cache_ptr, rope_ptr, slots_ptr, latent_ptr, k_ptr, num_heads, scale, key_stride, RANK: tl.constexpr,
    ROT: tl.constexpr, NOPE: tl.constexpr, ROPE_AT: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, SCALES_AT: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """As `gather_latents_kernel` of records [S, SIZE] (uint8, and as bfloat16) in four bits. Grid: (C,)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row + tl.arange(0, 1)).to(tl.int64)
    dtype = latent_ptr.dtype.element_ty
    even, odd = load_record(cache_ptr, cache_ptr, slot, slot >= 0, BITS, GROUPS, GROUP_BLOCK, SCALES_AT, SIZE, 1)
    cols = tl.arange(0, GROUP_BLOCK * 16)[None, :]
    values = tl.interleave(even, odd).to(tl.float32) * scale
    tl.store(latent_ptr + row * RANK + cols, values.to(dtype), mask=cols < RANK)
    rot = tl.arange(0, ROT)
    key = tl.load(rope_ptr + slot * (SIZE // 2) + ROPE_AT // 2 + rot).to(dtype)
    for first in range(0, num_heads, HEADS):
        head = first + tl.arange(0, HEADS)
        place = k_ptr + row * key_stride + head[:, None] * (NOPE + ROT) + NOPE + rot[None, :]
        tl.store(place, tl.broadcast_to(key[None, :], (HEADS, ROT)), mask=(head < num_heads)[:, None])


# Index arrays arrive as slices of one packed buffer: their alignment must not decide about a recompilation.
@triton.jit(
    do_not_specialize=["num_seqs", "num_blocks"],
    do_not_specialize_on_alignment=["start_loc_ptr", "key_start_ptr"],
)
def latent_prompt_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, part_o_ptr, part_lse_ptr, sinks_ptr, start_loc_ptr, key_start_ptr, num_seqs,
    num_blocks, num_heads, scale, window, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot,
    stride_oh,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DPE: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, CARRY_IN: tl.constexpr, CARRY_OUT: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """q [T, H, D] over k [C, H, D], v [C, H, Dv]: queries start_loc[i] on see keys key_start[i] on, all of them, or if
    CAUSAL those up to their own; with HAS_WINDOW only in their window, where keys that are not CAUSAL end directly
    before the first query. CARRY_IN: part_o [T, H, Dv] and part_lse [T, H] (fp32, base 2) hold the attention over
    other keys, which count too. CARRY_OUT: the result goes there, and else into o. HAS_SINKS, of a result in o alone:
    sinks [H] (fp32) are extra logits of heads without a value. Grid: (num_blocks * H,)."""
    pid = tl.program_id(0)
    head = pid % num_heads
    # The last blocks of a sequence see the most keys: start them first.
    block = num_blocks - 1 - pid // num_heads
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(start_loc_ptr + middle) // BLOCK_M + middle <= block:
            low = middle
        else:
            high = middle
    seq = low
    seq_start = tl.load(start_loc_ptr + seq)
    seq_len = tl.load(start_loc_ptr + seq + 1) - seq_start
    first_row = (block - (seq_start // BLOCK_M + seq)) * BLOCK_M
    if (first_row < 0) | (first_row >= seq_len):
        return
    key_start = tl.load(key_start_ptr + seq)
    num_keys = tl.load(key_start_ptr + seq + 1) - key_start

    rows = first_row + tl.arange(0, BLOCK_M)
    row_ok = rows < seq_len
    token = (seq_start + rows).to(tl.int64)
    q_rows = token * stride_qt + head * stride_qh
    q = load_rows(q_ptr, q_rows, row_ok, 0, BLOCK_D, HEAD_DIM, True)
    q_pe = q
    if BLOCK_DPE > 0:
        q_pe = load_rows(q_ptr, q_rows, row_ok, BLOCK_D, BLOCK_DPE, HEAD_DIM, True)
    cols = tl.arange(0, BLOCK_DV)
    part_rows = token * num_heads + head
    o_mask = row_ok[:, None] & (cols < V_HEAD_DIM)[None, :]
    if CARRY_IN:
        acc = tl.load(part_o_ptr + part_rows[:, None] * V_HEAD_DIM + cols[None, :], mask=o_mask, other=0.0)
        row_max = tl.load(part_lse_ptr + part_rows, mask=row_ok, other=0.0)
        row_sum = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)

    k_base = k_ptr + key_start.to(tl.int64) * stride_kt + head * stride_kh
    v_base = v_ptr + key_start.to(tl.int64) * stride_vt + head * stride_vh
    offs_n = tl.arange(0, BLOCK_N)
    if CAUSAL:
        end = tl.minimum(first_row + BLOCK_M, num_keys)
        start = (first_row + 1) // BLOCK_N * BLOCK_N
    else:
        end = num_keys
        start = num_keys // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        before = 0 if CAUSAL else num_keys
        q_pos = rows + before
        begin = tl.maximum(first_row + before + 1 - window, 0)
        start = begin // BLOCK_N * BLOCK_N
    else:
        q_pos = rows
        begin = 0
        for n in range(0, start, BLOCK_N):
            pos = n + offs_n
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q, q_pe, k_base, v_base, pos, stride_kt, stride_vt, pos, 0, num_keys, rows,
                scale, 0.0, 0, q_ptr, rows, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DPE, BLOCK_DV, False, False, False,
                False, False, False, False,
            )  # fmt: skip
    for n in range(start, end, BLOCK_N):
        pos = n + offs_n
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, q_pe, k_base, v_base, pos, stride_kt, stride_vt, pos, begin, num_keys, q_pos,
            scale, 0.0, window, q_ptr, rows, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DPE, BLOCK_DV, True, CAUSAL,
            HAS_WINDOW, False, False, False, False,
        )  # fmt: skip

    if HAS_SINKS:
        row_sum += tl.exp2(tl.load(sinks_ptr + head) * 1.4426950408889634 - row_max)
    out = acc * (1.0 / row_sum)[:, None]
    if CARRY_OUT:
        tl.store(part_o_ptr + part_rows[:, None] * V_HEAD_DIM + cols[None, :], out, mask=o_mask)
        tl.store(part_lse_ptr + part_rows, row_max + tl.log2(row_sum), mask=row_ok)
    else:
        o_rows = token * stride_ot + head * stride_oh
        tl.store(o_ptr + o_rows[:, None] + cols[None, :], out.to(o_ptr.dtype.element_ty), mask=o_mask)


def gather_constants(rank: int, rot_dim: int) -> dict[str, int]:
    """Returns the constants and warps of `gather_latents_kernel`."""
    blocks = {"RANK_BLOCK": triton.next_power_of_2(rank), "ROT_BLOCK": triton.next_power_of_2(rot_dim)}
    return {"RANK": rank, "ROT": rot_dim, **blocks, **GATHER}


def gather_latents(cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, rank: int, scale: float) -> torch.Tensor:
    """Returns latents [C, rank] in k's dtype from the cache [S, 1, rank + rot] at slots [C] int64, multiplied by
    `scale`, and writes the rotary keys into the last rot dims of k [C, H, nope + rot] (contiguous) for every head."""
    rot_dim = cache.shape[-1] - rank
    latent = torch.empty((len(slots), rank), dtype=k.dtype, device=k.device)
    gather_latents_kernel[(len(slots),)](
        cache, slots, latent, k, k.shape[1], scale, cache.stride(0), k.stride(0), NOPE=k.shape[2] - rot_dim,
        **gather_constants(rank, rot_dim),
    )  # fmt: skip
    return latent


def gather_records(
    cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, record: LatentRecord, scale: float
) -> torch.Tensor:
    """Does as `gather_latents` for records [S, 1, size] uint8 of latents in four bits."""
    latent = torch.empty((len(slots), record.rank), dtype=k.dtype, device=k.device)
    gather_records_kernel[(len(slots),)](
        cache, cache.view(torch.bfloat16), slots, latent, k, k.shape[1], float(scale), k.stride(0),
        NOPE=k.shape[2] - record.rope, RANK=record.rank, ROT=record.rope, ROPE_AT=record.rope_at,
        **record_constants(record), **GATHER,
    )  # fmt: skip
    return latent


def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    start_loc: torch.Tensor,
    key_start: torch.Tensor,
    part: tuple[torch.Tensor, torch.Tensor] | None,
    carry: tuple[bool, bool],
    *,
    scale: float,
    causal: bool,
    tile: Mapping[str, int],
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Launches `latent_prompt_kernel` once. `carry` (in, out): whether it continues from `part` (output, log-sum-exp)
    and whether it leaves one; `part` None: neither."""
    num_tokens, num_heads, head_dim = q.shape
    num_seqs, v_head_dim = start_loc.shape[0] - 1, v.shape[2]
    num_blocks = num_tokens // tile["BLOCK_M"] + num_seqs
    block_d, block_dpe = split_head_dim(head_dim)
    part_o, part_lse = (out, out) if part is None else part
    latent_prompt_kernel[(num_blocks * num_heads,)](
        q, k, v, out, part_o, part_lse, out if sinks is None or carry[1] else sinks, start_loc, key_start, num_seqs,
        num_blocks, num_heads, scale * LOG2E, window, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0),
        v.stride(1), out.stride(0), out.stride(1), HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim, BLOCK_D=block_d,
        BLOCK_DPE=block_dpe, BLOCK_DV=triton.next_power_of_2(v_head_dim), BLOCK_M=tile["BLOCK_M"],
        BLOCK_N=tile["BLOCK_N"], CAUSAL=causal, HAS_WINDOW=window > 0, CARRY_IN=carry[0], CARRY_OUT=carry[1],
        HAS_SINKS=sinks is not None and not carry[1], num_warps=tile["num_warps"],
        num_stages=tile["num_stages"],
    )  # fmt: skip


def latent_prompt_attention(
    q: torch.Tensor,
    entries: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    out: torch.Tensor,
    start_loc: torch.Tensor,
    cache: torch.Tensor,
    chunks: Sequence[LatentChunk],
    *,
    scale: float,
    cache_scale: float = 1.0,
    record: LatentRecord | None = None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    tile: Mapping[str, int],
) -> None:
    """Fills the rows of out [T, H, v] from start_loc[0] on with the attention of q [T, H, nope + rot] over each
    sequence's new tokens, entries [T, rank + rot] as `latent_norm_rope_store` returns them, and over its cached prefix.

    w_uk [H, nope, rank], w_uv [H, rank, v]; start_loc [B + 1] int32 ascending; cache [S, 1, rank + rot], real value =
    stored value * cache_scale, or of records; chunks: as `cut_prefixes` makes them, or with a `window`, which counts
    the query itself, a single one of what the first query of each sequence sees; sinks [H] fp32: as in
    AttentionLayer. Never waits for the device; the launches follow from `chunks`, so it is not for CUDA graphs.
    """
    num_tokens, num_heads, v_dim = out.shape
    if num_tokens == 0:
        return
    k, v = expand_new(q, entries, w_uk, w_uv)
    part = None
    if chunks:
        part = (torch.empty(out.shape, dtype=torch.float32, device=q.device),
                torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q.device))  # fmt: skip
    attend = partial(attend_dense, scale=scale, tile=tile, window=window, sinks=sinks)
    attend(q, k, v, out, start_loc, start_loc, part, (False, bool(chunks)), causal=True)
    for number, chunk in enumerate(chunks, 1):
        k, v = expand_cached(q, chunk, cache, w_uk, w_uv, cache_scale, record)
        attend(q, k, v, out, start_loc, chunk.key_start, part, (True, number < len(chunks)), causal=False)


def expand_new(
    q: torch.Tensor, entries: torch.Tensor, w_uk: torch.Tensor, w_uv: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys [T, H, nope + rot] and values [T, H, v] of new tokens with entries [T, rank + rot]."""
    rank = w_uk.shape[2]
    k = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k[..., w_uk.shape[1] :] = entries[:, None, rank:]
    return k, _expanded(entries[:, :rank], w_uk, w_uv, k)


def expand_cached(
    q: torch.Tensor,
    chunk: LatentChunk,
    cache: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    scale: float,
    record: LatentRecord | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys [C, H, nope + rot] and values [C, H, v] of a chunk, in q's dtype."""
    latents, slots = chunk.of(cache)
    k = torch.empty((len(slots), *q.shape[1:]), dtype=q.dtype, device=q.device)
    if record is not None:
        return k, _expanded(gather_records(latents, slots, k, record, scale), w_uk, w_uv, k)
    return k, _expanded(gather_latents(latents, slots, k, w_uk.shape[2], scale), w_uk, w_uv, k)


def _expanded(latent: torch.Tensor, w_uk: torch.Tensor, w_uv: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Fills the first nope dims of k [C, H, nope + rot] with latent [C, rank] times W_UK, and returns latent times
    W_UV, [C, H, v]."""
    heads, nope, _ = w_uk.shape
    rows = latent.expand(heads, *latent.shape)
    torch.bmm(rows, w_uk.transpose(1, 2), out=k[..., :nope].transpose(0, 1))
    v = torch.empty((len(latent), heads, w_uv.shape[2]), dtype=k.dtype, device=k.device)
    torch.bmm(rows, w_uv, out=v.transpose(0, 1))
    return v
