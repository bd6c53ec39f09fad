"""Tiles of products with a quantized weight, and the tile configs that are cut of them. Data only: no torch, no Triton.

Every tile of TILES fits the 101,376 bytes of shared memory of the smallest GPUs, without spills: the ledger proves it.
Keys: `table_of` a product.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from sglang.srt.configs.quant_scheme import ALIGNED, SCHEMES, Scheme
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.conditions import SCALED_MM_ROWS
from sglang.srt.kernels.scaled_product import ScaledProduct, product_of
from sglang.srt.kernels.spec import Need, Tile
from sglang.srt.kernels.tile_configs import ANY, OpTileConfigs, Shape, TileConfig, TileConfigs, max_tokens_where
from sglang.srt.layers.moe.fused_moe_triton.tiles import PairTile, pair_cut

ScaledTile = dict[str, int]


@dataclass(frozen=True, slots=True)
class LinearTile:
    """The tile for up to `max_rows` rows of x."""

    max_rows: float
    tile: ScaledTile


def _tile(m: int, n: int, k: int, group: int, warps: int, stages: int) -> ScaledTile:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group, "num_warps": warps, "num_stages": stages}


# Few rows are read through narrow tiles, many at a time; K is split besides until all SMs read.
TILES: Mapping[str, tuple[LinearTile, ...]] = {
    "scaled": (
        LinearTile(16, _tile(16, 32, 256, 1, 4, 4)),
        LinearTile(32, _tile(32, 64, 128, 1, 4, 4)),
        LinearTile(128, _tile(64, 64, 128, 8, 4, 4)),
        LinearTile(512, _tile(64, 128, 128, 8, 4, 3)),
        LinearTile(ANY, _tile(128, 128, 128, 8, 8, 3)),
    ),
    "group128": (
        LinearTile(16, _tile(16, 32, 128, 1, 4, 5)),
        LinearTile(32, _tile(32, 64, 128, 1, 4, 4)),
        LinearTile(128, _tile(64, 64, 128, 8, 4, 4)),
        LinearTile(512, _tile(64, 128, 128, 8, 8, 3)),
        LinearTile(ANY, _tile(128, 128, 64, 8, 8, 4)),
    ),
    "planes": (
        LinearTile(16, _tile(16, 64, 128, 1, 4, 4)),
        LinearTile(32, _tile(32, 64, 128, 1, 4, 4)),
        LinearTile(128, _tile(64, 64, 128, 8, 8, 3)),
        LinearTile(512, _tile(64, 128, 128, 8, 8, 3)),
        LinearTile(ANY, _tile(128, 128, 128, 8, 8, 2)),
    ),
    "mx": (
        LinearTile(16, _tile(16, 64, 128, 1, 4, 4)),
        LinearTile(32, _tile(32, 64, 128, 1, 4, 4)),
        LinearTile(128, _tile(64, 64, 128, 8, 4, 3)),
        LinearTile(512, _tile(64, 128, 128, 8, 8, 3)),
        LinearTile(ANY, _tile(128, 128, 128, 8, 8, 3)),
    ),
    # As "planes", whose weights take half of the shared memory.
    "widened": (
        LinearTile(16, _tile(16, 64, 128, 1, 4, 4)),
        LinearTile(32, _tile(32, 64, 128, 1, 4, 4)),
        LinearTile(128, _tile(64, 64, 128, 8, 8, 3)),
        LinearTile(512, _tile(64, 128, 64, 8, 8, 3)),
        LinearTile(ANY, _tile(128, 128, 64, 8, 8, 3)),
    ),
}

# With wgmma and more shared memory. wgmma takes 64 rows at a time of its first operand: where x has fewer, the weights
# are that operand.
WIDE_TILES: Mapping[str, tuple[LinearTile, ...]] = {
    "scaled": (
        LinearTile(16, _tile(16, 64, 256, 1, 4, 4)),
        LinearTile(32, _tile(32, 64, 128, 1, 4, 4)),
        LinearTile(128, _tile(64, 64, 128, 8, 4, 4)),
        LinearTile(512, _tile(64, 128, 128, 8, 4, 4)),
        LinearTile(ANY, _tile(128, 256, 128, 8, 8, 4)),
    ),
    "group128": (
        LinearTile(16, _tile(16, 64, 128, 1, 4, 5)),
        LinearTile(32, _tile(32, 64, 128, 1, 4, 4)),
        LinearTile(128, _tile(64, 64, 128, 8, 4, 4)),
        LinearTile(512, _tile(64, 128, 128, 8, 4, 4)),
        LinearTile(ANY, _tile(128, 128, 128, 8, 8, 4)),
    ),
    "mx": (
        *TILES["mx"][:3],
        LinearTile(512, _tile(64, 128, 128, 8, 8, 2)),
        LinearTile(ANY, _tile(128, 128, 128, 8, 8, 2)),
    ),
}

FEW_TILES: Mapping[tuple[str, int], PairTile] = {
    ("scaled", 8): PairTile(2048, 1024, 2, 4, early=8),
    ("group128", 8): PairTile(4096, 1024, 2, 4, early=8),
    ("mx", 8): PairTile(256, 256, 8, 1, early=8),
    ("mx", 4): PairTile(1024, 512, 4, 1),
    ("planes", 4): PairTile(1024, 1024, 4, 1),
    ("pairs", 4): PairTile(2048, 1024, 2, 1, 1024),
}
"""Tiles by kind ("pairs": planes of pairs of columns) and bits of a weight, without matrix instructions. Those of four
bits
and mxfp8 are small, as those of few pairs of experts, and why; the first two have more columns in one step: more of a
row is asked for before the kernel waits (measured on an H200, benchmark/results)."""
FEW_ROWS = 2
"""Up to so many rows are multiplied without matrix instructions, each for itself, and x stays in 16 bits."""
SPLIT_ROWS = 64
"""Up to so many rows K may be split for reading alone: with more, the partial sums would cost what the weights do."""
MAX_SPLITS = 8
MIN_SPLIT_COLS = 512
NARROW_ROWS = 512
"""Up to so many rows a product of few columns, whose tiles leave SMs idle, takes the tile of fewer columns, and K is
split until all SMs have one program or a few have two."""
NARROW_COLS = 1024
"""The columns that a split of K keeps there."""
NARROW_KINDS = frozenset({"scaled", "group128", "mx", "widened"})
"""The kinds whose tile for up to 128 rows has half as many columns and does as well otherwise."""


def table_of(product: ScaledProduct) -> str:
    """Returns the key of TILES for a product."""
    return product.tile_kind if product.weight_only else product.kind


def tile_rows(kind: str, features: Collection[str]) -> tuple[LinearTile, ...]:
    """Returns the tiles of a kind on a GPU with these features (of ArchTraits)."""
    return WIDE_TILES[kind] if "wgmma" in features and kind in WIDE_TILES else TILES[kind]


def _num_tiles(tile: ScaledTile, num_rows: int, num_cols: int) -> int:
    return -(-num_rows // tile["BLOCK_M"]) * -(-num_cols // tile["BLOCK_N"])


def smaller_tiles(tile: ScaledTile, kind: str) -> tuple[ScaledTile, ...]:
    """Returns the fallbacks if `tile` does not launch: the tiles of every GPU with no larger result block, largest
    first, and last the one with the least shared memory."""

    def fits(other: ScaledTile) -> bool:
        fewer_rows = other["BLOCK_M"] <= tile["BLOCK_M"]
        return fewer_rows and other["BLOCK_M"] * other["BLOCK_N"] <= tile["BLOCK_M"] * tile["BLOCK_N"]

    candidates = (*(row.tile for row in reversed(TILES[kind])), last_resort(kind))
    return tuple(candidate for candidate in candidates if candidate != tile and fits(candidate))


def last_resort(kind: str) -> ScaledTile:
    """Returns the smallest tile with two stages."""
    return TILES[kind][0].tile | {"num_stages": 2}


def swaps(tile: Tile, features: Collection[str]) -> bool:
    """Returns whether the weights are the first operand of the matrix instruction."""
    return "wgmma" in features and tile["BLOCK_M"] < 64 <= tile["BLOCK_N"]


def num_splits(num_rows: int, num_tiles: int, cols: int, num_sms: int, features: Collection[str] = ()) -> int:
    """Returns into how many parts K is split: for few rows so that two programs per SM read the weights, for up to
    NARROW_ROWS (without wgmma) so that every SM has work."""
    if num_rows <= SPLIT_ROWS:
        wanted, least = 2 * max(num_sms, 1) // num_tiles, MIN_SPLIT_COLS
    elif num_rows <= NARROW_ROWS and "wgmma" not in features:
        wanted, least = (12 * num_sms + 5 * num_tiles) // (10 * num_tiles), NARROW_COLS
    else:
        return 1
    return max(1, min(wanted, MAX_SPLITS, cols // least))


# --- tile configs
# ------------------------------------------------------------------------------------------------------------

FEW, MANY, LIBRARY = "few rows", "tiles", "torch"
"""Ways: without matrix instructions, by tiles, and by torch's scaled product."""


