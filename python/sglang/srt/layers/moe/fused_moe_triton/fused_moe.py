"""The routed experts of one layer: gate and up projections, gate, down projection, weighted sum.

With few pairs two launches stream the chosen experts' weights. Otherwise the pairs are grouped by expert: x is
quantized (if the scheme does so), gate and up projections and the gate are one launch, the result is quantized again,
and the rows of the down projection are summed with their weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import triton

from sglang.srt.configs.activation import Activation, gate_constants
from sglang.srt.errors import UserError
from sglang.srt.kernels.launch import fallbacks_of
from sglang.srt.kernels.scaled_product import ScaledProduct, product_of
from sglang.srt.kernels.spec import Tile
from sglang.srt.kernels.tile_configs import TileConfigs, Tiles, config_for
from sglang.srt.layers.moe.expert_weights import ExpertWeights, Waves
from sglang.srt.layers.moe.fused_moe_triton import kernels, kernels_dequantized, kernels_few, kernels_zero_points
from sglang.srt.layers.moe.fused_moe_triton.align import ExpertBlocks, align
from sglang.srt.layers.moe.fused_moe_triton.tiles import FEW, MIXED, swaps
from sglang.srt.layers.moe.output_norm import OutputNorm
from sglang.srt.layers.moe.pair_adapters import PairAdapters
from sglang.srt.layers.quantization.activations import Activations, QuantizedActivations, values_of
from sglang.srt.layers.triton_ops import pdl, scaled_dot
from sglang.srt.layers.triton_ops.activation import activate
from sglang.srt.layers.triton_ops.expert_rows import look_up, place_blocks
from sglang.srt.layers.triton_ops.norm import row_launch
from sglang.srt.layers.triton_ops.quantize import quantize_activation
from sglang.srt.layers.triton_ops.scaled_dot import STRIP
from sglang.srt.layers.triton_ops.streamed_dot import pair_launch

COMBINE_BLOCK = 1024
NVFP4_RANGE = 448.0 * 6.0


def fused_moe(
    x: Activations,
    w13: ExpertWeights,
    w2: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation,
    configs: TileConfigs,
    features: Collection[str] = (),
    waves: Waves | None = None,
    adapters: PairAdapters | None = None,
    norm: OutputNorm | None = None,
) -> torch.Tensor:
    """Returns the experts' weighted outputs [T, H] for x [T, H] (rows contiguous, bfloat16 or float16, or with their
    quantized form), topk_weights [T, k] fp32, topk_ids [T, k] int32.

    w13 [E, 2I, H], or [E, I, H] without a gate, and w2 [E, H, I] of one scheme, after `expert_weights.repack`. An id
    of -1 adds nothing. `configs`: the plan's; tiles that do not launch are replaced by smaller fallbacks. `features`
    (of ArchTraits): of the GPU that the tiles are for. `waves`: weights and ids of one part of the pairs after the
    other, in the place of all at once; may be gone through several times. `adapters`: of a step whose tokens have LoRA
    adapters. `norm`: of each expert's output.
    """
    values = values_of(x)
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    if topk_ids.numel() == 0:
        return out
    config = config_for(configs, len(topk_ids))
    by_block = waves is not None or adapters is not None  # FEW adds up a token's experts while it multiplies
    if (config.variant == FEW and by_block) or (config.variant == MIXED and adapters is not None):
        config = next(each for each in configs if each.variant not in (FEW, MIXED))
    if config.variant == FEW:
        table = w13.row_of_expert
        rows = topk_ids if table is None else look_up(topk_ids, table)
        _pair_by_pair(values, w13, w2, topk_weights, rows, activation, config.tiles, out, norm)
    else:
        parts = ((w13, w2, topk_ids),) if waves is None else waves
        in_turn = waves is not None and _scales_whole_tensor(w2)

        def attempt(tiles: Tiles) -> None:
            if adapters is not None:
                pair_out = _adapted_outputs(x, parts, topk_ids, activation, tiles, features, adapters)
            else:
                pair_out = _pair_outputs(x, parts, activation, tiles, features, in_turn)
            combine(pair_out, topk_weights, topk_ids, out, norm)

        scheme = "bf16" if w13.scheme is None else w13.scheme.name
        fallbacks_of(f"fused_moe/{scheme}", config, grouped_kernels(w13).__name__, scaled_dot.__name__).run(attempt)
    return out


def combine(
    pair_out: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, norm: OutputNorm | None
) -> None:
    """Fills out [T, H] with the sums of the experts' outputs pair_out [T * k, H], or of their norms, times weights [T,
    k]; choices of -1 add nothing."""
    (num_tokens, top_k), size = ids.shape, out.shape[1]
    if norm is None:
        kernels.combine_kernel[(num_tokens, triton.cdiv(size, COMBINE_BLOCK))](
            pair_out, weights, ids, out, size, TOP_K=top_k, BLOCK=COMBINE_BLOCK, num_warps=4, **pdl.options()
        )
    else:
        kernels.combine_normed_kernel[(num_tokens,)](
            pair_out, weights, ids, norm.weight, out, size, norm.eps, TOP_K=top_k, **row_launch(size), **pdl.options()
        )


def grouped_pairs(ids: torch.Tensor, weights: ExpertWeights, block_m: int) -> ExpertBlocks:
    """Groups the pairs of ids [T, k] int32 by expert, in blocks that name the rows of their experts' weights."""
    blocks = align(ids, weights.num_experts, block_m)
    if weights.row_of_expert is not None:
        place_blocks(blocks.block_expert, blocks.num_blocks, weights.row_of_expert)
    return blocks


