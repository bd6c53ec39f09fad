"""Head norms, rotary embedding and the store of keys and values into the pool, in one launch.

Reference: `blocks.gqa.reference.qk_norm_rope_store`. Queries and keys are rewritten inside `qkv`; q, k, v are views
of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.fp4_rows import group_block, store_fp4

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@triton.jit
def _to_cache(x, scale, FP8_LIMIT: tl.constexpr, cache):
    if FP8_LIMIT > 0.0:
        x = tl.minimum(tl.maximum(x / scale, -FP8_LIMIT), FP8_LIMIT)
    return x.to(cache.dtype.element_ty)


@triton.jit
def _rotated_head(
    heads,  # pointers [HEADS, 1] to element 0 of each head
    inside,  # [HEADS, 1]
    weight,
    cos_sin_row,
    eps,
    cache_heads,  # pointers [HEADS, 1] into the cache
    scale,
    cache,
    NORM: tl.constexpr,
    STORE: tl.constexpr,
    DIM: tl.constexpr,
    ROT: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8_LIMIT: tl.constexpr,
):
    """A head as three parts: the two members of each rotating pair, and the dims from ROT on that pass unchanged. The
    members are loaded apart, so that no element has to change its thread."""
    dtype = heads.dtype.element_ty
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    in_pair = pair < ROT // 2
    if INTERLEAVED:
        first_at = 2 * pair
        second_at = 2 * pair + 1
    else:
        first_at = pair
        second_at = pair + ROT // 2
    rest_at = ROT + tl.arange(0, REST_BLOCK)[None, :]
    in_rest = rest_at < DIM

    cos = tl.load(cos_sin_row + pair, mask=in_pair, other=0.0)
    sin = tl.load(cos_sin_row + ROT // 2 + pair, mask=in_pair, other=0.0)
    first = tl.load(heads + first_at, mask=inside & in_pair, other=0.0).to(tl.float32)
    second = tl.load(heads + second_at, mask=inside & in_pair, other=0.0).to(tl.float32)
    if DIM > ROT:
        rest = tl.load(heads + rest_at, mask=inside & in_rest, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first + second * second, axis=1)
        if DIM > ROT:
            squares += tl.sum(rest * rest, axis=1)
        inverse = tl.rsqrt(squares / DIM + eps)[:, None]
        first_weight = tl.load(weight + first_at, mask=in_pair, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + second_at, mask=in_pair, other=0.0).to(tl.float32)
        # Rounded as a separate norm would leave it.
        first = (first * inverse * first_weight).to(dtype).to(tl.float32)
        second = (second * inverse * second_weight).to(dtype).to(tl.float32)
        if DIM > ROT:
            rest_weight = tl.load(weight + rest_at, mask=in_rest, other=0.0).to(tl.float32)
            rest = (rest * inverse * rest_weight).to(dtype).to(tl.float32)
    turned_first = (first * cos - second * sin).to(dtype)
    turned_second = (second * cos + first * sin).to(dtype)
    tl.store(heads + first_at, turned_first, mask=inside & in_pair)
    tl.store(heads + second_at, turned_second, mask=inside & in_pair)
    if DIM > ROT and NORM:
        tl.store(heads + rest_at, rest.to(dtype), mask=inside & in_rest)
    if STORE:
        stored_first = _to_cache(turned_first.to(tl.float32), scale, FP8_LIMIT, cache)
        stored_second = _to_cache(turned_second.to(tl.float32), scale, FP8_LIMIT, cache)
        tl.store(cache_heads + first_at, stored_first, mask=inside & in_pair)
        tl.store(cache_heads + second_at, stored_second, mask=inside & in_pair)
        if DIM > ROT:
            tl.store(cache_heads + rest_at, _to_cache(rest, scale, FP8_LIMIT, cache), mask=inside & in_rest)


@triton.jit
def qk_norm_rope_store_kernel(
    qkv,  # [T, (Hq + 2 Hkv) D]
    positions,  # [T]
    cos_sin,  # [max_pos, ROT] fp32
    q_weight,
    k_weight,
    k_cache,  # [S, Hkv, D]
    v_cache,
    out_cache_loc,  # [T]
    row_stride,
    k_slot_stride,
    v_slot_stride,
    eps,
    k_scale,
    v_scale,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROT: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8_LIMIT: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, block): HEADS heads of q, then of k, then of v."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    KV_BLOCKS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    qkv += token * row_stride
    lane = tl.arange(0, HEADS)[:, None]
    if block < Q_BLOCKS:
        cos_sin_row = cos_sin + tl.load(positions + token) * ROT
        head = block * HEADS + lane
        heads = qkv + head * DIM
        _rotated_head(
            heads, head < Q_HEADS, q_weight, cos_sin_row, eps, heads, 1.0, k_cache,
            NORM_Q, False, DIM, ROT, HALF_BLOCK, REST_BLOCK, INTERLEAVED, FP8_LIMIT,
        )  # fmt: skip
    elif block < Q_BLOCKS + KV_BLOCKS:
        cos_sin_row = cos_sin + tl.load(positions + token) * ROT
        slot = tl.load(out_cache_loc + token).to(tl.int64)
        head = (block - Q_BLOCKS) * HEADS + lane
        heads = qkv + (Q_HEADS + head) * DIM
        cache_heads = k_cache + slot * k_slot_stride + head * DIM
        _rotated_head(
            heads, head < KV_HEADS, k_weight, cos_sin_row, eps, cache_heads, k_scale, k_cache,
            NORM_K, True, DIM, ROT, HALF_BLOCK, REST_BLOCK, INTERLEAVED, FP8_LIMIT,
        )  # fmt: skip
    else:
        slot = tl.load(out_cache_loc + token).to(tl.int64)
        head = (block - Q_BLOCKS - KV_BLOCKS) * HEADS + lane
        dim = tl.arange(0, DIM_BLOCK)[None, :]
        inside = (head < KV_HEADS) & (dim < DIM)
        value = tl.load(qkv + (Q_HEADS + KV_HEADS + head) * DIM + dim, mask=inside, other=0.0).to(tl.float32)
        value = _to_cache(value, v_scale, FP8_LIMIT, v_cache)
        tl.store(v_cache + slot * v_slot_stride + head * DIM + dim, value, mask=inside)


@triton.jit(do_not_specialize=["k_scales_stride", "v_scales_stride"])
def qk_norm_rope_store_fp4_kernel(
    qkv,  # [T, (Hq + 2 Hkv) D]
    positions,  # [T]
    cos_sin,  # [max_pos, ROT] fp32
    q_weight,
    k_weight,
    k_codes,  # [S, Hkv, D / 2] uint8
    k_scales,  # [S, Hkv, D / 16] uint8
    v_codes,
    v_scales,
    out_cache_loc,  # [T]
    row_stride,
    k_codes_stride,
    k_scales_stride,
    v_codes_stride,
    v_scales_stride,
    eps,
    k_scale,
    v_scale,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROT: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `qk_norm_rope_store_kernel`, into a cache of four-bit rows (`fp4_rows`). Groups of a row do not follow the
    pairs that rotate: keys are rewritten in `qkv` first, and quantized from there."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    KV_BLOCKS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    qkv += token * row_stride
    lane = tl.arange(0, HEADS)[:, None]
    if block < Q_BLOCKS:
        cos_sin_row = cos_sin + tl.load(positions + token) * ROT
        head = block * HEADS + lane
        heads = qkv + head * DIM
        _rotated_head(
            heads, head < Q_HEADS, q_weight, cos_sin_row, eps, heads, 1.0, k_codes,
            NORM_Q, False, DIM, ROT, HALF_BLOCK, REST_BLOCK, INTERLEAVED, 0.0,
        )  # fmt: skip
    elif block < Q_BLOCKS + KV_BLOCKS:
        cos_sin_row = cos_sin + tl.load(positions + token) * ROT
        slot = tl.load(out_cache_loc + token).to(tl.int64)
        head = (block - Q_BLOCKS) * HEADS + lane
        heads = qkv + (Q_HEADS + head) * DIM
        _rotated_head(
            heads, head < KV_HEADS, k_weight, cos_sin_row, eps, heads, 1.0, k_codes,
            NORM_K, False, DIM, ROT, HALF_BLOCK, REST_BLOCK, INTERLEAVED, 0.0,
        )  # fmt: skip
        tl.debug_barrier()  # threads read what others have rotated
        codes = k_codes + slot * k_codes_stride + head * (DIM // 2)
        scales = k_scales + slot * k_scales_stride + head * (DIM // 16)
        store_fp4(heads, head < KV_HEADS, codes, scales, k_scale, HEADS, DIM, GROUP_BLOCK)
    else:
        slot = tl.load(out_cache_loc + token).to(tl.int64)
        head = (block - Q_BLOCKS - KV_BLOCKS) * HEADS + lane
        heads = qkv + (Q_HEADS + KV_HEADS + head) * DIM
        codes = v_codes + slot * v_codes_stride + head * (DIM // 2)
        scales = v_scales + slot * v_scales_stride + head * (DIM // 16)
        store_fp4(heads, head < KV_HEADS, codes, scales, v_scale, HEADS, DIM, GROUP_BLOCK)


def heads_per_program(num_tokens: int) -> int:
    """Returns one head per program for few tokens, for parallelism; more for many tokens, for less launch work per
    byte."""
    return 1 if num_tokens <= 32 else 4 if num_tokens <= 256 else 8


def launch_constants(head_dim: int, rot_dim: int, heads: int) -> dict[str, int]:
    """Block sizes and warps of `qk_norm_rope_store_kernel` for `heads` heads a program.

    No more threads than pairs: a pair held by two warps could be read by one after the other has rewritten it.
    """
    half_block = triton.next_power_of_2(rot_dim // 2)
    return {
        "HEADS": heads,
        "HALF_BLOCK": half_block,
        "REST_BLOCK": triton.next_power_of_2(max(1, head_dim - rot_dim)),
        "DIM_BLOCK": triton.next_power_of_2(head_dim),
        "num_warps": max(1, min(heads * triton.next_power_of_2(head_dim) // 512, heads * half_block // 32)),
    }


def fp4_constants(head_dim: int, rot_dim: int, heads: int) -> dict[str, int]:
    """Returns block sizes and warps of `qk_norm_rope_store_fp4_kernel`."""
    constants = launch_constants(head_dim, rot_dim, heads)
    del constants["DIM_BLOCK"]
    return constants | {"GROUP_BLOCK": group_block(head_dim)}


def qk_norm_rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    out_cache_loc: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    is_neox_style: bool = True,
    k_group_scales: torch.Tensor | None = None,
    v_group_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv [T, (Hq + 2 Hkv) D], overwritten; positions, out_cache_loc [T]; cos_sin [max_pos, rot_dim] fp32; weights [D];
    caches [slots, Hkv, D] with contiguous slots -> views q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D] of qkv. Without
    v_cache there is no v in qkv, and that of the result has no elements.

    A cache of one-byte elements must be typed float8_e4m3fn or float8_e5m2: raw uint8 would not say how to convert.
    With group scales [slots, Hkv, D / 16] uint8 the caches are codes [slots, Hkv, D / 2] uint8, as `fp4_rows` says.
    """
    if k_group_scales is not None and v_cache is not None and v_group_scales is not None:
        _store_fp4_rows(
            qkv, positions, cos_sin, q_weight, k_weight, eps, num_heads, num_kv_heads, head_dim, k_cache, v_cache,
            out_cache_loc, k_scale, v_scale, is_neox_style, k_group_scales, v_group_scales,
        )  # fmt: skip
        return _views(qkv, num_heads, num_kv_heads, head_dim, head_dim)
    if k_cache.element_size() == 1 and k_cache.dtype not in FP8_MAX:
        raise TypeError(f"the KV cache is {k_cache.dtype}; view it as float8_e4m3fn or float8_e5m2 first")
    num_tokens, rot_dim = qkv.shape[0], cos_sin.shape[1]
    heads = heads_per_program(num_tokens)
    blocks = triton.cdiv(num_heads, heads) + (1 if v_cache is None else 2) * triton.cdiv(num_kv_heads, heads)
    values = k_cache if v_cache is None else v_cache  # programs of values come last
    if num_tokens:
        qk_norm_rope_store_kernel[(num_tokens, blocks)](
            qkv,
            positions,
            cos_sin,
            cos_sin if q_weight is None else q_weight,
            cos_sin if k_weight is None else k_weight,
            k_cache,
            values,
            out_cache_loc,
            qkv.stride(0),
            k_cache.stride(0),
            values.stride(0),
            eps,
            k_scale,
            v_scale,
            Q_HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            DIM=head_dim,
            ROT=rot_dim,
            NORM_Q=q_weight is not None,
            NORM_K=k_weight is not None,
            INTERLEAVED=not is_neox_style,
            FP8_LIMIT=FP8_MAX.get(k_cache.dtype, 0.0),
            **launch_constants(head_dim, rot_dim, heads),
            **pdl.options(),
        )
    return _views(qkv, num_heads, num_kv_heads, head_dim, 0 if v_cache is None else head_dim)


