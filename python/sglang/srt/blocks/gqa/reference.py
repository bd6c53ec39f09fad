"""Ops of grouped-query attention in plain torch: the CPU kernels, and the reference for tests.

Math is done in fp32 and cast back to the input's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang.srt.kernels.op import Op
from sglang.srt.layers.last_rows import wide
from sglang.srt.layers.native_ops import apply_rope, rmsnorm, store_cache


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
    """Normalizes each q and k head (if weights are given), applies RoPE, and stores k and v into the cache.

    qkv [T, (Hq + Hkv) D + Hkv Dv], positions and out_cache_loc [T], cos_sin [max_pos, rot_dim] fp32 (cosines, then
    sines), weights [D], caches [slots, Hkv, D] and [slots, Hkv, Dv] -> q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv].
    Without v_cache there is no v, neither in qkv nor in what is returned (Dv 0). With group scales
    [slots, Hkv, D / 16] and [slots, Hkv, Dv / 16] the caches are codes [slots, Hkv, D / 2] and [slots, Hkv, Dv / 2].
    """
    v_head_dim = 0 if v_cache is None else v_cache.shape[-1] * (1 if v_group_scales is None else 2)
    parts = qkv.split([num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * v_head_dim], dim=-1)
    q, k, v = (
        part.unflatten(-1, (heads, dim))
        for part, heads, dim in zip(
            parts, (num_heads, num_kv_heads, num_kv_heads), (head_dim, head_dim, v_head_dim), strict=True
        )
    )
    if q_weight is not None:
        q = rmsnorm(q, q_weight, eps)
    if k_weight is not None:
        k = rmsnorm(k, k_weight, eps)
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    q = apply_rope(q, cos, sin, is_neox_style).to(qkv.dtype)
    k = apply_rope(k, cos, sin, is_neox_style).to(qkv.dtype)
    store_cache(k_cache, k, out_cache_loc, k_scale, k_group_scales)
    if v_cache is not None:
        store_cache(v_cache, v, out_cache_loc, v_scale, v_group_scales)
    return q, k, v


def q_norm_rope(
    q: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Returns q [T, Hq, D] with each head normalized and rotated, for layers that reuse another layer's keys. positions
    [T], cos_sin [max_pos, rot_dim] fp32, weight [D]."""
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    return apply_rope(rmsnorm(q, weight, eps), cos, sin, is_neox_style=True).to(q.dtype)


def qk_whole_norm(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    totals: tuple[int, int],
    k_copies: int = 1,
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Normalizes all q heads together and all k heads together, in place. qkv [T, Q + K + V], weights [Q] and [K].
    `totals`: elements of q and k on all ranks, over which `reduce` sums; `k_copies` ranks hold the same k."""
    num_q, num_k = q_weight.shape[0], k_weight.shape[0]
    q, k = qkv[:, :num_q], qkv[:, num_q : num_q + num_k]
    sums = torch.stack((q.float().square().sum(-1), k.float().square().sum(-1) / k_copies), dim=-1)
    if reduce is not None:
        sums = reduce(sums)
    for part, weight, total, squares in zip((q, k), (q_weight, k_weight), totals, sums.unbind(-1), strict=True):
        part.copy_(part.float() * torch.rsqrt(squares / total + eps)[:, None] * weight.float())


def value_norm(
    qkv: torch.Tensor, num_kv_heads: int, head_dim: int, eps: float, from_keys: bool = False
) -> torch.Tensor:
    """Normalizes each head of v without weights, in place, and returns qkv [T, (Hq + 2 Hkv) D]. With `from_keys` qkv is
    [T, (Hq + Hkv) D], and values that are the normalized keys are appended. Source: Gemma 4."""
    width = num_kv_heads * head_dim
    values = qkv[:, -width:].unflatten(-1, (num_kv_heads, head_dim)).float()
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    if from_keys:
        return torch.cat((qkv, normed.flatten(1).to(qkv.dtype)), dim=-1)
    qkv[:, -width:] = normed.flatten(1)
    return qkv


def attention_output_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Returns x * sigmoid(gate); x, gate [T, Hq * D]."""
    return (wide(x) * wide(gate).sigmoid()).to(x.dtype)


def attention_head_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Returns x [T, Hq * D] with each head times the sigmoid of its gate [T, Hq]."""
    heads = wide(x).unflatten(1, (gate.shape[1], -1))
    return (heads * wide(gate).sigmoid()[..., None]).flatten(1).to(x.dtype)


QK_NORM_ROPE_STORE = Op("qk_norm_rope_store", qk_norm_rope_store)
Q_NORM_ROPE = Op("q_norm_rope", q_norm_rope)
QK_WHOLE_NORM = Op("qk_whole_norm", qk_whole_norm)
VALUE_NORM = Op("value_norm", value_norm)
ATTENTION_OUTPUT_GATE = Op("attention_output_gate", attention_output_gate)
ATTENTION_HEAD_GATE = Op("attention_head_gate", attention_head_gate)