def product_for(weights: ExpertWeights) -> ScaledProduct:
    """Returns how to compute products with these weights; their layout shows for which GPU they were repacked. Raises
    UserError for weights that are not repacked."""
    scheme = weights.scheme
    if scheme is not None and scheme.bits == 4 and scheme.activation is None and weights.plane_cols is None:
        raise UserError(f"expert weights ({scheme.name}) must be repacked before use: expert_weights.repack")
    return product_of(scheme, () if weights.plane_cols is not None else ("block_scaled_mma",))


@dataclass(frozen=True, slots=True)
class Matrix:
    """The kernel arguments that describe one ExpertWeights. Missing tensors are given as `data`."""

    data: torch.Tensor
    scale: torch.Tensor
    factor: torch.Tensor
    bias: torch.Tensor
    strides: tuple[int, int, int, int]  # of a row of data and of scales, and of an expert of both
    flags: Mapping[str, bool]


def matrix_of(weights: ExpertWeights, words: bool = False) -> Matrix:
    """Returns the kernel arguments of weights. words: packed nibbles as int32, eight at a time."""
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
    tiles: Tiles,
    out: torch.Tensor,
    norm: OutputNorm | None,
) -> None:
    top_k, num_pairs = topk_ids.shape[1], topk_ids.numel()
    # With a norm the second launch has a pair where it has a token otherwise: the sum over one choice of weight 1.
    sums, summed, weights = out, top_k, topk_weights
    if norm is not None:
        sums, summed, weights = out.new_empty((num_pairs, w2.rows)), 1, torch.ones_like(topk_weights)
    hidden, intermediate = w2.rows, w2.cols
    first, second = matrix_of(w13, words=True), matrix_of(w2, words=True)
    up, down = product_for(w13), product_for(w2)
    up_launch, down_launch = pair_launch(up, tiles[0], hidden), pair_launch(down, tiles[1], intermediate)
    steps = triton.cdiv(intermediate, down_launch["COLS"])
    inter = torch.empty((num_pairs, intermediate), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(intermediate, up_launch["BLOCK_N"]), num_pairs)
    few = kernels_zero_points if w13.zero_points else kernels_few
    few.gate_up_pairs_kernel[grid](
        x, first.data, first.scale, first.factor, first.bias, topk_ids, inter, top_k, hidden, intermediate, x.stride(0),
        *first.strides, **first.flags, **up_launch, **gate_constants(activation), **pdl.options(),
    )  # fmt: skip
    # Nothing may be launched in between: see `down_sum_kernel`.
    grid, early = (triton.cdiv(hidden, down_launch["BLOCK_N"]), len(sums)), min(down_launch["EARLY"], summed * steps)
    few.down_sum_kernel[grid](
        inter, second.data, second.scale, second.factor, second.bias, weights, topk_ids, sums, hidden, intermediate,
        *second.strides, TOP_K=summed, STEPS=steps,
        **second.flags, **(down_launch | {"EARLY": early}), **pdl.options(),
    )  # fmt: skip
    if norm is not None:
        combine(sums, topk_weights, topk_ids, out, norm)


