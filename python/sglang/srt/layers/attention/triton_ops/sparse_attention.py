"""Attention over selected entries of one or two latent caches: one key head for all query heads, whose first columns
are the values.

A program computes BLOCK_H heads of one token over a split of its entries, first those of the first cache and then those
of the second; `merge_shares_kernel` merges the splits. As in `latent_decode`, an entry is read once and used as key and
value, and slots are loaded a tile ahead of the entries. Entries are stored in one of two formats:

- bf16 or fp16: RANK columns and, if ROPE > 0, as many more that are keys only.
- packed: RANK e4m3 numbers with a scale for every GROUP of them, then ROPE columns in bfloat16. Pairs of e4m3 numbers
  are read as 16 bits, which the instruction that transposes moves; even and odd columns are multiplied apart. e4m3 is
  exact in the queries' type, and scales are multiplied to scores and weights: never to entries.

Records (`plan.latent_record`) are read by `sparse_records`. Reference: `native_sparse_ops.attend_selected`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.entry_shares import num_shares
from sglang.srt.layers.attention.selection import Selection
from sglang.srt.layers.attention.triton_ops.common import LOG2E, load_rows
from sglang.srt.layers.attention.triton_ops.sparse_packed import PACKED_BYTES, packed_attention_kernel
from sglang.srt.layers.attention.triton_ops.sparse_steps import (
    finish,
    merge_shares_kernel,
    share_of,
    softmax_step,
    store_columns,
    store_lse,
)
from sglang.srt.layers.triton_ops import pdl

MERGE_COLS = 128
"""Columns per program of `merge_shares_kernel`."""
MIN_SHARES = 16
"""Smallest number of splits that it is compiled for; the largest is MAX_SHARES."""


@triton.jit
def _attend(
    acc0, acc1, row_max, row_sum, q0, q1, q_pe, cache_ptr, stride_cs, slots_ptr, begin, end, scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Entries slots[begin:end] of a cache in 16 bits, whose values are two halves of RANK / 2 columns."""
    HALF: tl.constexpr = RANK // 2
    offs_n = tl.arange(0, BLOCK_N)
    slots = tl.load(slots_ptr + begin + offs_n, mask=begin + offs_n < end, other=-1)
    for n in range(begin, end, BLOCK_N):
        ahead = n + BLOCK_N + offs_n
        next_slots = tl.load(slots_ptr + ahead, mask=ahead < end, other=-1)
        keep = slots >= 0
        rows = slots.to(tl.int64) * stride_cs
        k0 = load_rows(cache_ptr, rows, keep, 0, HALF, RANK, True)
        k1 = load_rows(cache_ptr, rows, keep, HALF, HALF, RANK, True)
        scores = tl.dot(q0, tl.trans(k0))
        scores = tl.dot(q1, tl.trans(k1), scores)
        if ROPE > 0:
            k_pe = load_rows(cache_ptr, rows, keep, RANK, ROPE, RANK + ROPE, True)
            scores = tl.dot(q_pe, tl.trans(k_pe), scores)
        weights, decay, row_max, row_sum = softmax_step(row_max, row_sum, scores, keep, scale)
        weights = weights.to(k0.dtype)
        acc0 = tl.dot(weights, k0, acc0 * decay[:, None])
        acc1 = tl.dot(weights, k1, acc1 * decay[:, None])
        slots = next_slots
    return acc0, acc1, row_max, row_sum


