"""Grouped-query attention over selected blocks of neighbouring tokens, and the first tokens of one more.

A program computes up to BLOCK_H query heads of one KV head for one token, over a split of the tokens that it sees;
`merge_shares_kernel` merges the splits. Tokens are numbered through the selection: number n is token n % BLOCK of block
n // BLOCK of it, so a tile of BLOCK_N tokens needs BLOCK_N / BLOCK block numbers, which are loaded a tile ahead of keys
and values. Reference: `reference.attend_blocks`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from sglang.srt.blocks.pooled_sparse.block_selection import BlockSelection
from sglang.srt.layers.attention.entry_shares import num_shares
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


@triton.jit
def _slots(blocks, chosen, tail, places, end, BLOCK: tl.constexpr):
    """Slots of the tokens `places` [N] of a selection; those from `end` on are not looked at."""
    block = places // BLOCK
    first = tl.load(blocks + block, mask=(block < chosen) & (places < end), other=0)
    return tl.where(block < chosen, first, tail).to(tl.int64) * BLOCK + places % BLOCK


# Counts and places arrive as slices of packed buffers: their alignment must not decide about a recompilation.
@triton.jit(
    do_not_specialize=["num_heads", "group", "num_kv_heads", "num_head_tiles", "num_splits", "stride_blocks"],
    do_not_specialize_on_alignment=["blocks_ptr", "counts_ptr", "tails_ptr", "tail_counts_ptr"],
)
def selected_block_kernel(
    q_ptr, o_ptr, k_ptr, v_ptr, blocks_ptr, counts_ptr, tails_ptr, tail_counts_ptr, part_o_ptr, part_lse_ptr,
    num_heads, group, num_kv_heads, num_head_tiles, num_splits, scale, v_scale, stride_qt, stride_qh, stride_ot,
    stride_oh, stride_ks, stride_kh, stride_vs, stride_vh, stride_blocks, DIM: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q [T, Hq, DIM], caches [S, Hkv, DIM] in q's dtype or in float8, blocks [T, K] and counts, tails, tail_counts [T]
    int32 -> o [T, Hq, DIM], or with several splits part_o [T, splits, Hq, DIM] and part_lse [T, splits, Hq]. `scale`
    carries log2(e) and the keys' scale; o is multiplied by v_scale. Grid: (T * splits * KV heads * head tiles,)."""
    pid = tl.program_id(0)
    head_tile = pid % num_head_tiles
    kv_head = pid // num_head_tiles % num_kv_heads
    split = pid // num_head_tiles // num_kv_heads % num_splits
    token = pid // num_head_tiles // num_kv_heads // num_splits
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    in_group = head_tile * BLOCK_H + tl.arange(0, BLOCK_H)
    head, head_ok = kv_head * group + in_group, in_group < group
    q_rows = token.to(tl.int64) * stride_qt + head * stride_qh
    q = load_rows(q_ptr, q_rows, head_ok, 0, DIM, DIM, True)
    chosen, tail = tl.load(counts_ptr + token), tl.load(tails_ptr + token)
    count = chosen * BLOCK + tl.load(tail_counts_ptr + token)
    size = tl.cdiv(tl.cdiv(count, BLOCK_N), num_splits) * BLOCK_N
    begin = tl.minimum(split * size, count)
    end = tl.minimum(begin + size, count)

    acc = tl.zeros([BLOCK_H, DIM], dtype=tl.float32)
    row_max = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_H], dtype=tl.float32)
    blocks = blocks_ptr + token.to(tl.int64) * stride_blocks
    offs_n = tl.arange(0, BLOCK_N)
    slots = _slots(blocks, chosen, tail, begin + offs_n, end, BLOCK)
    for n in range(begin, end, BLOCK_N):
        keep = n + offs_n < end
        next_slots = _slots(blocks, chosen, tail, n + BLOCK_N + offs_n, end, BLOCK)
        keys = load_rows(k_ptr + kv_head * stride_kh, slots * stride_ks, keep, 0, DIM, DIM, True)
        scores = tl.dot(q, tl.trans(keys.to(q.dtype)))
        weights, decay, row_max, row_sum = softmax_step(row_max, row_sum, scores, keep, scale)
        values = load_rows(v_ptr + kv_head * stride_vh, slots * stride_vs, keep, 0, DIM, DIM, True)
        acc = tl.dot(weights.to(q.dtype), values.to(q.dtype), acc * decay[:, None])
        slots = next_slots

    final, lse = finish(row_max, row_sum, head, head_ok, part_lse_ptr, False)
    store_lse(part_lse_ptr, part_lse_ptr, lse, token, split, num_splits, num_heads, head, head_ok, False)
    store_columns(
        o_ptr, part_o_ptr, acc * (final * v_scale)[:, None], token, split, num_splits, num_heads, stride_ot, stride_oh,
        head, head_ok, 0, DIM, DIM,
    )  # fmt: skip


def selected_block_attention_fwd(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    selection: BlockSelection,
    out: torch.Tensor,
    *,
    scale: float,
    tile: Mapping[str, int],
    num_sms: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Computes `reference.attend_blocks` for q [T, Hq, D] in bf16 or fp16 and caches [S, Hkv, D] of the same
    dtype or in float8, D a power of two; the stride between rows is free. `num_sms`: of the GPU. Raises TypeError for
    caches of another dtype."""
    num_tokens, num_heads, dim = q.shape
    if num_tokens == 0:
        return
    if {k_cache.dtype, v_cache.dtype} - {q.dtype, torch.float8_e4m3fn, torch.float8_e5m2}:
        raise TypeError(f"caches are {k_cache.dtype} and {v_cache.dtype}, queries {q.dtype}")
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    head_tiles = triton.cdiv(group, tile["BLOCK_H"])
    longest = selection.blocks.shape[1] * selection.block + selection.block - 1
    programs = num_tokens * num_kv_heads * head_tiles
    splits = num_shares(programs, triton.cdiv(longest, tile["BLOCK_N"]), num_sms * tile["ctas_per_sm"])
    rows = (num_tokens, splits, num_heads) if splits > 1 else (1,)
    part_o = torch.empty((*rows, dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    selected_block_kernel[(programs * splits,)](
        q, out, k_cache, v_cache, selection.blocks, selection.counts, selection.tails, selection.tail_counts, part_o,
        part_lse, num_heads, group, num_kv_heads, head_tiles, splits, scale * k_scale * LOG2E, float(v_scale),
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), k_cache.stride(0), k_cache.stride(1),
        v_cache.stride(0), v_cache.stride(1),
        selection.blocks.stride(0), DIM=dim, BLOCK=selection.block, BLOCK_H=tile["BLOCK_H"], BLOCK_N=tile["BLOCK_N"],
        num_warps=tile["num_warps"], num_stages=tile["num_stages"], **pdl.options(),
    )  # fmt: skip
    if splits > 1:
        merge_shares_kernel[(num_heads, num_tokens, dim // MERGE_COLS)](
            out, part_lse, part_lse, part_o, part_lse, splits, num_heads, out.stride(0), out.stride(1), RANK=dim,
            COLS=MERGE_COLS, SHARES=max(MIN_SHARES, triton.next_power_of_2(splits)), HAS_SINKS=False, HAS_LSE=False,
            num_warps=4, **pdl.options(),
        )  # fmt: skip