def _pair_outputs(
    x: Activations, waves: Waves, activation: Activation, tiles: Tiles, features: Collection[str], in_turn: bool
) -> torch.Tensor:
    """Returns the outputs [T * k, H] of all pairs, without the rows of choices of -1. in_turn: the second product
    follows when the first one of all waves is there."""
    up_tile, down_tile = tiles
    inter: torch.Tensor | None = None
    pair_out: torch.Tensor | None = None
    for w13, w2, ids in waves:
        blocks = grouped_pairs(ids, w13, up_tile["BLOCK_M"])
        inter = _gate_up(x, w13, ids, blocks, activation, up_tile, features, inter)
        if not in_turn:
            pair_out = _down(inter, w2, ids, blocks, down_tile, features, pair_out)
    assert inter is not None
    for _, w2, ids in waves if in_turn else ():
        blocks = grouped_pairs(ids, w2, up_tile["BLOCK_M"])
        pair_out = _down(inter, w2, ids, blocks, down_tile, features, pair_out)
    assert pair_out is not None
    return pair_out


def _gate_up(
    x: Activations,
    w13: ExpertWeights,
    topk_ids: torch.Tensor,
    blocks: ExpertBlocks,
    activation: Activation,
    tile: Tile,
    features: Collection[str],
    inter: torch.Tensor | None,
) -> torch.Tensor:
    """Returns [T * k, I], without the rows of choices of -1; `inter`, if it is there, with more of them."""
    num_pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    hidden, intermediate = w13.cols, w13.rows // (1 + activation.gated)
    if inter is None:
        # What is made of a whole tensor must not see rows that were not written.
        make = torch.zeros if _scales_whole_tensor(w13) else torch.empty
        values = values_of(x)
        inter = make((num_pairs, intermediate), dtype=values.dtype, device=values.device)
    w, a = matrix_of(w13), _operand(x, w13)
    grouped_kernels(w13).gate_up_kernel[(blocks.max_blocks * triton.cdiv(intermediate, tile["BLOCK_N"]),)](
        a.data, a.scale, w.data, w.scale, w.factor, a.factor, w.bias, inter,
        blocks.sorted_pairs, blocks.block_expert, blocks.num_blocks,
        num_pairs, top_k, hidden, intermediate, a.data.stride(0), a.scale_stride, *w.strides,
        **grouped_launch(product_for(w13), tile, hidden, intermediate if activation.gated else 0, features), **w.flags,
        **gate_constants(activation), **pdl.options(),
    )  # fmt: skip
    return inter


