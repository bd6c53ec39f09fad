"""Attention of grouped queries over selected blocks of a paged cache of keys and values.

A program computes up to BLOCK_H query heads of one KV head and token, over a split of the token's selected blocks;
`merge_shares_kernel` merges the splits. The tokens of a block have consecutive slots, so one number per block gives the
place of its keys and values. Blocks are in ascending order, and of the last only the tokens up to the query are seen,
so a token sees a prefix of its selection. Float8 keys and values are converted to the queries' dtype; scores and
results are multiplied by their scales. Heads of 192 dims are read as 128 and 64 columns, since a tile has a power of
two of them.

Reference: `native_sparse_ops.attend_blocks`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.entry_shares import num_shares
from sglang.srt.layers.attention.selection import Selection
from sglang.srt.layers.attention.triton_ops.common import LOG2E, load_rows
from sglang.srt.layers.attention.triton_ops.sparse_attention import MERGE_COLS, MIN_SHARES
from sglang.srt.layers.attention.triton_ops.sparse_steps import (
    finish,
    merge_shares_kernel,
    softmax_step,
    store_columns,
    store_lse,
)
from sglang.srt.layers.triton_ops import pdl


@triton.jit(
    do_not_specialize=["num_heads", "group", "num_head_tiles", "num_splits", "stride_slots"],
    do_not_specialize_on_alignment=["counts_ptr", "lens_ptr"],
)
def block_attention_kernel(
    q_ptr, o_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, counts_ptr, lens_ptr, part_o_ptr, part_lse_ptr, num_heads, group,
    num_head_tiles, num_splits, scale, v_scale, stride_qt, stride_qh, stride_ot, stride_oh, stride_kcs, stride_kch,
    stride_vcs, stride_vch, stride_slots, PER_GROUP: tl.constexpr, KEYS: tl.constexpr, MORE_KEYS: tl.constexpr,
    VALUES: tl.constexpr, MORE_VALUES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """q [T, H, D], caches [S, H / group, D] and [S, H / group, Dv], slots / BLOCK of blocks [rows, K] and counts
    [rows], a row for each token and, if PER_GROUP, KV head; lens [T] -> o [T, H, Dv], or with several splits part_o [T,
    splits, H, Dv] and part_lse [T, splits, H]. D = KEYS + MORE_KEYS, Dv = VALUES + MORE_VALUES. `scale` carries
    log2(e). Grid: (T * splits * KV heads * head tiles,)."""
    pid = tl.program_id(0)
    num_kv_heads = num_heads // group
    head_tile = pid % num_head_tiles
    kv_head = pid // num_head_tiles % num_kv_heads
    split = pid // num_head_tiles // num_kv_heads % num_splits
    token = pid // num_head_tiles // num_kv_heads // num_splits
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    inside = head_tile * BLOCK_H + tl.arange(0, BLOCK_H)
    head = kv_head * group + inside
    head_ok = inside < group
    q_rows = token.to(tl.int64) * stride_qt + head * stride_qh
    q = load_rows(q_ptr, q_rows, head_ok, 0, KEYS, KEYS, True)
    if MORE_KEYS:
        more_q = load_rows(q_ptr, q_rows, head_ok, KEYS, MORE_KEYS, KEYS + MORE_KEYS, True)

    row = token
    if PER_GROUP:
        row = token * num_kv_heads + kv_head
    length = tl.load(lens_ptr + token)
    chosen = tl.load(counts_ptr + row)
    # All of the blocks but the last one are whole.
    seen = tl.where((length > 0) & (chosen > 0), (chosen - 1) * BLOCK + (length - 1) % BLOCK + 1, 0)
    size = tl.cdiv(tl.cdiv(seen, BLOCK_N), num_splits) * BLOCK_N
    begin = tl.minimum(split * size, seen)
    end = tl.minimum(begin + size, seen)

    acc = tl.zeros([BLOCK_H, VALUES], dtype=tl.float32)
    if MORE_VALUES:
        more_acc = tl.zeros([BLOCK_H, MORE_VALUES], dtype=tl.float32)
    row_max = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_H], dtype=tl.float32)
    slots_ptr += row.to(tl.int64) * stride_slots
    k_cache_ptr += kv_head * stride_kch
    v_cache_ptr += kv_head * stride_vch
    offs_n = tl.arange(0, BLOCK_N)
    place = begin + offs_n
    blocks = tl.load(slots_ptr + place // BLOCK, mask=place < end, other=0)
    for n in range(begin, end, BLOCK_N):
        place = n + offs_n
        ahead = place + BLOCK_N
        next_blocks = tl.load(slots_ptr + ahead // BLOCK, mask=ahead < end, other=0)
        keep = place < end
        slots = blocks.to(tl.int64) * BLOCK + place % BLOCK
        k = load_rows(k_cache_ptr, slots * stride_kcs, keep, 0, KEYS, KEYS, True).to(q.dtype)
        scores = tl.dot(q, tl.trans(k))
        if MORE_KEYS:
            more_k = load_rows(k_cache_ptr, slots * stride_kcs, keep, KEYS, MORE_KEYS, KEYS + MORE_KEYS, True)
            scores = tl.dot(more_q, tl.trans(more_k.to(q.dtype)), scores)
        weights, decay, row_max, row_sum = softmax_step(row_max, row_sum, scores, keep, scale)
        v = load_rows(v_cache_ptr, slots * stride_vcs, keep, 0, VALUES, VALUES, True).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * decay[:, None])
        if MORE_VALUES:
            more_v = load_rows(v_cache_ptr, slots * stride_vcs, keep, VALUES, MORE_VALUES, VALUES + MORE_VALUES, True)
            more_acc = tl.dot(weights.to(q.dtype), more_v.to(q.dtype), more_acc * decay[:, None])
        blocks = next_blocks

    final, lse = finish(row_max, row_sum, head, head_ok, part_lse_ptr, False)
    store_lse(part_lse_ptr, part_lse_ptr, lse, token, split, num_splits, num_heads, head, head_ok, False)
    store_columns(
        o_ptr, part_o_ptr, acc * (final * v_scale)[:, None], token, split, num_splits, num_heads, stride_ot, stride_oh,
        head, head_ok, 0, VALUES + MORE_VALUES, VALUES,
    )  # fmt: skip
    if MORE_VALUES:
        store_columns(
            o_ptr, part_o_ptr, more_acc * (final * v_scale)[:, None], token, split, num_splits, num_heads, stride_ot,
            stride_oh, head, head_ok, VALUES, VALUES + MORE_VALUES, MORE_VALUES,
        )  # fmt: skip


def columns(dim: int) -> tuple[int, int]:
    """Returns the columns of a head that a tile has at once, a power of two, and those that remain: another one or
    none. Example: 192 -> (128, 64)."""
    first = 1 << (dim.bit_length() - 1)
    return first, dim - first


def block_attention_fwd(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    selection: Selection,
    lens: torch.Tensor,
    block: int,
    out: torch.Tensor,
    *,
    scale: float,
    tile: Mapping[str, int],
    num_sms: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Computes `native_sparse_ops.attend_blocks` for q [T, Hq, D] and out [T, Hq, Dv] in bf16 or fp16, caches [S,
    Hkv, D] and [S, Hkv, Dv] of that dtype or float8, `block` a power of two, D and Dv as `columns` divides them.
    `num_sms`: of the GPU. Raises TypeError for uint8 or different caches."""
    num_tokens, num_heads, dim = q.shape
    v_dim = out.shape[2]
    if num_tokens == 0:
        return
    if k_cache.dtype == torch.uint8 or v_cache.dtype != k_cache.dtype:
        raise TypeError(f"caches are {k_cache.dtype} and {v_cache.dtype}: view them as the type that they hold")
    kv_heads = k_cache.shape[1]
    group = num_heads // kv_heads
    head_tiles = triton.cdiv(group, tile["BLOCK_H"])
    programs = num_tokens * kv_heads * head_tiles
    tiles = triton.cdiv(selection.slots.shape[1] * block, tile["BLOCK_N"])
    shares = num_shares(programs, tiles, num_sms * tile["ctas_per_sm"])
    rows = (num_tokens, shares, num_heads) if shares > 1 else (1,)
    part_o = torch.empty((*rows, v_dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    (keys, more_keys), (values, more_values) = columns(dim), columns(v_dim)
    block_attention_kernel[(programs * shares,)](
        q, out, k_cache, v_cache, selection.slots, selection.counts, lens, part_o, part_lse, num_heads, group,
        head_tiles, shares, scale * LOG2E * k_scale, float(v_scale), q.stride(0), q.stride(1), out.stride(0),
        out.stride(1), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        selection.slots.stride(0), PER_GROUP=len(selection.slots) > num_tokens, KEYS=keys, MORE_KEYS=more_keys,
        VALUES=values, MORE_VALUES=more_values, BLOCK=block, BLOCK_H=tile["BLOCK_H"], BLOCK_N=tile["BLOCK_N"],
        num_warps=tile["num_warps"], num_stages=tile["num_stages"], **pdl.options(),
    )  # fmt: skip
    if shares > 1:
        merged = min(MERGE_COLS, more_values or values)
        merge_shares_kernel[(num_heads, num_tokens, v_dim // merged)](
            out, part_lse, part_lse, part_o, part_lse, shares, num_heads, out.stride(0), out.stride(1), RANK=v_dim,
            COLS=merged, SHARES=max(MIN_SHARES, triton.next_power_of_2(shares)), HAS_SINKS=False, HAS_LSE=False,
            num_warps=4, **pdl.options(),
        )  # fmt: skip