def _views(
    qkv: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int, v_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = qkv.split([num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * v_dim], dim=-1)
    return (
        q.unflatten(-1, (num_heads, head_dim)),
        k.unflatten(-1, (num_kv_heads, head_dim)),
        v.unflatten(-1, (num_kv_heads, v_dim)),
    )


def _store_fp4_rows(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    k_codes: torch.Tensor,
    v_codes: torch.Tensor,
    out_cache_loc: torch.Tensor,
    k_scale: float,
    v_scale: float,
    is_neox_style: bool,
    k_group_scales: torch.Tensor,
    v_group_scales: torch.Tensor,
) -> None:
    num_tokens, rot_dim = qkv.shape[0], cos_sin.shape[1]
    heads = heads_per_program(num_tokens)
    blocks = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    if num_tokens:
        qk_norm_rope_store_fp4_kernel[(num_tokens, blocks)](
            qkv,
            positions,
            cos_sin,
            cos_sin if q_weight is None else q_weight,
            cos_sin if k_weight is None else k_weight,
            k_codes,
            k_group_scales,
            v_codes,
            v_group_scales,
            out_cache_loc,
            qkv.stride(0),
            k_codes.stride(0),
            k_group_scales.stride(0),
            v_codes.stride(0),
            v_group_scales.stride(0),
            eps,
            k_scale,
            v_scale,
            Q_HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            DIM=head_dim,
            ROT=rot_dim,
            NORM_Q=q_weight is not None,
            NORM_K=k_weight is not None,
            INTERLEAVED=not is_neox_style,
            **fp4_constants(head_dim, rot_dim, heads),
            **pdl.options(),
        )