def triton_tile_configs(need: Need, arch: ArchTraits) -> OpTileConfigs:
    """Returns the tile configs of Triton's products for each of the need's weights."""
    scheme = SCHEMES[need.quant or ""]
    source = f"linear_tiles.{_source(table_of(product_of(scheme, arch.features)), arch.features)}"
    return OpTileConfigs({shape: tile_configs_of(scheme, shape, arch) for shape in _multiplied(need)}, source)


def library_tile_configs(need: Need, arch: ArchTraits) -> OpTileConfigs:
    """Returns the same with torch's scaled product for steps of at least SCALED_MM_ROWS tokens, if it supports the
    weight."""
    by_triton = triton_tile_configs(need, arch)
    by_shape = dict(by_triton.by_shape)
    for shape in _multiplied(need):
        if library_takes(SCHEMES[need.quant or ""], shape):
            by_shape[shape] = (*cut_at(by_shape[shape], SCALED_MM_ROWS - 1), TileConfig(ANY, LIBRARY))
    return replace(by_triton, by_shape=by_shape)


def _multiplied(need: Need) -> tuple[Shape, ...]:
    """Returns the need's shapes as products see them, since a bias may also be added after the all-reduce."""
    shapes = ((rows, cols, kept) for rows, cols, bias in need.shapes for kept in (False, bias))
    return tuple(dict.fromkeys(shapes))


