"""Ops of compressed attention in plain torch: the CPU kernels, and the reference for tests.

Math is done in fp32, or in fp64 for fp64 inputs. Source: DeepSeek-V4's report, sections 2.3.1 and 2.3.2.
"""

from __future__ import annotations

import torch

from sglang.srt.blocks.compressed.compressor_kernels import CompressorKernels
from sglang.srt.kernels.op import Op
from sglang.srt.layers.native_ops import apply_rope, rmsnorm, store_cache


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def tail_rotation(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, inverse: bool = False
) -> torch.Tensor:
    """Applies RoPE to the last dims of every head of x [T, H, D] in place and returns x; neighbouring dims rotate
    together. `inverse` rotates back. positions [T], cos_sin [max_pos, rot_dim] fp32."""
    rot_dim = cos_sin.shape[1]
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    tail = x[..., -rot_dim:]
    tail.copy_(apply_rope(tail, cos, -sin if inverse else sin, is_neox_style=False))
    return x


def shared_kv_norm_rope_store(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cache: torch.Tensor,
    out_cache_loc: torch.Tensor,
) -> torch.Tensor:
    """Normalizes every query head without a weight, normalizes the vector that is key and value, applies RoPE to the
    last dims of both, and stores the latter.

    q [T, H, D], rewritten; kv [T, D]; positions and out_cache_loc [T]; cos_sin [max_pos, rot_dim] fp32; weight [D];
    cache [slots, 1, D] -> q.
    """
    normed = _wide(q) * torch.rsqrt(_wide(q).square().mean(-1, keepdim=True) + eps)
    q.copy_(normed)
    tail_rotation(q, positions, cos_sin)
    entries = tail_rotation(rmsnorm(kv, weight, eps)[:, None].clone(), positions, cos_sin)
    store_cache(cache, entries, out_cache_loc, 1.0)
    return q


def compress(
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    firsts: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor | None,
    cache: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *,
    angles: int = 0,
) -> None:
    """Stores an entry for each new token that completes a run of `rate` tokens.

    rows [T, 2, W] fp32: values and gates of the new tokens; state [requests, R, 2, W] fp32: those of the last R tokens
    of each request, of position p at p % R; slots, positions, firsts [T]: of `TokenRequests`; bias [rate, W] fp32 is
    added to the gates by place in the run; weight [D]; cache [entries, 1, D]; out_cache_loc [T]: of the tokens, whose
    entry is at their slot // rate.

    An entry is the sum over its tokens of softmax(gates) * values, channel by channel, then normalized (with weight)
    and rotated at the position of the run's first token (with cos_sin). With W = D it uses its own run, R = rate. With
    W = 2 D runs overlap, R = 2 rate: an entry uses the first D channels of the previous run (nothing before the first
    run) and the last D of its own.

    Without a bias an entry is the mean of its run's values. Then tokens have no gates: in their place a row holds
    `angles` cosines and sines for rotating the entry of a run that begins with this token, and cos_sin is None.
    """
    size, dim = state.shape[1], cache.shape[-1]
    rate = size if bias is None else len(bias)
    ends = ((positions + 1) % rate == 0).nonzero()[:, 0]
    if not len(ends):
        return
    position = positions[ends, None] + torch.arange(1 - size, 1, device=rows.device)  # [E, R]
    is_new = position >= firsts[ends, None]
    token = (ends[:, None] - positions[ends, None] + position).clamp(min=0)
    kept = state[slots[ends, None], position % size]
    values, gates = torch.where(is_new[..., None, None], rows[token], kept).unbind(2)  # [E, R, W]
    if bias is None:
        assert weight is not None, "means are normed"
        entries = rmsnorm(values.mean(1), weight, eps)
        cos_sin = gates[:, 0, :angles]
        tail_rotation(entries[:, None], torch.arange(len(entries), device=rows.device), cos_sin)
        store_cache(cache, entries[:, None], out_cache_loc[ends] // rate, 1.0)
        return
    gates = gates + bias.repeat(size // rate, 1)
    if rows.shape[2] != dim:
        before, current = values[:, :rate, :dim], values[:, rate:, dim:]
        values = torch.cat((before, current), dim=1)
        gates = torch.cat((gates[:, :rate, :dim], gates[:, rate:, dim:]), dim=1)
    gates = gates.masked_fill((position < 0)[..., None], float("-inf"))
    values = values.masked_fill((position < 0)[..., None], 0.0)
    entries = (gates.softmax(dim=1) * values).sum(1)
    if weight is not None and cos_sin is not None:
        entries = rmsnorm(entries, weight, eps)
        tail_rotation(entries[:, None], positions[ends] + 1 - rate, cos_sin)
    store_cache(cache, entries[:, None], out_cache_loc[ends] // rate, 1.0)


def keep(
    rows: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, stops: torch.Tensor
) -> None:
    """Keeps the new tokens' rows that later entries need in `state` (as in `compress`): those of the last R positions
    before `stops` [T]; tokens from there on were rejected."""
    size = state.shape[1]
    kept = (positions >= stops - size) & (positions < stops)
    state[torch.where(kept, slots, 0), positions % size] = rows  # slot 0 is padding


KV_COMPRESSOR = CompressorKernels(compress, keep)

KV_COMPRESSOR_OP = Op("kv_compressor", KV_COMPRESSOR)
TAIL_ROTATION = Op("tail_rotation", tail_rotation)
SHARED_KV_NORM_ROPE_STORE = Op("shared_kv_norm_rope_store", shared_kv_norm_rope_store)
