# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention in Triton for SM12x, with the names, arguments and results of FlashMLA.

Every query attends to the cached tokens that its `indices` name (-1: none); all heads share one latent key whose
first columns are the value. A program takes 16 heads of a query and a part of its tokens; a second kernel joins the
parts, a second cache and the attention sink. Nothing waits for the device, so CUDA graphs can capture all of it.

A token in the cache is one of
  BF16    576 bfloat16: 512 latent, 64 rotary; the value is the latent
  V32     656 bytes: 512 float8_e4m3fn, 4 float32 scales (a scale for 128), 64 bfloat16; the value is the latent
  V4      448 float8_e4m3fn and 64 bfloat16 side by side, and at the end of the page 8 bytes of ue8m0 scales (one for
          64 values, the last byte unused); key and value are all 512
"""

from typing import Any

import torch
import triton
import triton.language as tl

BF16, V32, V4 = 0, 1, 2
_HEADS = 16
_TOKENS = 32
_MAX_PARTIAL_ROWS = 1024
"""Queries whose parts are in memory at a time."""


@triton.jit
def _load_key(
    Cache8, Cache16, Cache32, token, valid, page_bytes, FORMAT: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """[BLOCK_N, 512] and [BLOCK_N, 64] bfloat16; V4 has its rotary part in the first and nothing in the second."""
    offs = tl.arange(0, 512)
    rope = tl.arange(0, 64)
    keep = valid[:, None]
    if FORMAT == 0:
        base = token * 576
        latent = tl.load(Cache16 + base[:, None] + offs[None, :], mask=keep, other=0.0)
        rotary = tl.load(Cache16 + base[:, None] + 512 + rope[None, :], mask=keep, other=0.0)
    elif FORMAT == 1:
        base = token * 656
        values = tl.load(Cache8 + base[:, None] + offs[None, :], mask=keep, other=0.0)
        scales = tl.load(Cache32 + base[:, None] // 4 + 128 + tl.arange(0, 4)[None, :], mask=keep, other=0.0)
        groups = tl.reshape(values.to(tl.float32), (BLOCK_N, 4, 128)) * scales[:, :, None]
        latent = tl.reshape(groups, (BLOCK_N, 512)).to(tl.bfloat16)
        rotary = tl.load(Cache16 + base[:, None] // 2 + 264 + rope[None, :], mask=keep, other=0.0)
    else:
        page = (token // PAGE) * page_bytes
        base = page + (token % PAGE) * 576
        is_latent = offs[None, :] < 448
        values = tl.load(Cache8 + base[:, None] + offs[None, :], mask=keep & is_latent, other=0.0)
        at = page + PAGE * 576 + (token % PAGE) * 8
        exponents = tl.load(Cache32 + at[:, None] + tl.arange(0, 8)[None, :], mask=keep, other=0)
        scales = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        groups = tl.reshape(values.to(tl.float32), (BLOCK_N, 8, 64)) * scales[:, :, None]
        plain = tl.load(
            Cache16 + base[:, None] // 2 + offs[None, :] - 224, mask=keep & (offs[None, :] >= 448), other=0.0
        )
        latent = tl.where(is_latent, tl.reshape(groups, (BLOCK_N, 512)).to(tl.bfloat16), plain)
        rotary = plain  # not used
    return latent, rotary


@triton.jit
def _part_kernel(
    Q,
    Cache8,
    Cache16,
    Cache32,
    Indices,
    Lengths,
    Out,
    Lse,
    sm_scale,
    num_heads,
    num_indices,
    page_bytes,
    stride_q_row,
    stride_q_head,
    stride_i_row,
    stride_o_row,
    stride_o_slot,
    stride_l_row,
    stride_l_slot,
    first_slot,
    FORMAT: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attention of a query's BLOCK_H heads over one of SPLITS runs of its indices, normalized, and its log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    has_head = heads < num_heads
    offs = tl.arange(0, 512)
    rope = tl.arange(0, 64)
    q_row = Q + row * stride_q_row + heads[:, None] * stride_q_head
    q = tl.load(q_row + offs[None, :], mask=has_head[:, None], other=0.0)
    if FORMAT != 2:
        q_rope = tl.load(q_row + 512 + rope[None, :], mask=has_head[:, None], other=0.0)

    length = num_indices
    if HAS_LENGTHS:
        length = tl.minimum(tl.load(Lengths + row), num_indices)
    run = tl.cdiv(tl.cdiv(num_indices, SPLITS), BLOCK_N) * BLOCK_N
    begin = split * run
    end = tl.minimum(begin + run, length)

    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, 512), tl.float32)
    for start in range(begin, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        token = tl.load(Indices + row * stride_i_row + position, mask=position < end, other=-1).to(tl.int64)
        valid = token >= 0
        latent, rotary = _load_key(
            Cache8, Cache16, Cache32, tl.maximum(token, 0), valid, page_bytes, FORMAT, PAGE, BLOCK_N
        )
        scores = tl.dot(q, tl.trans(latent))
        if FORMAT != 2:
            scores += tl.dot(q_rope, tl.trans(rotary))
        scores = tl.where(valid[None, :], scores * sm_scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp(top - safe_top)
        weights = tl.exp(scores - safe_top[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(tl.bfloat16), latent)
        top = new_top

    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    slot = first_slot + split
    out = Out + row * stride_o_row + slot * stride_o_slot + heads[:, None] * 512 + offs[None, :]
    tl.store(out, acc.to(Out.dtype.element_ty), mask=has_head[:, None])
    lse = tl.where(total > 0.0, top + tl.log(tl.where(total > 0.0, total, 1.0)), float("-inf"))
    tl.store(Lse + row * stride_l_row + slot * stride_l_slot + heads, lse, mask=has_head)


@triton.jit
def _join_kernel(
    Parts,
    PartLse,
    Sink,
    Out,
    Lse,
    stride_p_row,
    stride_p_slot,
    stride_l_row,
    stride_l_slot,
    stride_o_row,
    stride_lse_row,
    HAS_SINK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The parts of one query and head, weighted by their log-sum-exps; the sink adds to the denominator only."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    offs = tl.arange(0, 512)
    top = -float("inf")
    for slot in range(SLOTS):
        top = tl.maximum(top, tl.load(PartLse + row * stride_l_row + slot * stride_l_slot + head))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    acc = tl.zeros((512,), tl.float32)
    for slot in range(SLOTS):
        weight = tl.exp(tl.load(PartLse + row * stride_l_row + slot * stride_l_slot + head) - base)
        total += weight
        acc += weight * tl.load(Parts + row * stride_p_row + slot * stride_p_slot + head * 512 + offs)
    tl.store(
        Lse + row * stride_lse_row + head, tl.where(total > 0.0, base + tl.log(tl.maximum(total, 1e-38)), float("-inf"))
    )
    if HAS_SINK:
        total += tl.exp(tl.load(Sink + head).to(tl.float32) - base)
    tl.store(
        Out + row * stride_o_row + head * 512 + offs, (acc / tl.where(total > 0.0, total, 1.0)).to(Out.dtype.element_ty)
    )


def _attend(
    q: torch.Tensor, caches: list, sm_scale: float, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [rows, heads, 576 or 512] bfloat16 -> ([rows, heads, 512] like q, [rows, heads] float32 log-sum-exp).

    caches: (bytes, format, page size, bytes of a page, indices [rows, n] int32, lengths [rows] or None) for each cache.
    """
    rows, heads, _ = q.shape
    out = torch.empty((rows, heads, 512), dtype=q.dtype, device=q.device)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
    if rows == 0:
        return out, lse
    head_blocks = triton.cdiv(heads, _HEADS)
    splits = [_splits(min(rows, _MAX_PARTIAL_ROWS) * head_blocks, cache[4].shape[-1], q.device) for cache in caches]
    slots = sum(splits)
    if slots == 1 and sink is None:
        _run_parts(q, caches[0], sm_scale, out.unsqueeze(1), lse.unsqueeze(1), 0, 1)
        return out, lse
    step = min(rows, _MAX_PARTIAL_ROWS)
    parts = torch.empty((step, slots, heads, 512), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((step, slots, heads), dtype=torch.float32, device=q.device)
    for start in range(0, rows, step):
        some = slice(start, min(start + step, rows))
        slot = 0
        for cache, count in zip(caches, splits, strict=True):
            indices, lengths = cache[4][some], None if cache[5] is None else cache[5][some]
            _run_parts(q[some], (*cache[:4], indices, lengths), sm_scale, parts, part_lse, slot, count)
            slot += count
        _join_kernel[(some.stop - start, heads)](
            parts,
            part_lse,
            part_lse if sink is None else sink,
            out[some],
            lse[some],
            parts.stride(0),
            parts.stride(1),
            part_lse.stride(0),
            part_lse.stride(1),
            out.stride(0),
            lse.stride(0),
            HAS_SINK=sink is not None,
            SLOTS=slots,
            num_warps=4,
        )
    return out, lse


def _run_parts(
    q: torch.Tensor, cache: tuple, sm_scale: float, out: torch.Tensor, lse: torch.Tensor, slot: int, splits: int
) -> None:
    memory, layout, page, page_bytes, indices, lengths = cache
    scales = torch.uint8 if layout == V4 else torch.float32
    _part_kernel[(q.shape[0], triton.cdiv(q.shape[1], _HEADS), splits)](
        q,
        _same_memory(memory, torch.float8_e4m3fn),
        _same_memory(memory, torch.bfloat16),
        _same_memory(memory, scales),
        indices,
        indices if lengths is None else lengths,
        out,
        lse,
        sm_scale,
        q.shape[1],
        indices.shape[-1],
        page_bytes,
        q.stride(0),
        q.stride(1),
        indices.stride(0),
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        lse.stride(1),
        slot,
        FORMAT=layout,
        PAGE=page,
        HAS_LENGTHS=lengths is not None,
        SPLITS=splits,
        BLOCK_H=_HEADS,
        BLOCK_N=_TOKENS,
        num_warps=8,
        num_stages=1,
    )


def _splits(programs: int, num_indices: int, device: torch.device) -> int:
    """A power of two of parts: enough for two programs a multiprocessor, and at least 64 indices each."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    wanted = max(1, min(triton.cdiv(2 * sms, programs), num_indices // 64))
    return 1 << (wanted.bit_length() - 1)


def _same_memory(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A pointer to the tensor's first byte, typed: the bytes of one token have several types."""
    return tensor.view(torch.uint8).as_strided((16,), (1,)).view(dtype)


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
    cache = (kv.contiguous(), BF16, 1, 0, indices.reshape(q.shape[0], -1), topk_length)
    out, lse = _attend(q.contiguous(), [cache], sm_scale, attn_sink)
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
    caches = [_cache(k_cache, head_dim, indices, topk_length, rows, queries)]
    if extra_k_cache is not None:
        caches.append(_cache(extra_k_cache, head_dim, extra_indices_in_kvcache, extra_topk_length, rows, queries))
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out, lse = _attend(q.reshape(rows, heads, head_dim), caches, scale, attn_sink)
    return out.view(batch, queries, heads, 512), lse.view(batch, queries, heads).transpose(1, 2)


def _cache(
    k_cache: torch.Tensor,
    head_dim: int,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    rows: int,
    queries: int,
) -> tuple:
    token_bytes = k_cache.shape[-1] * k_cache.element_size()
    layout = {(576, 656): V32, (512, 584): V4}.get((head_dim, token_bytes))
    _require(layout is not None, f"a known cache format, not {token_bytes} bytes a token with head dim {head_dim}")
    if layout == V32:
        k_cache = k_cache.contiguous()
    if lengths is not None and lengths.numel() != rows:
        lengths = lengths.repeat_interleave(queries)
    return (
        k_cache,
        layout,
        k_cache.shape[1],
        k_cache.stride(0) * k_cache.element_size(),
        indices.reshape(rows, -1),
        lengths,
    )


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