def library_takes(scheme: Scheme, shape: Shape) -> bool:
    """Returns whether the library supports the product: scales in blocks allow no bias and must divide the columns."""
    rows, cols, bias = shape
    blocks = scheme.group[1]
    return not rows % ALIGNED and not cols % ALIGNED and not (blocks and (cols % blocks or bias))


def cut_at(configs: TileConfigs, max_tokens: int) -> TileConfigs:
    """Returns the tile configs for up to `max_tokens` tokens."""
    kept = [config for config in configs if config.max_tokens < max_tokens]
    return (*kept, replace(configs[len(kept)], max_tokens=max_tokens))


def tile_configs_of(scheme: Scheme, shape: Shape, arch: ArchTraits) -> TileConfigs:
    """Returns the tile configs of one weight."""
    rows, cols, _ = shape
    product, features = product_of(scheme, arch.features), arch.features
    kind = table_of(product)
    table, why = tile_rows(kind, features), _source(kind, features)
    configs = [TileConfig(FEW_ROWS, FEW, ((few_cut(product, scheme.bits, rows, cols),),), "FEW_TILES")]
    narrower = table[0].tile
    for row in table:
        idle = _max_idle_tokens(kind, row, rows, arch)
        if idle > configs[-1].max_tokens:
            configs.append(
                TileConfig(min(idle, row.max_rows), MANY, _candidates(narrower, kind), f"{why}, SMs would idle")
            )
        if row.max_rows > configs[-1].max_tokens:
            configs.append(TileConfig(row.max_rows, MANY, _candidates(row.tile, kind), why))
        narrower = row.tile
    return tuple(configs)


def _source(kind: str, features: Collection[str]) -> str:
    wide = "wgmma" in features and kind in WIDE_TILES
    return f"{'WIDE_TILES' if wide else 'TILES'}[{kind!r}]"


def _candidates(tile: ScaledTile, kind: str) -> tuple[tuple[ScaledTile], ...]:
    return tuple((candidate,) for candidate in (tile, *smaller_tiles(tile, kind)))


def _max_idle_tokens(kind: str, row: LinearTile, num_cols: int, arch: ArchTraits) -> float:
    """The most tokens for which the tile of a row gives a result of `num_cols` columns fewer blocks than the GPU has
    SMs, so that the tile before it, of fewer columns, serves; 0 where that is no help."""
    if kind not in NARROW_KINDS or "wgmma" in arch.features or not 2 * SPLIT_ROWS < row.max_rows <= NARROW_ROWS:
        return 0
    return max_tokens_where(lambda tokens: _num_tiles(row.tile, tokens, num_cols) < arch.num_sms)


def few_tile(product: ScaledProduct, bits: int) -> PairTile:
    """Returns the tile of products with few rows. bits: of a weight's code."""
    return FEW_TILES["pairs" if product.in_pairs else product.kind, bits]


def few_cut(product: ScaledProduct, bits: int, rows: int, cols: int) -> ScaledTile:
    """Returns the tile of a weight [rows, cols]. EARLY: steps whose weights are loaded before the kernel waits for x
    (PDL)."""
    pair_tile = few_tile(product, bits)
    tile = pair_cut(product, pair_tile, rows, cols)
    return tile | {"EARLY": min(early_steps(pair_tile, tile["COLS"]), -(-cols // tile["COLS"]))}


def early_steps(tile: PairTile, step: int) -> int:
    """The steps of `step` columns whose weights are loaded ahead at most. Narrow ones have more rows, and so more
    addresses than there are registers for."""
    return tile.early if step >= 256 else 0
