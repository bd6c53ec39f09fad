"""Random experts of every scheme, and what their products should give, in fp32 from dequantized weights.

Everything is computed where the case lies: processes that share a GPU's checks would fight for the cores of its host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch

from sglang.srt.blocks.moe import reference as routing
from sglang.srt.configs.activation import SILU, Activation
from sglang.srt.configs.quant_scheme import SCHEMES, Scheme
from sglang.srt.kernels.tile_configs import TileConfigs
from sglang.srt.layers.moe.expert_weights import ExpertWeights, repack
from sglang.srt.layers.moe.fused_moe_triton import expert_tile_configs
from sglang.srt.layers.moe.fused_moe_triton.expert_tile_configs import ExpertLayer
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import product_for
from sglang.srt.layers.moe.fused_moe_triton.tiles import MoeTiles
from sglang.srt.layers.quantization import reference
from sglang.srt.layers.quantization.zero_points import pack_scales

NATIVE = frozenset({"block_scaled_mma"})
BOUNDS = {"e4m3": 4e-2, "int8": 4e-2, "int4": 1e-2, "e2m1": 1e-2}


@dataclasses.dataclass(slots=True)
class Case:
    x: torch.Tensor
    w13: ExpertWeights
    w2: ExpertWeights
    weights: torch.Tensor
    ids: torch.Tensor

    @property
    def bound(self) -> float:
        """Of the error's norm, as a part of the result's."""
        return 1e-2 if self.w13.scheme is None else BOUNDS[self.w13.scheme.element]


def make_case(
    scheme: str | None,
    num_tokens: int,
    num_experts: int = 4,
    top_k: int = 2,
    hidden: int = 128,
    inter: int = 64,
    features: Collection[str] = (),
    bias: bool = False,
    static: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    zero_points: bool = False,
) -> Case:
    """`static`: with static activation scales; nvfp4 always has them. `zero_points`: int4's are any code."""
    generator = torch.Generator().manual_seed(num_tokens + 7 * hidden)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def matrix(rows: int, cols: int, largest_input: float) -> ExpertWeights:
        w = (randn(num_experts, rows, cols) * cols**-0.5 * torch.linspace(0.5, 2, rows)[:, None]).to(device)
        own_bias = (randn(num_experts, rows) / 4).to(dtype).to(device) if bias else None
        if scheme is None:
            return ExpertWeights(w.to(dtype), bias=own_bias)
        q, own = reference.quantize(w, SCHEMES[scheme]), SCHEMES[scheme]
        if zero_points:
            zeros = torch.randint(16, q.scale.shape, generator=generator).to(device)
            q.scale = pack_scales("w", q.scale, zeros)
        limit = 448.0 * 6.0 if scheme == "nvfp4" else 448.0
        needs_static = static or scheme == "nvfp4"
        return repack(
            ExpertWeights(
                q.data,
                own,
                q.scale,
                q.global_scale,
                torch.full((num_experts,), largest_input / limit, device=device) if needs_static else None,
                own_bias,
            ),
            features,
        )

    x = randn(num_tokens, hidden).to(dtype).to(device)
    weights, ids = routing.topk_softmax(randn(num_tokens, num_experts), top_k, True)
    return Case(x, matrix(2 * inter, hidden, 5.0), matrix(hidden, inter, 10.0), weights.to(device), ids.to(device))


def expected(case: Case, activation: Activation = SILU, rounded: bool = True) -> torch.Tensor:
    """[T, H] fp32. `rounded`: activations are quantized as the scheme of the grouped kernels says."""
    dtype, x = case.x.dtype, case.x
    out = torch.zeros(x.shape, device=x.device)
    a = _rounded(x, case.w13) if rounded else x.float()
    for expert in range(case.w13.num_experts):
        token, choice = (case.ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        gate, up = _product(a[token], case.w13, expert).to(dtype).float().chunk(2, dim=-1)
        inter = _gated(gate, up, activation).to(dtype)
        b = _rounded(inter, case.w2) if rounded else inter.float()
        y = _product(b, case.w2, expert)
        out.index_add_(0, token, y * case.weights[token, choice, None])
    return out


def _gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return (up + activation.up_offset) * gate * torch.sigmoid(activation.alpha * gate)


def _product(a: torch.Tensor, w: ExpertWeights, expert: int) -> torch.Tensor:
    y = a @ w.dequantized(expert).T
    return y if w.bias is None else y + w.bias[expert].float()


def _rounded(x: torch.Tensor, w: ExpertWeights) -> torch.Tensor:
    kind = product_for(w).activation
    if kind is None or w.scheme is None:
        return x.float()
    scheme: Scheme = w.scheme
    input_scale = None if w.input_scale is None else w.input_scale.reshape(())
    if kind == "tensor" and input_scale is None:
        scheme = dataclasses.replace(scheme, activation="token")
    return reference.round_activation(x, scheme, input_scale)


def tile_configs_of(
    w13: ExpertWeights,
    w2: ExpertWeights,
    ids: torch.Tensor,
    features: Collection[str] = (),
    tiles: MoeTiles | None = None,
) -> TileConfigs:
    """Those that a plan would cut; with `tiles` these for any number of tokens."""
    product = product_for(w13)
    if tiles is not None:
        return expert_tile_configs.forced(tiles, product)
    layer = ExpertLayer(product, w13.num_experts, ids.shape[1], w2.rows, w2.cols, w13.ep_size)
    return expert_tile_configs.tile_configs_of(layer, features)


def assert_close(actual: torch.Tensor, wanted: torch.Tensor, bound: float) -> None:
    assert torch.isfinite(actual.float()).all()
    error, size = (actual.float() - wanted).norm(), wanted.norm()
    assert error <= bound * size, f"error {error:.2e} of {size:.2e}: {error / size:.2e}, bound {bound:.0e}"
