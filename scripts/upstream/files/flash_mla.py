# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention in Triton for SM12x, with the names, arguments and results of FlashMLA.

Every query attends to the cached tokens that its `indices` name (-1: none); all heads share one latent key whose
first columns are the value. Nothing waits for the device, so CUDA graphs can capture all of it. A token in the cache is
one of

- 576 bfloat16: 512 latent, 64 rotary; the value is the latent
- 656 bytes (V3.2): 512 float8_e4m3fn, 4 float32 scales (a scale for 128), 64 bfloat16; the value is the latent
- 584 bytes (V4): 448 float8_e4m3fn and 64 bfloat16 side by side, and at the end of the page 8 bytes of ue8m0 scales
  (one for 64 values, the last byte unused); key and value are all 512

The first two are read by the kernels of sm120-sglang, the third by one here, which is built from their parts.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from sglang.srt.sm120.attention_parts import LOG2E
from sglang.srt.sm120.entry_shares import num_shares
from sglang.srt.sm120.selection import Selection
from sglang.srt.sm120.sparse_attention import MERGE_COLS, MIN_SHARES, sparse_attention_fwd
from sglang.srt.sm120.sparse_steps import (
    finish,
    merge_shares_kernel,
    share_of,
    softmax_step,
    store_columns,
    store_lse,
)

TILE = {"BLOCK_H": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 3, "ctas_per_sm": 1}
MANY_HEADS_TILES = {
    torch.bfloat16: {"BLOCK_H": 32, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2, "ctas_per_sm": 1},
    torch.uint8: {"BLOCK_H": 32, "BLOCK_N": 32, "num_warps": 8, "num_stages": 3, "ctas_per_sm": 1},
}
"""By the type of the cache, for MANY_TOKENS and more: entries are read for 32 heads at once."""
MANY_TOKENS = 128
V4_HEADS, V4_TOKENS = 16, 32
"""Of one program of `_v4_kernel`."""
V4_BYTES, V32_BYTES = 584, 656


