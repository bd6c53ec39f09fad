"""y = x @ w^T (+ bias) with a quantized weight. Reference: `LinearWeight.dequantized` and `reference.round_activation`.

A row or two: threads along K multiply and add, x stays in 16 bits, and the time is that of reading the weight once.
More: x is quantized where the scheme says so, and tiles are multiplied with matrix instructions; while rows are few, K
is split over programs, and the last one to finish a tile sums the parts, always in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import triton

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.launch import fallbacks_of
from sglang.srt.kernels.scaled_product import ScaledProduct, product_of
from sglang.srt.kernels.spec import Tile
from sglang.srt.kernels.tile_configs import TileConfigs, config_for
from sglang.srt.layers.moe.expert_weights import ExpertWeights, repack
from sglang.srt.layers.quantization.activations import Activations, QuantizedActivations, values_of
from sglang.srt.layers.quantization.linear_weight import LinearWeight
from sglang.srt.layers.triton_ops import pdl, quant_linear_dequantized, scaled_dot
from sglang.srt.layers.triton_ops.linear_tiles import FEW, MANY, num_splits, swaps
from sglang.srt.layers.triton_ops.quant_linear import few_rows_kernel, tiles_kernel
from sglang.srt.layers.triton_ops.quantize import quantize_activation
from sglang.srt.layers.triton_ops.scaled_dot import STRIP
from sglang.srt.layers.triton_ops.streamed_dot import pair_launch

Apply = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A LinearWeight in the kernels' layout for one GPU. `arrivals` counts the finished parts of each tile; `packed`:
    four-bit columns as published, not in planes."""

    weight: LinearWeight
    product: ScaledProduct
    cols: int
    packed: bool
    arch: ArchTraits
    arrivals: torch.Tensor


def pack(weight: LinearWeight, arch: ArchTraits) -> PackedWeight:
    """Returns the weight in the kernels' layout. Four-bit weights that are dequantized in registers are reordered, in
    place if no padding is needed."""
    scheme = weight.scheme
    one = torch.ones(1, device=weight.data.device) if scheme.global_scale else None
    as_expert = ExpertWeights(weight.data[None], scheme, weight.scale[None], one)
    arranged = repack(as_expert, arch.features)
    assert arranged.scale is not None
    data, in_planes = arranged.data[0], arranged.plane_cols is not None
    rows, cols = weight.shape
    return PackedWeight(
        dataclasses.replace(weight, data=data, scale=arranged.scale[0]),
        product_of(scheme, arch.features),
        cols,
        scheme.bits == 4 and not in_planes,
        arch,
        torch.zeros(triton.cdiv(rows, 16), dtype=torch.int32, device=data.device),
    )


def quantized_linear(weight: LinearWeight, arch: ArchTraits, configs: TileConfigs) -> Apply:
    """(x [..., K] in 16 bits, or rows with their quantized form; bias [N] or None) -> [..., N] in x's type, or another
    one. Safe in CUDA graphs. `configs`: the plan's for this weight.

    Takes the weight: its tensors may be reordered."""
    return packed_linear(pack(weight, arch), configs)


