"""The routed experts of one layer: gate and up projections, gate, down projection, weighted sum.

Few pairs: two launches, which stream the chosen experts' weights. Otherwise the pairs are grouped by expert: x is
quantized (where the scheme says so), both products of the first matrix and the gate are one launch, the result is
quantized again, and the second product's rows are summed with their weights.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

from sglang.srt.configs.activation import SILU, Activation
from sglang.srt.errors import UserError
from sglang.srt.kernels.launch import TileLadder
from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.layers.moe.expert_weights import ExpertWeights
from sglang.srt.layers.moe.fused_moe_triton import kernels, kernels_few
from sglang.srt.layers.moe.fused_moe_triton.align import ExpertBlocks, align
from sglang.srt.layers.moe.fused_moe_triton.tiles import (
    PAIR_TILES,
    TILE_KEYS,
    MoeTiles,
    early_tiles,
    few_pairs,
    smaller_tiles,
    swaps,
    tile,
    tiles_for,
)
from sglang.srt.layers.quantization.quantized_rows import QuantizedRows, Rows, values_of
from sglang.srt.layers.triton_ops import pdl, scaled_dot
from sglang.srt.layers.triton_ops.activation import gate_constants
from sglang.srt.layers.triton_ops.quantize import quantize_activation
from sglang.srt.layers.triton_ops.scaled_dot import STRIP, ScaledProduct, product_of
from sglang.srt.layers.triton_ops.streamed_dot import pair_launch

COMBINE_BLOCK = 1024
NVFP4_RANGE = 448.0 * 6.0

_values = operator.itemgetter(*TILE_KEYS)


def fused_moe(
    x: Rows,
    w13: ExpertWeights,
    w2: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation = SILU,
    tiles: MoeTiles | None = None,
    features: Collection[str] = (),
) -> torch.Tensor:
    """x [T, H] (rows contiguous, bfloat16 or float16, or with their quantized form), topk_weights [T, k] fp32, topk_ids
    [T, k] int32 -> [T, H].

    w13 [E, 2I, H], or [E, I, H] without a gate, and w2 [E, H, I] of one scheme, after `expert_weights.repack`. An id
    of -1 names no expert and adds nothing. `tiles` forces the grouped kernels; where they do not launch, smaller ones
    take over. `features` (of ArchTraits) may allow larger tiles than every GPU has room for.
    """
    num_pairs, num_experts = w13.pairs_here(topk_ids.numel()), w13.num_experts
    values = values_of(x)
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    if num_pairs == 0:
        return out
    if tiles is None and few_pairs(num_pairs, num_experts):
        _pair_by_pair(values, w13, w2, topk_weights, topk_ids, activation, out)
    else:
        kind, scheme = product_for(w13).tile_kind, "bf16" if w13.scheme is None else w13.scheme.name
        chosen = tiles or tiles_for(num_pairs, num_experts, kind, features, w2.cols)

        def attempt(tiles: MoeTiles) -> None:
            inter, blocks = _gate_up(x, w13, topk_ids, activation, tiles, features)
            _down(inter, w2, topk_weights, topk_ids, blocks, out, tiles, features)

        _ladder(scheme, kind, _values(chosen.gate_up), _values(chosen.down)).run(attempt)
    return out


@functools.cache
def _ladder(scheme: str, kind: str, gate_up: tuple[int, ...], down: tuple[int, ...]) -> TileLadder[MoeTiles]:
    """From the tiles with these values down. Both products step together, because they share one grouping."""
    first = MoeTiles(float("inf"), tile(*gate_up), tile(*down))
    rungs, modules = (first, *smaller_tiles(first, kind)), (kernels.__name__, scaled_dot.__name__)
    return TileLadder(f"fused_moe/{scheme}", rungs, *modules, key=_tiles_key)


def _tiles_key(tiles: MoeTiles) -> str:
    return f"{tile_key(tiles.gate_up)} / {tile_key(tiles.down)}"


def product_for(weights: ExpertWeights) -> ScaledProduct:
    """How products with these weights are computed; their layout says for which GPU they were repacked."""
    scheme = weights.scheme
    if scheme is not None and scheme.bits == 4 and scheme.activation is None and weights.plane_cols is None:
        raise UserError(f"expert weights ({scheme.name}) must be repacked before use: expert_weights.repack")
    return product_of(scheme, () if weights.plane_cols is not None else ("block_scaled_mma",))


@dataclass(frozen=True, slots=True)
class Matrix:
    """The arguments of a kernel that describe one ExpertWeights. Tensors that it has not are given as `data`."""

    data: torch.Tensor
    scale: torch.Tensor
    factor: torch.Tensor
    bias: torch.Tensor
    strides: tuple[int, int, int, int]  # of a row of data and of scales, and of an expert of both
    flags: Mapping[str, bool]


def matrix_of(weights: ExpertWeights, words: bool = False) -> Matrix:
    """`words`: packed nibbles as int32, eight at a time."""
    data, scale = weights.data, weights.scale
    if words and data.dtype == torch.uint8:
        data = data.view(torch.int32)
    if scale is None:
        scale_strides = (0, 0)
    else:
        scale_strides = (scale.stride(1) if scale.ndim > 1 else 0, scale.stride(0))
    return Matrix(
        data=data,
        scale=data if scale is None else scale,
        factor=data if weights.global_scale is None else weights.global_scale,
        bias=data if weights.bias is None else weights.bias,
        strides=(data.stride(1), scale_strides[0], data.stride(0), scale_strides[1]),
        flags={"HAS_FACTOR": weights.global_scale is not None, "HAS_BIAS": weights.bias is not None},
    )


def _pair_by_pair(
    x: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation,
    out: torch.Tensor,
) -> None:
    num_tokens, top_k = topk_ids.shape
    hidden, intermediate = w2.rows, w2.cols
    first, second = matrix_of(w13, words=True), matrix_of(w2, words=True)
    up, down = product_for(w13), product_for(w2)
    up_launch = pair_launch(up, PAIR_TILES[up.pair_kind][0], hidden, intermediate)
    down_launch = pair_launch(down, PAIR_TILES[down.pair_kind][1], intermediate, hidden)
    steps = triton.cdiv(intermediate, down_launch["COLS"])
    early = early_tiles(down.kind, down_launch["COLS"], top_k * steps)
    inter = torch.empty((num_tokens * top_k, intermediate), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(intermediate, up_launch["BLOCK_N"]), num_tokens * top_k)
    kernels_few.gate_up_pairs_kernel[grid](
        x, first.data, first.scale, first.factor, first.bias, topk_ids, inter, top_k, hidden, intermediate, x.stride(0),
        *first.strides, **first.flags, **up_launch, **gate_constants(activation), **pdl.options(),
    )  # fmt: skip
    # Nothing may be launched in between: see `down_sum_kernel`.
    grid = (triton.cdiv(hidden, down_launch["BLOCK_N"]), num_tokens)
    kernels_few.down_sum_kernel[grid](
        inter, second.data, second.scale, second.factor, second.bias, topk_weights, topk_ids, out, hidden, intermediate,
        *second.strides, TOP_K=top_k, STEPS=steps, EARLY=early,
        **second.flags, **down_launch, **pdl.options(),
    )  # fmt: skip


def _gate_up(
    x: Rows,
    w13: ExpertWeights,
    topk_ids: torch.Tensor,
    activation: Activation,
    tiles: MoeTiles,
    features: Collection[str],
) -> tuple[torch.Tensor, ExpertBlocks]:
    """[T * k, I], whose rows for choices of -1 are not written, and the grouping of the pairs."""
    num_pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    hidden, intermediate, tile = w13.cols, w13.rows // (1 + activation.gated), tiles.gate_up
    assert tile["BLOCK_M"] == tiles.down["BLOCK_M"], "both products share one grouping"
    blocks = align(topk_ids, w13.num_experts, tile["BLOCK_M"])
    # What is made of a whole tensor must not see rows that were not written.
    make = torch.zeros if _scales_whole_tensor(w13) else torch.empty
    values = values_of(x)
    inter = make((num_pairs, intermediate), dtype=values.dtype, device=values.device)
    w, a = matrix_of(w13), _operand(x, w13)
    kernels.gate_up_kernel[(blocks.max_blocks * triton.cdiv(intermediate, tile["BLOCK_N"]),)](
        a.data, a.scale, w.data, w.scale, w.factor, a.factor, w.bias, inter,
        blocks.sorted_pairs, blocks.block_expert, blocks.num_blocks,
        num_pairs, top_k, hidden, intermediate, a.data.stride(0), a.scale_stride, *w.strides,
        **grouped_launch(product_for(w13), tile, hidden, intermediate if activation.gated else 0, features), **w.flags,
        **gate_constants(activation), **pdl.options(),
    )  # fmt: skip
    return inter, blocks


def _down(
    inter: torch.Tensor,
    w2: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    blocks: ExpertBlocks,
    out: torch.Tensor,
    tiles: MoeTiles,
    features: Collection[str],
) -> None:
    """The second product and the weighted sum."""
    num_tokens, top_k = topk_ids.shape
    num_pairs, hidden, intermediate, tile = topk_ids.numel(), w2.rows, w2.cols, tiles.down
    pair_out = torch.empty((num_pairs, hidden), dtype=inter.dtype, device=inter.device)
    w, a = matrix_of(w2), _operand(inter, w2)
    kernels.down_kernel[(blocks.max_blocks * triton.cdiv(hidden, tile["BLOCK_N"]),)](
        a.data, a.scale, w.data, w.scale, w.factor, a.factor, w.bias, pair_out,
        blocks.sorted_pairs, blocks.block_expert, blocks.num_blocks,
        num_pairs, hidden, intermediate, a.data.stride(0), a.scale_stride, *w.strides,
        **grouped_launch(product_for(w2), tile, intermediate, 0, features), **w.flags, **pdl.options(),
    )  # fmt: skip
    kernels.combine_kernel[(num_tokens, triton.cdiv(hidden, COMBINE_BLOCK))](
        pair_out, topk_weights, topk_ids, out, hidden,
        TOP_K=top_k, BLOCK=COMBINE_BLOCK, num_warps=4, **pdl.options(),
    )  # fmt: skip


def grouped_launch(
    product: ScaledProduct, tile: Mapping[str, int], depth: int, second: int, features: Collection[str]
) -> dict[str, Any]:
    """Constants of a grouped kernel. depth: columns of the weights; second: rows between gate and up, if both."""
    step = STRIP.value if product.kind == "planes" else tile["BLOCK_K"]
    shape = {
        "EVEN_K": depth % step == 0,
        "SWAP": swaps(dict(tile), product.kind, features),
        "ONE_SCALE": product.kind == "group128" and 128 % tile["BLOCK_N"] == 0 and second % 128 == 0,
        "X_FACTOR": product.activation == "nvfp4",
    }
    return {**tile, **shape, **product.constants}


@dataclass(frozen=True, slots=True)
class Operand:
    """x as a product takes it. Tensors that it has not are given as `data`."""

    data: torch.Tensor
    scale: torch.Tensor
    scale_stride: int  # between rows; 0: one scale for all
    factor: torch.Tensor


def _scales_whole_tensor(weights: ExpertWeights) -> bool:
    return product_for(weights).activation == "nvfp4" and weights.input_scale is None


def _operand(x: Rows, weights: ExpertWeights) -> Operand:
    kind, scheme, input_scale = product_for(weights).activation, weights.scheme, weights.input_scale
    if isinstance(x, QuantizedRows):
        if scheme is not None and x.form == kind and scheme.element == "e4m3":
            return Operand(x.data, x.scale, x.scale.stride(0), x.data)
        x = x.values
    if kind is None or scheme is None:
        return Operand(x, x, 0, x)
    if kind == "nvfp4" and input_scale is None:
        input_scale = (x.abs().amax().float() / NVFP4_RANGE).clamp_min(1e-12).reshape(1)
    if kind == "tensor" and input_scale is None:
        # A scale for each row is finer, and one token's result does not depend on the others.
        scheme = dataclasses.replace(scheme, activation="token")
    data, scale = quantize_activation(x, scheme, input_scale)
    stride = 0 if kind == "tensor" and input_scale is not None else scale.stride(0)
    return Operand(data, scale, stride, data if input_scale is None else input_scale)
