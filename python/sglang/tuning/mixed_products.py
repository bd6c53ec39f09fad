"""sgl-kernel's products of e4m3 by e2m1 in terms of the cost model. No torch.

The ledger has only Triton's kernels: registers and shared memory of these tiles come from sgl-kernel's own record,
which a test compares with this file, and the instructions of their loop besides matrix products from
`tables/instructions.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sglang.srt.kernels.spec import TileRecord
from sglang.srt.layers.moe.fused_moe_triton.tiles import GroupedTile, tile
from sglang.tuning.cost_model import GroupedProduct
from sglang.tuning.instructions import DequantizeCost, mixed
from sglang.tuning.search_space import MoeShape, grouped_product

WARPS, GROUP_M = 8, 8
_PRODUCT = ("m16n8k32 mxf8f6f4 1X",)
WEIGHT_ROWS: Mapping[int, tuple[int, int]] = {64: (128, 4), 128: (256, 2)}
"""By pairs of a block: rows of weights, half of them gate's in the first product, and stages."""
RECORDS: Mapping[tuple[str, int], TileRecord] = {
    ("gate_up", 64): TileRecord(101_376, 135, 0, 0, _PRODUCT),
    ("down", 64): TileRecord(101_376, 133, 0, 0, _PRODUCT),
    ("gate_up", 128): TileRecord(101_376, 252, 0, 0, _PRODUCT),
    ("down", 128): TileRecord(101_376, 251, 0, 0, _PRODUCT),
}


def mixed_tile(shape: MoeShape, kind: str, block_m: int) -> GroupedTile:
    """Returns the tile of sgl-kernel's mixed product with blocks of `block_m` pairs."""
    rows, stages = WEIGHT_ROWS[block_m]
    return tile(block_m, rows // shape.width(kind), 128, GROUP_M, WARPS, stages)


def mixed_product(shape: MoeShape, kind: str, block_m: int) -> GroupedProduct:
    """Returns the product. All instructions of the loop besides matrix products count as dequantizing does for
    Triton."""
    choice, each = mixed_tile(shape, kind, block_m), mixed(block_m)
    sizes = (shape.width(kind), block_m, choice["BLOCK_N"], WARPS)
    product = grouped_product(shape, kind, RECORDS[kind, block_m])
    return replace(product, dequantize_cost=DequantizeCost(each, {sizes: each}))