def packed_linear(matrix: PackedWeight, configs: TileConfigs) -> Apply:
    """Returns a function that multiplies activations [T, K] by a packed matrix, with tiles by number of tokens: it
    takes (x, bias, out_dtype) and returns [T, N]."""
    op = f"linear/{matrix.weight.scheme.name}"
    fallbacks = {
        config.max_tokens: fallbacks_of(op, config, __name__, scaled_dot.__name__)
        for config in configs
        if config.variant == MANY
    }

    def run(x: Activations, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        values = values_of(x)
        flat = values.reshape(-1, matrix.cols)
        config = config_for(configs, len(flat))
        if config.variant == FEW:
            out = few_rows(flat, matrix, config.tiles[0], bias, out_dtype)
        else:
            rows = x if isinstance(x, QuantizedActivations) else flat
            out = fallbacks[config.max_tokens].run(lambda tiles: many_rows(rows, matrix, tiles[0], bias, out_dtype))
        return out.view(*values.shape[:-1], out.shape[-1])

    return run


def few_rows(
    x: torch.Tensor,
    matrix: PackedWeight,
    tile: Tile,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns [T, N] for x [T, K] with a tile of `linear_tiles.few_cut`; the weight is read once per row."""
    num_rows, num_cols = len(x), matrix.weight.data.shape[0]
    out = torch.empty((num_rows, num_cols), dtype=out_dtype or x.dtype, device=x.device)
    launch = pair_launch(matrix.product, tile, matrix.cols)
    data = matrix.weight.data.view(torch.int32) if matrix.packed else matrix.weight.data
    factor = matrix.weight.row_factor
    if num_rows:
        few_rows_kernel[(triton.cdiv(num_cols, launch["BLOCK_N"]), num_rows)](
            x, data, matrix.weight.scale, out if factor is None else factor, out if bias is None else bias, out,
            num_cols, matrix.cols, x.stride(0), data.stride(0), matrix.weight.scale.stride(0),
            **launch, HAS_FACTOR=factor is not None, HAS_BIAS=bias is not None, **pdl.options(),
        )  # fmt: skip
    return out


def many_rows(
    x: Activations,
    matrix: PackedWeight,
    tile: Tile,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns [T, N] for x [T, K] by matrix tiles. Raises OutOfResources if the tile does not launch."""
    values = values_of(x)
    out = torch.empty((len(values), matrix.weight.data.shape[0]), dtype=out_dtype or values.dtype, device=values.device)
    weight, product = matrix.weight, matrix.product
    num_rows, num_cols = out.shape
    features = matrix.arch.features
    num_tiles = triton.cdiv(num_rows, tile["BLOCK_M"]) * triton.cdiv(num_cols, tile["BLOCK_N"])
    splits = 1
    if num_tiles <= len(matrix.arrivals):
        splits = num_splits(num_rows, num_tiles, matrix.cols, matrix.arch.num_sms, features)
    launch = tile_launch(product, tile, matrix.cols, splits, features)
    chunk, splits = launch.pop("chunk"), launch["SPLITS"]
    data, scale, scale_stride, factor = operand(x, matrix)
    parts = torch.empty((splits, num_rows, num_cols), device=out.device) if splits > 1 else out
    row_factor = weight.row_factor
    kernel = quant_linear_dequantized.tiles_kernel if product.weight_only else tiles_kernel
    kernel[(num_tiles, splits)](
        data, scale, weight.data, weight.scale, out if row_factor is None else row_factor,
        out if factor is None else factor, out if bias is None else bias, out, parts, matrix.arrivals,
        num_rows, num_cols, matrix.cols, chunk, data.stride(0), scale_stride, weight.data.stride(0),
        weight.scale.stride(0), **launch,
        HAS_FACTOR=row_factor is not None, HAS_X_FACTOR=factor is not None, HAS_BIAS=bias is not None,
        **pdl.options(),
    )  # fmt: skip
    return out


def tile_launch(
    product: ScaledProduct, tile: Tile, cols: int, splits: int, features: Collection[str]
) -> dict[str, Any]:
    """Constants of `tiles_kernel`, and `chunk`, the columns of a split; the number of splits may get smaller."""
    step = max(tile["BLOCK_K"], STRIP.value)
    chunk = triton.cdiv(triton.cdiv(cols, splits), step) * step
    return {
        **tile,
        **product.constants,
        "chunk": chunk,
        "SPLITS": triton.cdiv(cols, chunk),
        "EVEN_K": cols % step == 0,
        "SWAP": swaps(tile, features),
        "ONE_SCALE": 128 % tile["BLOCK_N"] == 0,
    }


def operand(x: Activations, matrix: PackedWeight) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor | None]:
    """x as the product takes it, its scales and their stride between rows (0: one for all), and the factor of all."""
    product, weight = matrix.product, matrix.weight
    if isinstance(x, QuantizedActivations):
        if x.form == product.activation and weight.scheme.element == "e4m3":
            return x.data, x.scale, x.scale.stride(0), None
        x = x.values
    if product.activation is None:
        return x, x, 0, None
    scheme = dataclasses.replace(weight.scheme, activation=product.activation)
    data, scale = quantize_activation(x, scheme, weight.input_scale)
    factor = weight.input_scale if product.activation == "nvfp4" else None
    return data, scale, 0 if product.activation == "tensor" else scale.stride(0), factor
