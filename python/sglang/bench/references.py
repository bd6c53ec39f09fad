"""The results that launches of `device_calls` must have: each op's reference in plain torch, for some rows.

Bounds are those that the kernels' tests state, of the norm of the difference over the norm. Each function returns a
check: it takes the kernel's result and returns what is wrong with it, or "".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from sglang.srt.configs.activation import Activation
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.scaled_product import product_of
from sglang.srt.kernels.tile_configs import TileConfig
from sglang.srt.layers import native_ops
from sglang.srt.layers.moe.expert_weights import ExpertWeights
from sglang.srt.layers.quantization import reference
from sglang.srt.layers.quantization.linear_weight import LinearWeight
from sglang.srt.layers.triton_ops.linear_tiles import FEW as FEW_ROWS

Check = Callable[[torch.Tensor], str]

ROWS = 12
"""Rows of a result that are compared, from its first to its last."""
PRODUCT, EXPERTS_ROUNDED, EXPERTS = 1e-2, 4e-2, 1e-2
HALF_ATTENTION, FP8_ATTENTION = 2.5e-3, 2e-2


def of_plain_linear(x: torch.Tensor, weight: torch.Tensor) -> Check:
    """Returns the check of x [T, K] @ weight^T [N, K] in 16 bits."""
    rows = _rows(len(x), x.device)
    return lambda result: _difference(result, rows, x[rows].float() @ weight.float().T, PRODUCT)


def of_linear(x: torch.Tensor, weight: LinearWeight, arch: ArchTraits, config: TileConfig) -> Check:
    """Returns the check of x [T, K] @ weight^T with a quantized weight, which is read at once: kernels reorder it."""
    rows = _rows(len(x), x.device)
    rounds = config.variant != FEW_ROWS
    scheme = dataclasses.replace(
        weight.scheme, activation=product_of(weight.scheme, arch.features).activation if rounds else None
    )
    scale = None if weight.input_scale is None else weight.input_scale.squeeze(0)
    wanted = reference.round_activation(x[rows], scheme, scale) @ weight.dequantized().T
    return lambda result: _difference(result, rows, wanted, PRODUCT)


def of_experts(
    x: torch.Tensor,
    weights: tuple[ExpertWeights, ExpertWeights],
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation,
    arch: ArchTraits,
    config: TileConfig,
) -> Check:
    """Returns the check of experts' weighted outputs [T, H] for x [T, H]."""
    from sglang.srt.layers.moe.fused_moe_triton.tiles import FEW

    w13, w2 = weights
    eight_bits = w13.scheme is not None and (w13.scheme.bits == 8 or "block_scaled_mma" in arch.features)
    rounds = eight_bits and config.variant != FEW
    rows = _rows(len(x), x.device)

    def product(values: torch.Tensor, matrix: ExpertWeights, expert: int) -> torch.Tensor:
        if rounds and matrix.scheme is not None:
            scale = None if matrix.input_scale is None else matrix.input_scale.reshape(())
            scheme = matrix.scheme
            if scheme.activation == "tensor" and scale is None:
                scheme = dataclasses.replace(scheme, activation="token")
            values = reference.round_activation(values, scheme, scale)
        out = values.float() @ matrix.dequantized(expert).T
        return out if matrix.bias is None else out + matrix.bias[expert].float()

    def check(result: torch.Tensor) -> str:
        wanted = torch.zeros((len(rows), x.shape[1]), device=x.device)
        chosen, scales = topk_ids[rows].long(), topk_weights[rows].float()
        for expert in chosen.unique().tolist():
            share = (scales * (chosen == expert)).sum(1, keepdim=True)
            picked = share[:, 0] > 0
            inner = native_ops.gated(product(x[rows][picked], w13, expert), activation).to(x.dtype)
            wanted[picked] += share[picked] * product(inner, w2, expert)
        return _difference(result, rows, wanted, EXPERTS_ROUNDED if eight_bits else EXPERTS)

    return check


def of_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> Check:
    """Returns the check of attention of one token of each request: q [B, heads, D] to the slots table [B, context] of
    the caches k, v [slots, KV heads, D]."""

    def check(result: torch.Tensor) -> str:
        rows = _rows(len(q), q.device)[:4]
        wanted = torch.stack([_attend(q[row], k[table[row].long()], v[table[row].long()]) for row in rows.tolist()])
        return _difference(result, rows, wanted, _attention_bound(k))

    return check


def of_extend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cached_k: torch.Tensor, cached_v: torch.Tensor, new: int
) -> Check:
    """Returns the check of causal attention of the first prompt's `new` tokens q, k, v [T, heads, D] to themselves and
    to the cached ones."""
    keys = torch.cat([cached_k.to(k.dtype), k[:new]])
    values = torch.cat([cached_v.to(v.dtype), v[:new]])

    def check(result: torch.Tensor) -> str:
        rows = _rows(new, q.device)
        seen = (len(keys) - new + rows + 1).tolist()
        wanted = torch.stack([_attend(q[i], keys[:n], values[:n]) for i, n in zip(rows.tolist(), seen, strict=True)])
        return _difference(result, rows, wanted, _attention_bound(cached_k))

    return check


def _attention_bound(cache: torch.Tensor) -> float:
    return HALF_ATTENTION if cache.dtype.itemsize == 2 else FP8_ATTENTION


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Returns [heads, Dv] of one query [heads, D] over keys [n, KV heads, D] and values."""
    groups = q.shape[0] // k.shape[1]
    keys, values = (each.float().repeat_interleave(groups, 1) for each in (k, v))
    scores = torch.einsum("hd,nhd->hn", q.float(), keys) * q.shape[-1] ** -0.5
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), values)


def _rows(count: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0, count - 1, min(count, ROWS), device=device).round().long()


def _difference(result: torch.Tensor, rows: torch.Tensor, wanted: torch.Tensor, bound: float) -> str:
    if not bool(torch.isfinite(result.float()).all()):
        return "its numbers are not finite"
    error = float((result[rows].double() - wanted.double()).norm() / wanted.double().norm())
    return "" if error <= bound else f"its numbers are wrong: {error:.1e} of the reference's norm, bound {bound:.1e}"