@triton.jit
def _v4_entries(
    acc, row_max, row_sum, q, Numbers, Halves, Scales, slots_ptr, page_bytes, begin, end, scale, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tokens slots[begin:end] of a cache in V4's format: page after page its numbers, then its scales."""
    columns = tl.arange(0, 512)[None, :]
    is_number = columns < 448
    offs = tl.arange(0, BLOCK_N)
    for first in range(begin, end, BLOCK_N):
        token = tl.load(slots_ptr + first + offs, mask=first + offs < end, other=-1).to(tl.int64)
        keep = token >= 0
        token = tl.maximum(token, 0)
        page = token // PAGE * page_bytes
        base = page + token % PAGE * 576
        numbers = tl.load(Numbers + base[:, None] + columns, mask=keep[:, None] & is_number, other=0.0)
        exponents_at = page + PAGE * 576 + token % PAGE * 8
        exponents = tl.load(Scales + exponents_at[:, None] + tl.arange(0, 8)[None, :], mask=keep[:, None], other=0)
        scales = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        groups = tl.reshape(numbers.to(tl.float32), (BLOCK_N, 8, 64)) * scales[:, :, None]
        rotary = tl.load(Halves + base[:, None] // 2 + columns - 224, mask=keep[:, None] & (columns >= 448), other=0.0)
        keys = tl.where(is_number, tl.reshape(groups, (BLOCK_N, 512)).to(tl.bfloat16), rotary)
        scores = tl.dot(q, tl.trans(keys))
        weights, decay, row_max, row_sum = softmax_step(row_max, row_sum, scores, keep, scale)
        acc = tl.dot(weights.to(tl.bfloat16), keys, acc * decay[:, None])
    return acc, row_max, row_sum


@triton.jit
def _v4_kernel(
    q_ptr, o_ptr, lse_ptr, sinks_ptr, numbers_ptr, halves_ptr, scales_ptr, slots_ptr, counts_ptr, page_bytes,
    more_numbers_ptr, more_halves_ptr, more_scales_ptr, more_slots_ptr, more_counts_ptr, more_page_bytes, part_o_ptr,
    part_lse_ptr, num_heads, num_head_tiles, num_splits, scale, stride_qt, stride_qh, stride_ot, stride_oh,
    stride_slots, stride_more_slots, PAGE: tl.constexpr, MORE_PAGE: tl.constexpr, HAS_MORE: tl.constexpr,
    HAS_SINKS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of one query over a share of its tokens of one or two caches. Grid: (T * splits * head tiles,)."""
    pid = tl.program_id(0)
    head_tile = pid % num_head_tiles
    split = pid // num_head_tiles % num_splits
    token = pid // num_head_tiles // num_splits
    head = head_tile * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = head < num_heads
    q_rows = token.to(tl.int64) * stride_qt + head * stride_qh
    q = tl.load(q_ptr + q_rows[:, None] + tl.arange(0, 512)[None, :], mask=head_ok[:, None], other=0.0)
    acc = tl.zeros([BLOCK_H, 512], dtype=tl.float32)
    row_max = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_H], dtype=tl.float32)
    begin, end = share_of(counts_ptr, token, split, num_splits, BLOCK_N)
    slots = slots_ptr + token.to(tl.int64) * stride_slots
    acc, row_max, row_sum = _v4_entries(
        acc, row_max, row_sum, q, numbers_ptr, halves_ptr, scales_ptr, slots, page_bytes, begin, end, scale, PAGE,
        BLOCK_N,
    )  # fmt: skip
    if HAS_MORE:
        begin, end = share_of(more_counts_ptr, token, split, num_splits, BLOCK_N)
        slots = more_slots_ptr + token.to(tl.int64) * stride_more_slots
        acc, row_max, row_sum = _v4_entries(
            acc, row_max, row_sum, q, more_numbers_ptr, more_halves_ptr, more_scales_ptr, slots, more_page_bytes, begin,
            end, scale, MORE_PAGE, BLOCK_N,
        )  # fmt: skip
    final, lse = finish(row_max, row_sum, head, head_ok, sinks_ptr, HAS_SINKS)
    store_lse(lse_ptr, part_lse_ptr, lse, token, split, num_splits, num_heads, head, head_ok, True)
    store_columns(
        o_ptr, part_o_ptr, acc * final[:, None], token, split, num_splits, num_heads, stride_ot, stride_oh, head,
        head_ok, 0, 512, 512,
    )  # fmt: skip


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [rows, heads, 576], kv [tokens, 1, 576] bfloat16, indices [rows, 1, n] int32 -> output [rows, heads, 512], and
    twice the log-sum-exp [rows, heads]: the maximum of the logits, which comes first in FlashMLA, is not kept."""
    _require(d_v == 512 and q.shape[-1] == 576 and kv.dtype == torch.bfloat16, "head dims 576/512 and a bfloat16 cache")
    selection = _selection(indices, topk_length, len(q), 1)
    out, lse = _attend(q.contiguous(), kv.contiguous().view(-1, 1, 576), selection, sm_scale, attn_sink)
    return out, lse, lse


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    head_dim_v: int = 512,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [batch, queries, heads, 576 (V32) or 512 (V4)], k_cache [pages, page size, 1, bytes of a token], indices
    [batch, queries, n] -> output [batch, queries, heads, 512] and log-sum-exp [batch, heads, queries]."""
    _require(
        is_fp8_kvcache and indices is not None and head_dim_v == 512, "a float8 cache, indices and value head dim 512"
    )
    batch, queries, heads, head_dim = q.shape
    rows = batch * queries
    token_bytes = k_cache.shape[-1] * k_cache.element_size()
    _require(
        (head_dim, token_bytes) in ((576, V32_BYTES), (512, V4_BYTES)),
        f"a known cache format, not {token_bytes} bytes a token with head dim {head_dim}",
    )
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    q = q.reshape(rows, heads, head_dim)
    selection = _selection(indices, topk_length, rows, queries)
    if token_bytes == V32_BYTES:
        entries = k_cache.contiguous().view(torch.uint8).view(-1, 1, V32_BYTES)
        out, lse = _attend(q, entries, selection, scale, attn_sink)
    else:
        more = selection
        if extra_indices_in_kvcache is not None:
            more = _selection(extra_indices_in_kvcache, extra_topk_length, rows, queries)
        out, lse = _attend_v4(q, k_cache, selection, extra_k_cache, more, scale, attn_sink)
    return out.view(batch, queries, heads, 512), lse.view(batch, queries, heads).transpose(1, 2)


def _selection(indices: torch.Tensor, lengths: torch.Tensor | None, rows: int, queries: int) -> Selection:
    """lengths: of each row, or of the `queries` rows of a sequence alike."""
    slots = indices.reshape(rows, -1)
    if lengths is None:
        counts = torch.full((rows,), slots.shape[1], dtype=torch.int32, device=slots.device)
    else:
        counts = lengths if lengths.numel() == rows else lengths.repeat_interleave(queries)
        counts = counts.flatten().clamp(max=slots.shape[1]).to(torch.int32)
    return Selection(slots, counts)


def _attend(
    q: torch.Tensor, entries: torch.Tensor, selection: Selection, scale: float, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [rows, heads, 576], entries [tokens, 1, 576 or 656 bytes] -> ([rows, heads, 512], [rows, heads] float32)."""
    tile = MANY_HEADS_TILES[entries.dtype] if len(q) >= MANY_TOKENS and q.shape[1] > 16 else TILE
    out, lse = _outputs(q)
    sparse_attention_fwd(
        q, [(entries, selection)], out, scale=scale, tile=tile, num_sms=_num_sms(q.device), sinks=sinks, lse=lse
    )
    return out, _without_sinks(lse, sinks)


def _attend_v4(
    q: torch.Tensor,
    cache: torch.Tensor,
    selection: Selection,
    more_cache: torch.Tensor | None,
    more: Selection,
    scale: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_attend`, of one or two caches in V4's format."""
    out, lse = _outputs(q)
    rows, heads, _ = q.shape
    if rows == 0:
        return out, lse
    head_tiles = triton.cdiv(heads, V4_HEADS)
    selections = [selection] if more_cache is None else [selection, more]
    tiles = sum(triton.cdiv(each.slots.shape[1], V4_TOKENS) for each in selections)
    shares = num_shares(rows * head_tiles, tiles, _num_sms(q.device))
    part_lse = torch.empty((rows, shares, heads), dtype=torch.float32, device=q.device)
    part_o = torch.empty((*part_lse.shape, 512), dtype=torch.float32, device=q.device) if shares > 1 else part_lse
    second = cache if more_cache is None else more_cache
    has_sinks = sinks is not None
    _v4_kernel[(rows * shares * head_tiles,)](
        q, out, lse, sinks if has_sinks else lse, *_typed(cache), selection.slots, selection.counts,
        cache.stride(0) * cache.element_size(), *_typed(second), more.slots, more.counts,
        second.stride(0) * second.element_size(), part_o, part_lse, heads, head_tiles, shares, scale * LOG2E,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), selection.slots.stride(0), more.slots.stride(0),
        PAGE=cache.shape[1], MORE_PAGE=second.shape[1], HAS_MORE=more_cache is not None,
        HAS_SINKS=has_sinks and shares == 1, BLOCK_H=V4_HEADS, BLOCK_N=V4_TOKENS, num_warps=8, num_stages=1,
    )  # fmt: skip
    if shares > 1:
        merge_shares_kernel[(heads, rows, 512 // MERGE_COLS)](
            out, lse, sinks if has_sinks else lse, part_o, part_lse, shares, heads, out.stride(0), out.stride(1),
            RANK=512, COLS=MERGE_COLS, SHARES=max(MIN_SHARES, triton.next_power_of_2(shares)), HAS_SINKS=has_sinks,
            HAS_LSE=True, PDL=False, num_warps=4,
        )  # fmt: skip
    return out, _without_sinks(lse, sinks)


def _outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, _ = q.shape
    out = torch.empty((rows, heads, 512), dtype=q.dtype, device=q.device)
    return out, torch.empty((rows, heads), dtype=torch.float32, device=q.device)


def _without_sinks(lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """FlashMLA's log-sum-exp is that of the tokens alone."""
    return lse if sinks is None else lse + torch.log(-torch.expm1(sinks.float() - lse))


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _typed(cache: torch.Tensor) -> list[torch.Tensor]:
    """Pointers to the cache's first byte: a token has float8, 16-bit and ue8m0 numbers."""
    first = cache.view(torch.uint8).as_strided((16,), (1,))
    return [first.view(torch.float8_e4m3fn), first.view(torch.bfloat16), first]


def get_mla_metadata(cache_seqlens: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """A schedule of the shape that callers copy around; the kernels here need none."""
    if cache_seqlens is None:
        return None, None
    device = cache_seqlens.device
    return (
        torch.zeros((1, 8), dtype=torch.int32, device=device),
        torch.zeros((cache_seqlens.shape[0] + 1,), dtype=torch.int32, device=device),
    )


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise NotImplementedError(f"Sparse MLA attention on SM12x needs {what}.")