@triton.jit(
    do_not_specialize=["num_heads", "num_head_tiles", "num_splits", "stride_slots", "stride_more_slots"],
    do_not_specialize_on_alignment=["counts_ptr", "more_counts_ptr"],
)
def sparse_attention_kernel(
    q_ptr, o_ptr, lse_ptr, sinks_ptr, cache_ptr, slots_ptr, counts_ptr, more_cache_ptr, more_slots_ptr,
    more_counts_ptr, part_o_ptr, part_lse_ptr, num_heads, num_head_tiles, num_splits, scale, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_cs, stride_slots, stride_more_cs, stride_more_slots, RANK: tl.constexpr,
    ROPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, HAS_MORE: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q [T, H, RANK + ROPE], caches [S, RANK + ROPE], slots [T, K] and counts [T] int32 -> o [T, H, RANK] and, if
    HAS_LSE, lse [T, H]; with several splits part_o [T, splits, H, RANK] and part_lse [T, splits, H] in their place.
    `scale` carries log2(e). Grid: (T * splits * head tiles,)."""
    pid = tl.program_id(0)
    head_tile = pid % num_head_tiles
    split = pid // num_head_tiles % num_splits
    token = pid // num_head_tiles // num_splits
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    HALF: tl.constexpr = RANK // 2
    head = head_tile * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = head < num_heads
    q_rows = token.to(tl.int64) * stride_qt + head * stride_qh
    q0 = load_rows(q_ptr, q_rows, head_ok, 0, HALF, RANK, True)
    q1 = load_rows(q_ptr, q_rows, head_ok, HALF, HALF, RANK, True)
    q_pe = q0
    if ROPE > 0:
        q_pe = load_rows(q_ptr, q_rows, head_ok, RANK, ROPE, RANK + ROPE, True)

    acc0 = tl.zeros([BLOCK_H, HALF], dtype=tl.float32)
    acc1 = tl.zeros([BLOCK_H, HALF], dtype=tl.float32)
    row_max = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_H], dtype=tl.float32)
    begin, end = share_of(counts_ptr, token, split, num_splits, BLOCK_N)
    slots = slots_ptr + token.to(tl.int64) * stride_slots
    acc0, acc1, row_max, row_sum = _attend(
        acc0, acc1, row_max, row_sum, q0, q1, q_pe, cache_ptr, stride_cs, slots, begin, end, scale, RANK, ROPE, BLOCK_N
    )
    if HAS_MORE:
        begin, end = share_of(more_counts_ptr, token, split, num_splits, BLOCK_N)
        slots = more_slots_ptr + token.to(tl.int64) * stride_more_slots
        acc0, acc1, row_max, row_sum = _attend(
            acc0, acc1, row_max, row_sum, q0, q1, q_pe, more_cache_ptr, stride_more_cs, slots, begin, end, scale, RANK,
            ROPE, BLOCK_N,
        )  # fmt: skip

    final, lse = finish(row_max, row_sum, head, head_ok, sinks_ptr, HAS_SINKS)
    store_lse(lse_ptr, part_lse_ptr, lse, token, split, num_splits, num_heads, head, head_ok, HAS_LSE)
    store_columns(
        o_ptr, part_o_ptr, acc0 * final[:, None], token, split, num_splits, num_heads, stride_ot, stride_oh, head,
        head_ok, 0, RANK, HALF,
    )  # fmt: skip
    store_columns(
        o_ptr, part_o_ptr, acc1 * final[:, None], token, split, num_splits, num_heads, stride_ot, stride_oh, head,
        head_ok, HALF, RANK, HALF,
    )  # fmt: skip


def sparse_attention_fwd(
    q: torch.Tensor,
    sources: Sequence[tuple[torch.Tensor, Selection]],
    out: torch.Tensor,
    *,
    scale: float,
    tile: Mapping[str, int],
    num_sms: int,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Computes `native_sparse_ops.attend_selected` for q [T, H, D] in bf16 or fp16, one or two caches [S, 1, D] of the
    same dtype, or one packed cache [S, 1, 656] uint8, and out [T, H, Dv]; the strides of rows
    of q, out and caches are free, lse [T, H] is contiguous. `num_sms`: of the GPU. Raises ValueError for two packed
    caches."""
    if len(q) == 0:
        return
    caches = [cache for cache, _ in sources]
    packed = caches[0].dtype == torch.uint8
    if packed and len(caches) > 1:
        raise ValueError("packed latents are read from one cache, not from two")
    if any(selection.rows is not None for _, selection in sources):
        raise ValueError("slots in rows of a table are read with records alone")
    if not packed and any(cache.dtype != q.dtype for cache in caches):
        raise TypeError(f"caches are {[cache.dtype for cache in caches]}: neither packed (uint8) nor {q.dtype}")
    shares = Shares.cut(q, out, sources, tile, num_sms)
    if packed:
        _launch_packed(q, *sources[0], out, scale, sinks, lse, tile, shares)
    else:
        _launch_plain(q, sources, out, scale, sinks, lse, tile, shares)
    shares.merge(out, sinks, lse)


@dataclass(frozen=True, slots=True)
class Shares:
    """The splits of each token's entries and the buffers of their partial results."""

    count: int
    head_tiles: int
    part_o: torch.Tensor  # [T, count, H, Dv] fp32; a placeholder if count is 1, since the kernel then writes `out`
    part_lse: torch.Tensor  # [T, count, H] fp32

    @staticmethod
    def cut(
        q: torch.Tensor,
        out: torch.Tensor,
        sources: Sequence[tuple[torch.Tensor, Selection]],
        tile: Mapping[str, int],
        num_sms: int,
    ) -> Shares:
        num_tokens, num_heads, _ = q.shape
        tiles = sum(triton.cdiv(selection.slots.shape[1], tile["BLOCK_N"]) for _, selection in sources)
        head_tiles = triton.cdiv(num_heads, tile["BLOCK_H"])
        count = num_shares(num_tokens * head_tiles, tiles, num_sms * tile["ctas_per_sm"])
        rows = (num_tokens, count, num_heads) if count > 1 else (1,)
        part_o = torch.empty((*rows, out.shape[2]), dtype=torch.float32, device=q.device)
        return Shares(count, head_tiles, part_o, torch.empty(rows, dtype=torch.float32, device=q.device))

    def outputs(
        self, sinks: torch.Tensor | None, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, bool]]:
        """Returns the output arguments of the attention kernel. With several splits the merge handles sinks and
        log-sum-exps."""
        alone = self.count == 1
        stand_in = self.part_lse
        flags = {"HAS_SINKS": alone and sinks is not None, "HAS_LSE": alone and lse is not None}
        return stand_in if lse is None else lse, stand_in if sinks is None else sinks, flags

    def merge(self, out: torch.Tensor, sinks: torch.Tensor | None, lse: torch.Tensor | None) -> None:
        """Writes the outputs of several splits."""
        if self.count == 1:
            return
        num_tokens, num_heads, rank = out.shape
        stand_in = self.part_lse
        merge_shares_kernel[(num_heads, num_tokens, rank // MERGE_COLS)](
            out, stand_in if lse is None else lse, stand_in if sinks is None else sinks, self.part_o, self.part_lse,
            self.count, num_heads, out.stride(0), out.stride(1), RANK=rank, COLS=MERGE_COLS,
            SHARES=max(MIN_SHARES, triton.next_power_of_2(self.count)), HAS_SINKS=sinks is not None,
            HAS_LSE=lse is not None, num_warps=4, **pdl.options(),
        )  # fmt: skip


def _launch_plain(
    q: torch.Tensor,
    sources: Sequence[tuple[torch.Tensor, Selection]],
    out: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None,
    tile: Mapping[str, int],
    shares: Shares,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    rank = out.shape[2]
    (cache, selection), (more_cache, more) = sources[0], sources[-1]
    lse, sinks, flags = shares.outputs(sinks, lse)
    sparse_attention_kernel[(num_tokens * shares.count * shares.head_tiles,)](
        q, out, lse, sinks, cache, selection.slots, selection.counts, more_cache, more.slots, more.counts,
        shares.part_o, shares.part_lse, num_heads, shares.head_tiles, shares.count, scale * LOG2E, q.stride(0),
        q.stride(1), out.stride(0), out.stride(1), cache.stride(0), selection.slots.stride(0), more_cache.stride(0),
        more.slots.stride(0), RANK=rank, ROPE=head_dim - rank, BLOCK_H=tile["BLOCK_H"], BLOCK_N=tile["BLOCK_N"],
        HAS_MORE=len(sources) > 1, num_warps=tile["num_warps"], num_stages=tile["num_stages"], **flags,
        **pdl.options(),
    )  # fmt: skip


def _launch_packed(
    q: torch.Tensor,
    cache: torch.Tensor,
    selection: Selection,
    out: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None,
    tile: Mapping[str, int],
    shares: Shares,
) -> None:
    if cache.stride(0) != PACKED_BYTES or cache.shape[-1] != PACKED_BYTES:
        raise ValueError(f"packed latents lie {PACKED_BYTES} bytes apart, not {cache.stride(0)}")
    num_tokens, num_heads, _ = q.shape
    pairs, scales, rope = (cache.view(dtype) for dtype in (torch.int16, torch.float32, torch.bfloat16))
    lse, sinks, flags = shares.outputs(sinks, lse)
    packed_attention_kernel[(num_tokens * shares.count * shares.head_tiles,)](
        q, out, lse, sinks, pairs, scales, rope, selection.slots, selection.counts, shares.part_o, shares.part_lse,
        num_heads, shares.head_tiles, shares.count, scale * LOG2E, q.stride(0), q.stride(1), out.stride(0),
        out.stride(1), selection.slots.stride(0), BLOCK_H=tile["BLOCK_H"], BLOCK_N=tile["BLOCK_N"],
        num_warps=tile["num_warps"], num_stages=tile["num_stages"], **flags, **pdl.options(),
    )  # fmt: skip
