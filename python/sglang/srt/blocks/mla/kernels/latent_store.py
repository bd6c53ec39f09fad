"""The work of latent attention on a token before it attends: norm of the latent, rotary embedding, and the store.

Reference: `reference.latent_norm_rope_store`. The rotary dims of the queries are rewritten in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.rope_store import FP8_MAX, heads_per_program


@triton.jit
def _stored(x, scale, FP8_LIMIT: tl.constexpr, dtype: tl.constexpr):
    """The value as the cache stores it: a model's 16 bits, or the quotient by the scale, saturating."""
    if FP8_LIMIT > 0.0:
        x = tl.minimum(tl.maximum(x.to(tl.float32) / scale, -FP8_LIMIT), FP8_LIMIT)
    return x.to(dtype)


@triton.jit(do_not_specialize=["num_absorbed"])
def latent_norm_rope_store_kernel(
    q,  # [T, H, NOPE + ROT]
    latent,  # [T, RANK + ROT]
    absorbed,  # [num_absorbed, H, RANK + ROT]
    normed,  # [T, RANK + ROT]
    positions,  # [T]
    cos_sin,  # [max_pos, ROT] fp32
    weight,  # [RANK]
    key_weight,  # [ROT]
    cache,  # [S, RANK + ROT]
    out_cache_loc,  # [T]
    num_absorbed,
    q_stride,
    q_head_stride,
    latent_stride,
    absorbed_stride,
    slot_stride,
    eps,
    scale,
    Q_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    ROT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8_LIMIT: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    KEY_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, block): block 0 the latent and its rotary key, the others HEADS query heads each."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, HALF_BLOCK)
    in_pair = pair < ROT // 2
    if INTERLEAVED:
        first_at = 2 * pair
        second_at = 2 * pair + 1
    else:
        first_at = pair
        second_at = pair + ROT // 2
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    cos_sin_row = cos_sin + tl.load(positions + token) * ROT
    cos = tl.load(cos_sin_row + pair, mask=in_pair, other=0.0)
    sin = tl.load(cos_sin_row + ROT // 2 + pair, mask=in_pair, other=0.0)
    if block == 0:
        dtype: tl.constexpr = normed.dtype.element_ty
        cache_dtype: tl.constexpr = cache.dtype.element_ty
        cols = tl.arange(0, RANK_BLOCK)
        inside = cols < RANK
        row = latent + token * latent_stride
        out = normed + token * (RANK + ROT)
        entry = cache + tl.load(out_cache_loc + token).to(tl.int64) * slot_stride
        values = tl.load(row + cols, mask=inside, other=0.0).to(tl.float32)
        norm_weight = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(values * values) / RANK + eps)
        values = (values * inverse * norm_weight).to(dtype)
        first = tl.load(row + RANK + first_at, mask=in_pair, other=0.0).to(tl.float32)
        second = tl.load(row + RANK + second_at, mask=in_pair, other=0.0).to(tl.float32)
        if KEY_NORM:
            inverse = tl.rsqrt((tl.sum(first * first) + tl.sum(second * second)) / ROT + eps)
            first *= inverse * tl.load(key_weight + first_at, mask=in_pair, other=0.0).to(tl.float32)
            second *= inverse * tl.load(key_weight + second_at, mask=in_pair, other=0.0).to(tl.float32)
        key_first = (first * cos - second * sin).to(dtype)
        key_second = (second * cos + first * sin).to(dtype)
        tl.store(out + cols, values, mask=inside)
        tl.store(out + RANK + first_at, key_first, mask=in_pair)
        tl.store(out + RANK + second_at, key_second, mask=in_pair)
        tl.store(entry + cols, _stored(values, scale, FP8_LIMIT, cache_dtype), mask=inside)
        tl.store(entry + RANK + first_at, _stored(key_first, scale, FP8_LIMIT, cache_dtype), mask=in_pair)
        tl.store(entry + RANK + second_at, _stored(key_second, scale, FP8_LIMIT, cache_dtype), mask=in_pair)
    else:
        q_dtype: tl.constexpr = q.dtype.element_ty
        head = ((block - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        mask = (head < Q_HEADS) & in_pair[None, :]
        heads = q + token * q_stride + head * q_head_stride + NOPE
        q_first = tl.load(heads + first_at[None, :], mask=mask, other=0.0).to(tl.float32)
        q_second = tl.load(heads + second_at[None, :], mask=mask, other=0.0).to(tl.float32)
        turned_first = (q_first * cos[None, :] - q_second * sin[None, :]).to(q_dtype)
        turned_second = (q_second * cos[None, :] + q_first * sin[None, :]).to(q_dtype)
        tl.store(heads + first_at[None, :], turned_first, mask=mask)
        tl.store(heads + second_at[None, :], turned_second, mask=mask)
        if token < num_absorbed:
            copies = absorbed + token * absorbed_stride + head * (RANK + ROT) + RANK
            tl.store(copies + first_at[None, :], turned_first, mask=mask)
            tl.store(copies + second_at[None, :], turned_second, mask=mask)


def launch_constants(rank: int, rot_dim: int, heads: int) -> dict[str, int]:
    """Block sizes and warps of `latent_norm_rope_store_kernel` for `heads` heads a program.

    No more threads than pairs: a pair held by two warps could be read by one after the other has rewritten it.
    """
    half_block = triton.next_power_of_2(rot_dim // 2)
    return {
        "HEADS": heads,
        "HALF_BLOCK": half_block,
        "RANK_BLOCK": triton.next_power_of_2(rank),
        "num_warps": max(1, min(4, heads * half_block // 32)),
    }


def latent_norm_rope_store(
    q: torch.Tensor,
    latent: torch.Tensor,
    absorbed: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cache: torch.Tensor,
    out_cache_loc: torch.Tensor,
    scale: float = 1.0,
    is_neox_style: bool = True,
    key_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, H, nope + rot], whose last rot dims are rewritten; latent [T, rank + rot] (rows may lie apart); absorbed
    [N <= T, H, rank + rot] contiguous, whose last rot dims become those of q's first N rows, or None; positions and
    out_cache_loc [T]; cos_sin [max_pos, rot] fp32; weight [rank]; key_weight [rot]: of a norm of the rotary key before
    it turns, or None; cache [slots, 1, rank + rot] with contiguous slots -> [T, rank + rot]: the normed latent and the
    rotated key, as they are before the cache's type.

    A cache of one-byte elements must be typed float8_e4m3fn or float8_e5m2: raw uint8 would not say how to convert.
    """
    if cache.element_size() == 1 and cache.dtype not in FP8_MAX:
        raise TypeError(f"the latent cache is {cache.dtype}; view it as float8_e4m3fn or float8_e5m2 first")
    num_tokens, num_heads, head_dim = q.shape
    rank, rot_dim = weight.shape[0], cos_sin.shape[1]
    heads = heads_per_program(num_tokens)
    normed = torch.empty((num_tokens, rank + rot_dim), dtype=q.dtype, device=q.device)
    if num_tokens:
        latent_norm_rope_store_kernel[(num_tokens, 1 + triton.cdiv(num_heads, heads))](
            q,
            latent,
            q if absorbed is None else absorbed,
            normed,
            positions,
            cos_sin,
            weight,
            weight if key_weight is None else key_weight,
            cache,
            out_cache_loc,
            0 if absorbed is None else absorbed.shape[0],
            q.stride(0),
            q.stride(1),
            latent.stride(0),
            num_heads * (rank + rot_dim),
            cache.stride(0),
            eps,
            scale,
            Q_HEADS=num_heads,
            NOPE=head_dim - rot_dim,
            RANK=rank,
            ROT=rot_dim,
            INTERLEAVED=not is_neox_style,
            FP8_LIMIT=FP8_MAX.get(cache.dtype, 0.0),
            KEY_NORM=key_weight is not None,
            **launch_constants(rank, rot_dim, heads),
            **pdl.options(),
        )
    return normed
