"""Launches of linear layers: products with weights of every format, and the head's."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch

from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.configs.quant_scheme import HEAD_SCHEMES, SCHEMES, Scheme
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.spec import Tile
from sglang.srt.kernels.tile_configs import config_for
from sglang.srt.layers.moe.expert_weights import ELEMENT_DTYPES, SCALE_DTYPES, ExpertWeights
from sglang.srt.layers.quantization.linear_weight import LinearWeight, held_scheme
from sglang.srt.layers.triton_ops import gemv, linear_products, linear_tiles, skinny_gemm
from sglang.srt.plan.weight_spec import Matrix

from .inputs import BF16, LAUNCHED, MANY, each_once, empty, few_as_rounded, of_scheme


def launch_matrix(
    once: Callable[..., None], matrix: Matrix, cut: bool, arch: ArchTraits, alike: Callable[[int], int]
) -> None:
    """`cut`: ranks share its columns."""
    once(launch_gemv, matrix.rows, matrix.cols, matrix.bias, None)
    if matrix.name == "moe.router":
        once(launch_gemv, matrix.rows, matrix.cols, matrix.bias, torch.float32)
    if matrix.quantized:
        for scheme in LAUNCHED:
            if cut and scheme.group[1] and matrix.cols % scheme.group[1]:
                continue  # refused: a rank would have a part of what has one scale
            for static in (False, True) if scheme.activation == "tensor" else (scheme.activation == "nvfp4",):
                once(launch_products, _coarse(matrix.rows), matrix.cols, matrix.bias, scheme, static, arch)
                rows = 2048 + matrix.rows % 16
                once(launch_tall_products, rows, alike(matrix.cols), matrix.bias, scheme, static, arch)


def _coarse(rows: int) -> int:
    """With three leading bits, and what 16 leaves of it: launches of products depend on no more of their rows."""
    low = max(4, rows.bit_length() - 3)
    return (rows >> low << low) + rows % 16


def launch_gemv(rows: int, cols: int, bias: bool, out_dtype: torch.dtype | None) -> None:
    x, weight = empty(1, cols), empty(rows, cols)
    if gemv.supports(x, weight):  # else cuBLAS
        gemv.linear(x, weight, empty(rows) if bias and out_dtype is None else None, out_dtype)
        if out_dtype is not None:  # routers may keep their weights in fp32
            gemv.linear(x, weight.float(), None, out_dtype)
    if skinny_gemm.supports(several := empty(2, cols), weight):
        gemv.linear(several, weight, empty(rows) if bias and out_dtype is None else None, out_dtype)


def linear_weight(total: int, cols: int, scheme: Scheme, static: bool) -> LinearWeight | None:
    """As the loader leaves it, or None for what no checkpoint can hold."""
    held = held_scheme(ModuleQuant(scheme.name, "compressed-tensors", static))
    per_row, per_col = scheme.group
    if per_row == 1 and per_col and cols % per_col:
        return None  # a group would be cut
    packed = 2 if scheme.bits == 4 else 1
    return LinearWeight(
        empty(total, cols // packed, dtype=ELEMENT_DTYPES[scheme.element]),
        held,
        empty(*held.scale_shape(total, cols), dtype=SCALE_DTYPES[scheme.scale]),
        empty(total, dtype=torch.float32) if scheme.global_scale else None,
        empty(1, dtype=torch.float32) if static else None,
    )


def launch_quantized_head(
    once: Callable[..., None], vocab: int, hidden: int, arch: ArchTraits, alike: Callable[[int], int]
) -> None:
    """Logits are fp32."""
    for scheme in map(SCHEMES.__getitem__, sorted(HEAD_SCHEMES)):
        more = (False, scheme, scheme.activation == "nvfp4", arch, torch.float32)
        once(launch_products, vocab, hidden, *more)
        once(launch_tall_products, 2048 + vocab % 16, alike(hidden), *more)


def with_weight(launch: Callable[..., None]) -> Callable[..., None]:
    """`launch` with a weight of these sizes, its bias, the sizes for which tiles are chosen, and the type of what it
    computes; nothing where the scheme has no such weight."""

    def part(
        rows: int, cols: int, bias: bool, scheme: Scheme, static: bool, arch: ArchTraits, out: torch.dtype = BF16
    ) -> None:
        weight = linear_weight(rows, cols, scheme, static)
        if weight is not None:
            with of_scheme("linear", scheme, arch):
                launch(_packed(weight, arch), empty(rows) if bias else None, (rows, cols, bias), out)

    return part


@with_weight
def launch_products(
    weight: linear_products.PackedWeight, bias: torch.Tensor | None, sizes: tuple[int, int, bool], out: torch.dtype
) -> None:
    """For as many rows of x as a row of the table is for."""
    configs = linear_tiles.tile_configs_of(weight.weight.scheme, sizes, weight.arch)
    for tokens in () if few_as_rounded(weight.product) else (1, linear_tiles.FEW_ROWS):
        linear_products.few_rows(empty(tokens, sizes[1]), weight, config_for(configs, tokens).tiles[0], bias, out)
    tiles = _linear_tiles(weight)
    for tokens in tiles:
        linear_products.many_rows(empty(tokens, sizes[1]), weight, config_for(configs, tokens).tiles[0], bias, out)
    last_resort = linear_tiles.last_resort(linear_tiles.table_of(weight.product))
    linear_products.many_rows(empty(min(tiles), sizes[1]), weight, last_resort, bias, out)


@with_weight
def launch_tall_products(
    weight: linear_products.PackedWeight, bias: torch.Tensor | None, sizes: tuple[int, int, bool], out: torch.dtype
) -> None:
    """With every tile, stepped down to, for many rows of x: so many that columns are not split."""
    with patch.object(linear_products, "operand", each_once(linear_products.operand)):
        for tile in (*_linear_tiles(weight).values(), linear_tiles.last_resort(linear_tiles.table_of(weight.product))):
            linear_products.many_rows(empty(MANY, sizes[1]), weight, tile, bias, out)


def _packed(weight: LinearWeight, arch: ArchTraits) -> linear_products.PackedWeight:
    # Weights without values need no order: torch takes a millisecond for each step of that.
    with patch(f"{ExpertWeights.__module__}._to_planes", lambda packed, scheme: packed):
        return linear_products.pack(weight, arch)


def _linear_tiles(weight: linear_products.PackedWeight) -> dict[int, Tile]:
    """By the most rows of x that the table has them for."""
    rows = linear_tiles.tile_rows(linear_tiles.table_of(weight.product), weight.arch.features)
    return {int(min(row.max_rows, MANY)): row.tile for row in rows}