def _down(
    inter: torch.Tensor,
    w2: ExpertWeights,
    topk_ids: torch.Tensor,
    blocks: ExpertBlocks,
    tile: Tile,
    features: Collection[str],
    pair_out: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the down projection [T * k, H], without the rows of choices of -1; `pair_out`, if it is there, with more
    of them."""
    if pair_out is None:
        pair_out = torch.empty((topk_ids.numel(), w2.rows), dtype=inter.dtype, device=inter.device)
    _multiply_pairs(_operand(inter, w2), w2, blocks, tile, features, pair_out)
    return pair_out


def _multiply_pairs(
    a: Operand, weights: ExpertWeights, blocks: ExpertBlocks, tile: Tile, features: Collection[str], out: torch.Tensor
) -> None:
    """Fills out [T * k, N] with the products of rows [T * k, K] and their experts' weights, but for choices of -1."""
    w, rows, cols = matrix_of(weights), weights.rows, weights.cols
    grouped_kernels(weights).down_kernel[(blocks.max_blocks * triton.cdiv(rows, tile["BLOCK_N"]),)](
        a.data, a.scale, w.data, w.scale, w.factor, a.factor, w.bias, out,
        blocks.sorted_pairs, blocks.block_expert, blocks.num_blocks,
        len(out), rows, cols, a.data.stride(0), a.scale_stride, *w.strides,
        **grouped_launch(product_for(weights), tile, cols, 0, features), **w.flags, **pdl.options(),
    )  # fmt: skip


def _adapted_outputs(
    x: Activations,
    waves: Waves,
    ids: torch.Tensor,
    activation: Activation,
    tiles: Tiles,
    features: Collection[str],
    adapters: PairAdapters,
) -> torch.Tensor:
    """Returns the outputs [T * k, H] of all pairs like `_pair_outputs`, with what LoRA adapters add. Gate and up are
    written out, because adapters add to them before the activation; each pair has a row of x of its own there."""
    values, (block_m, tile) = values_of(x), (tiles[0]["BLOCK_M"], tiles[1])
    both: torch.Tensor | None = None
    pairs = adapters.order(ids)
    for w13, _, part in waves:
        if both is None:  # zeros: what is made of a whole tensor must not see rows that were not written
            make = torch.zeros if _scales_whole_tensor(w13) else torch.empty
            both = make((ids.numel(), w13.rows), dtype=values.dtype, device=values.device)
        rows = _operand(x, w13).for_pairs(ids.shape[1])
        _multiply_pairs(rows, w13, grouped_pairs(part, w13, block_m), tile, features, both)
    assert both is not None
    adapters.add_up(values, both, pairs)
    inter = activate(both, activation)
    del both
    out = torch.empty((len(inter), values.shape[1]), dtype=values.dtype, device=values.device)
    for _, w2, part in waves:
        _multiply_pairs(_operand(inter, w2), w2, grouped_pairs(part, w2, block_m), tile, features, out)
    adapters.add_down(inter, out, pairs)
    return out


def grouped_kernels(weights: ExpertWeights) -> ModuleType:
    """Returns the module of grouped kernels for the weights."""
    if product_for(weights).weight_only:
        return kernels_dequantized
    return kernels_zero_points if weights.zero_points else kernels


def grouped_launch(
    product: ScaledProduct, tile: Mapping[str, int], depth: int, second: int, features: Collection[str]
) -> dict[str, Any]:
    """Returns the constants of a grouped kernel. depth: columns of the weights; second: rows between gate and up, if
    both."""
    step = max(tile["BLOCK_K"], STRIP.value) if product.kind == "planes" else tile["BLOCK_K"]
    shape = {
        "EVEN_K": depth % step == 0,
        "SWAP": swaps(dict(tile), product.kind, features),
        "ONE_SCALE": product.kind == "group128" and 128 % tile["BLOCK_N"] == 0 and second % 128 == 0,
        "X_FACTOR": product.activation == "nvfp4",
    }
    return {**tile, **shape, **product.constants}


@dataclass(frozen=True, slots=True)
class Operand:
    """x in the form a product takes. Missing tensors are given as `data`."""

    data: torch.Tensor
    scale: torch.Tensor
    scale_stride: int  # between rows; 0: one scale for all
    factor: torch.Tensor

    def for_pairs(self, top_k: int) -> Operand:
        """Returns the rows of tokens, each repeated for the token's `top_k` pairs."""
        data, scale, factor = self.data.repeat_interleave(top_k, dim=0), self.scale, self.factor
        if self.scale_stride:
            scale = scale.repeat_interleave(top_k, dim=0)
        return Operand(
            data,
            data if self.scale is self.data else scale,
            scale.stride(0) if self.scale_stride else 0,
            data if factor is self.data else factor,
        )


def _scales_whole_tensor(weights: ExpertWeights) -> bool:
    return product_for(weights).activation == "nvfp4" and weights.input_scale is None


def _operand(x: Activations, weights: ExpertWeights) -> Operand:
    kind, scheme, input_scale = product_for(weights).activation, weights.scheme, weights.input_scale
    if isinstance(x, QuantizedActivations):
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
