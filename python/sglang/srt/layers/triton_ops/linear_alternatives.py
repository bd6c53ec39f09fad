"""The tile configs that are possible for a quantized product, from which measured times choose. Data only: no torch, no
Triton.

They are those of the tables: every tile there is on record, and fits the GPUs that its table is for.
"""

from __future__ import annotations

from collections.abc import Iterator

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.scaled_product import product_of
from sglang.srt.kernels.spec import Need
from sglang.srt.kernels.tile_configs import Shape, TileConfig
from sglang.srt.layers.triton_ops.linear_tiles import (
    FEW,
    FEW_ROWS,
    LIBRARY,
    MANY,
    TILES,
    few_cut,
    library_takes,
    smaller_tiles,
    table_of,
    tile_rows,
)

MIN_BLOCK = 16
LIBRARY_ROWS = 64
"""Fewest tokens for which torch's product is timed: its tiles have 64 rows and more."""


def triton_alternatives(need: Need, arch: ArchTraits, shape: Shape, tokens: int) -> tuple[TileConfig, ...]:
    """Returns the tile configs of Triton's products that are possible for a step of `tokens` tokens: blocks of up to
    twice as many rows."""
    return tuple(_by_triton(need, arch, shape, tokens))


def library_alternatives(need: Need, arch: ArchTraits, shape: Shape, tokens: int) -> tuple[TileConfig, ...]:
    """Returns the same with torch's product, where it supports the weight."""
    by_library = tokens >= LIBRARY_ROWS and library_takes(SCHEMES[need.quant or ""], shape)
    return (*_by_triton(need, arch, shape, tokens), *([TileConfig(tokens, LIBRARY)] if by_library else []))


def _by_triton(need: Need, arch: ArchTraits, shape: Shape, tokens: int) -> Iterator[TileConfig]:
    scheme = SCHEMES[need.quant or ""]
    product = product_of(scheme, arch.features)
    kind, (rows, cols, _) = table_of(product), shape
    if tokens <= FEW_ROWS:
        yield TileConfig(tokens, FEW, ((few_cut(product, scheme.bits, rows, cols),),), "FEW_TILES")
    tiles = [row.tile for row in (*tile_rows(kind, arch.features), *TILES[kind])]
    for number, tile in enumerate(tiles):
        if tile["BLOCK_M"] <= max(MIN_BLOCK, 2 * tokens) and tile not in tiles[:number]:
            yield TileConfig(tokens, MANY, tuple((each,) for each in (tile, *smaller_tiles(tile, kind))), "tables")
