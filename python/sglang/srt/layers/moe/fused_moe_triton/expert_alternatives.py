"""The tile configs that are possible for experts, from which measured times choose: those of the tables and of the
tuning file. Imports no torch, no Triton."""

from __future__ import annotations

from collections.abc import Iterator

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.conditions import MIXED_ROWS
from sglang.srt.kernels.spec import Need
from sglang.srt.kernels.tile_configs import Shape, TileConfig
from sglang.srt.layers.moe.fused_moe_triton.expert_tile_configs import (
    ExpertLayer,
    candidates_of,
    layer_of,
    mixed_from,
    tile_configs_of,
    triton_tile_configs,
)
from sglang.srt.layers.moe.fused_moe_triton.tiles import FEW, MANY, TILES, tile_rows

MIN_BLOCK = 16
ROOM = 4.0
"""How many times the rows that an expert has on average a block may have: some experts have more, and each has a block
of its own."""
MOST_PAIRS = 2.0
"""Pairs of an expert up to which computing them one by one is timed."""


def triton_alternatives(need: Need, arch: ArchTraits, shape: Shape | None, tokens: int) -> tuple[TileConfig, ...]:
    """Returns the tile configs of Triton's products that are possible for a step of `tokens` tokens."""
    layer = layer_of(need, arch)
    return tuple(_one_of_each(_by_triton(need, layer, arch, tokens)))


def mixed_alternatives(need: Need, arch: ArchTraits, shape: Shape | None, tokens: int) -> tuple[TileConfig, ...]:
    """Returns the same with sgl-kernel's products, which are for experts with several pairs."""
    layer = layer_of(need, arch)
    mixed = mixed_from(0, 1) if layer.pairs(tokens) >= MIXED_ROWS * layer.num_experts / 2 else ()
    return (*_one_of_each(_by_triton(need, layer, arch, tokens)), *mixed)


def _by_triton(need: Need, layer: ExpertLayer, arch: ArchTraits, tokens: int) -> Iterator[TileConfig]:
    each, kind = layer.pairs(tokens) / layer.num_experts, layer.product.tile_kind
    if each <= MOST_PAIRS:
        yield from (config for config in tile_configs_of(layer, arch.features)[:1] if config.variant == FEW)
    rows = (row for row in (*tile_rows(kind, arch.features), *TILES[kind]) if layer.intermediate % row.whole == 0)
    of_tables = (TileConfig(tokens, MANY, candidates_of(row, kind), "tables") for row in rows)
    of_file = (config for config in triton_tile_configs(need, arch).by_shape[None] if config.variant == MANY)
    for config in (*of_tables, *of_file):
        if config.tiles[0]["BLOCK_M"] <= max(MIN_BLOCK, ROOM * each):
            yield config


def _one_of_each(configs: Iterator[TileConfig]) -> Iterator[TileConfig]:
    """Yields the tile configs whose first tiles differ from those before."""
    seen: list[tuple[object, ...]] = []
    for config in configs:
        if config.tiles not in seen:
            seen.append(config.tiles)
            yield config
