"""The tile configs of a layer's experts: few pairs are computed one by one, more are grouped, with tiles from a tuning
file or the tables. Imports no torch, no Triton."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.conditions import MIXED_ROWS
from sglang.srt.kernels.scaled_product import ScaledProduct, product_of
from sglang.srt.kernels.spec import Need
from sglang.srt.kernels.tile_configs import ANY, OpTileConfigs, TileConfig, TileConfigs, Tiles, joined, max_tokens_where
from sglang.srt.layers.moe.fused_moe_triton.config_files import TunedTiles, find
from sglang.srt.layers.moe.fused_moe_triton.tiles import (
    FEW,
    MANY,
    MIXED,
    PAIR_TILES,
    TILES,
    WIDE_TILES,
    MoeTiles,
    early_tiles,
    few_pairs,
    pair_cut,
    smaller_tiles,
    tile_rows,
)

TALL_ROWS = 72
"""Pairs per expert from which sgl-kernel's blocks have 128 rows instead of 64; it serves steps from MIXED_ROWS on. Both
were predicted: benchmark/results/card.md#sgl-kernels-product-of-e4m3-and-e2m1."""


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The facts on which the tiles of a layer's experts depend. `num_experts`: this rank's; `top_k`: experts per token;
    `groups`: expert parallel size; `intermediate`: this rank's share."""

    product: ScaledProduct
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    groups: int = 1

    def pairs(self, tokens: int) -> int:
        """Returns the expected number of (token, expert) pairs on this rank."""
        return -(-tokens * self.top_k // self.groups)

    def tokens_with(self, rows: float) -> float:
        """Returns the most tokens for which an expert gets at most `rows` pairs on average."""
        return max_tokens_where(lambda tokens: self.pairs(tokens) / self.num_experts <= rows)


def layer_of(need: Need, arch: ArchTraits) -> ExpertLayer:
    """Returns the facts of a layer from the plan's need."""
    (_, hidden, _), (_, intermediate, _) = need.shapes
    num_experts, top_k, groups = need.experts
    product = product_of(SCHEMES[need.quant] if need.quant else None, arch.features)
    return ExpertLayer(product, num_experts, top_k, hidden, intermediate, groups)


def triton_tile_configs(need: Need, arch: ArchTraits) -> OpTileConfigs:
    """Returns the tile configs of Triton's products. Tiles of a tuning file without a record are assumed to fit."""
    layer = layer_of(need, arch)
    search = find(
        layer.num_experts,
        layer.intermediate,
        need.quant,
        arch,
        hidden=layer.hidden,
        bias=need.shapes[0][2],
    )
    configs = tile_configs_of(layer, arch.features, search.tiles)
    return OpTileConfigs(
        {None: configs}, search.describe(), tuple(f"MoE tuning file not used: {why}" for why in search.rejected)
    )


def mixed_tile_configs(need: Need, arch: ArchTraits) -> OpTileConfigs:
    """Returns the same with sgl-kernel's products where experts get many pairs."""
    by_triton, layer = triton_tile_configs(need, arch), layer_of(need, arch)
    few = max_tokens_where(lambda tokens: layer.pairs(tokens) / layer.num_experts < MIXED_ROWS)
    low = max_tokens_where(lambda tokens: layer.pairs(tokens) / layer.num_experts < TALL_ROWS)
    configs = (*up_to(by_triton.by_shape[None], few), *mixed_from(few, low))
    return replace(by_triton, by_shape={None: configs})


def mixed_from(few: float, low: float) -> Iterator[TileConfig]:
    """Yields the tile configs of the mixed products: blocks of 64 rows up to `low` tokens, of 128 beyond."""
    if low > few:
        yield TileConfig(low, MIXED, (({"BLOCK_M": 64},),), "few rows an expert")
    yield TileConfig(ANY, MIXED, (({"BLOCK_M": 128},),), "many rows an expert")


def up_to(configs: TileConfigs, max_tokens: float) -> Iterator[TileConfig]:
    """Yields the tile configs for up to `max_tokens` tokens; none for 0."""
    before = 0.0
    for config in configs:
        if before >= max_tokens:
            return
        yield replace(config, max_tokens=min(config.max_tokens, max_tokens))
        before = config.max_tokens


def tile_configs_of(layer: ExpertLayer, features: Collection[str], tuned: TunedTiles | None = None) -> TileConfigs:
    """Returns the tile configs of Triton's products on GPUs with these features (of ArchTraits)."""
    few = max_tokens_where(lambda tokens: few_pairs(_expected(layer, tokens, tuned), layer.num_experts))
    grouped = _table_configs(layer, features) if tuned is None else _file_configs(layer, tuned)
    configs = [TileConfig(few, FEW, (_few_tiles(layer),), "PAIR_TILES")] if few else []
    for config in grouped:
        if config.max_tokens > (configs[-1].max_tokens if configs else 0):
            configs.append(config)
    return joined(configs)


def _expected(layer: ExpertLayer, tokens: int, tuned: TunedTiles | None) -> int:
    """Returns the pairs that decide about grouping. A tuning file is asked for the tokens of one group of ranks."""
    return layer.pairs(tokens) if tuned is None else -(-tokens // layer.groups) * layer.top_k


def _table_configs(layer: ExpertLayer, features: Collection[str]) -> Iterator[TileConfig]:
    kind = layer.product.tile_kind
    wide = "wgmma" in features and kind in WIDE_TILES
    assert wide or kind in TILES
    for row in tile_rows(kind, features):
        if layer.intermediate % row.whole == 0:
            why = f"{'WIDE_TILES' if wide else 'TILES'}[{kind!r}]"
            yield TileConfig(layer.tokens_with(row.max_rows_per_expert), MANY, candidates_of(row, kind), why)


def _file_configs(layer: ExpertLayer, tuned: TunedTiles) -> Iterator[TileConfig]:
    """Yields a tile config per entry of a tuning file; each number of tokens gets the closest entry, of two the
    smaller."""
    counts = sorted(tuned.by_tokens)
    for count, following in zip(counts, [*counts[1:], None], strict=True):
        pair = tuned.by_tokens[count]
        candidates = candidates_of(MoeTiles(ANY, pair.gate_up, pair.down), layer.product.tile_kind)
        max_tokens = ANY if following is None else (count + following) // 2 * layer.groups
        yield TileConfig(max_tokens, MANY, candidates, tuned.path.name)


def candidates_of(tiles: MoeTiles, kind: str) -> tuple[Tiles, ...]:
    """Returns the tiles with their fallbacks, as (gate_up, down) pairs."""
    return tuple((candidate.gate_up, candidate.down) for candidate in (tiles, *smaller_tiles(tiles, kind)))


def forced(tiles: MoeTiles, product: ScaledProduct) -> TileConfigs:
    """Returns a tile config with these tiles for every step, however few pairs it has; for tuning and tests."""
    return (TileConfig(ANY, MANY, candidates_of(tiles, product.tile_kind), "forced"),)


def _few_tiles(layer: ExpertLayer) -> Tiles:
    """Returns the tiles of both launches. EARLY: tiles of the second launch that are loaded before the first has
    ended."""
    product, (up_tile, down_tile) = layer.product, PAIR_TILES[layer.product.pair_kind]
    up = pair_cut(product, up_tile, layer.intermediate, layer.hidden)
    down = pair_cut(product, down_tile, layer.hidden, layer.intermediate)
    steps = -(-layer.intermediate // down["COLS"])
    return up, down | {"EARLY": early_tiles(product.kind, down["COLS"], layer.top_k * steps)}
