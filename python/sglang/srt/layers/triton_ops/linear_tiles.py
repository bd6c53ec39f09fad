"""Tiles of products with a quantized weight. Data only: no torch, no Triton.

Every tile of TILES fits the 101,376 bytes of shared memory of the smallest GPUs, without spills: the ledger proves it.
Keys: the kinds of `scaled_dot.ScaledProduct`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sglang.srt.layers.moe.fused_moe_triton.tiles import PairTile

ScaledTile = dict[str, int]


@dataclass(frozen=True, slots=True)
class LinearTile:
    """For up to `max_rows` rows of x."""

    max_rows: float
    tile: ScaledTile


def _tile(m: int, n: int, k: int, group: int, warps: int, stages: int) -> ScaledTile:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group, "num_warps": warps, "num_stages": stages}


_ANY = float("inf")

# Few rows are read through narrow tiles, many at a time; K is split besides until all SMs read.
TILES: Mapping[str, tuple[LinearTile, ...]] = {
    "scaled": (
        LinearTile(16, _tile(16, 32, 256, 1, 4, 4)),
        LinearTile(32, _tile(32, 64, 128, 1, 4, 4)),
        LinearTile(128, _tile(64, 64, 128, 8, 4, 4)),
        LinearTile(512, _tile(64, 128, 128, 8, 4, 3)),
        LinearTile(_ANY, _tile(128, 128, 128, 8, 8, 3)),
    ),
    "group128": (
        LinearTile(16, _tile(16, 32, 128, 1, 4, 5)),
        LinearTile(32, _tile(32, 64, 128, 1, 4, 4)),
        LinearTile(128, _tile(64, 64, 128, 8, 4, 4)),
        LinearTile(512, _tile(64, 128, 128, 8, 8, 3)),
        LinearTile(_ANY, _tile(128, 128, 64, 8, 8, 4)),
    ),
    "planes": (
        LinearTile(16, _tile(16, 64, 128, 1, 4, 4)),
        LinearTile(32, _tile(32, 64, 128, 1, 4, 4)),
        LinearTile(128, _tile(64, 64, 128, 8, 8, 3)),
        LinearTile(512, _tile(64, 128, 128, 8, 8, 3)),
        LinearTile(_ANY, _tile(128, 128, 128, 8, 8, 2)),
    ),
    "mx": (
        LinearTile(16, _tile(16, 64, 128, 1, 4, 4)),
        LinearTile(32, _tile(32, 64, 128, 1, 4, 4)),
        LinearTile(128, _tile(64, 64, 128, 8, 4, 3)),
        LinearTile(512, _tile(64, 128, 128, 8, 8, 3)),
        LinearTile(_ANY, _tile(128, 128, 128, 8, 8, 3)),
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
        LinearTile(_ANY, _tile(128, 256, 128, 8, 8, 4)),
    ),
    "group128": (
        LinearTile(16, _tile(16, 64, 128, 1, 4, 5)),
        LinearTile(32, _tile(32, 64, 128, 1, 4, 4)),
        LinearTile(128, _tile(64, 64, 128, 8, 4, 4)),
        LinearTile(512, _tile(64, 128, 128, 8, 4, 4)),
        LinearTile(_ANY, _tile(128, 128, 128, 8, 8, 4)),
    ),
    "mx": (
        *TILES["mx"][:3],
        LinearTile(512, _tile(64, 128, 128, 8, 8, 2)),
        LinearTile(_ANY, _tile(128, 128, 128, 8, 8, 2)),
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
"""By kind ("pairs": planes of pairs of columns) and bits of a weight, without matrix instructions. Those of four bits
and mxfp8 are small, as those of few pairs of experts, and why; the first two have more columns in one step: more of a
row is asked for before the kernel waits (measured on an H200, docs/results)."""
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
"""That a split of K keeps there."""
NARROW_KINDS = frozenset({"scaled", "group128", "mx"})
"""Of which the tile for up to 128 rows has half as many columns and does as well otherwise."""


def tile_rows(kind: str, features: Collection[str]) -> tuple[LinearTile, ...]:
    """The rows of a kind on a GPU with these features (of ArchTraits)."""
    return WIDE_TILES[kind] if "wgmma" in features and kind in WIDE_TILES else TILES[kind]


def tile_for(
    kind: str, num_rows: int, features: Collection[str] = (), num_cols: int = 0, num_sms: int = 0
) -> ScaledTile:
    """For a result [num_rows, num_cols] on a GPU of `num_sms`; without them by the rows alone."""
    rows = tile_rows(kind, features)
    at = next(i for i, row in enumerate(rows) if num_rows <= row.max_rows)
    tile = rows[at].tile
    narrow = kind in NARROW_KINDS and "wgmma" not in features and 2 * SPLIT_ROWS < num_rows <= NARROW_ROWS
    return rows[at - 1].tile if narrow and _num_tiles(tile, num_rows, num_cols) < num_sms else tile


def _num_tiles(tile: ScaledTile, num_rows: int, num_cols: int) -> int:
    return -(-num_rows // tile["BLOCK_M"]) * -(-num_cols // tile["BLOCK_N"])


def smaller_tiles(tile: ScaledTile, kind: str) -> tuple[ScaledTile, ...]:
    """What a launch steps down to should `tile` not fit after all: the tiles of every GPU that give no larger block of
    the result, largest first, and the last resort, which takes less shared memory than any other."""

    def fits(other: ScaledTile) -> bool:
        fewer_rows = other["BLOCK_M"] <= tile["BLOCK_M"]
        return fewer_rows and other["BLOCK_M"] * other["BLOCK_N"] <= tile["BLOCK_M"] * tile["BLOCK_N"]

    rungs = (*(row.tile for row in reversed(TILES[kind])), last_resort(kind))
    return tuple(rung for rung in rungs if rung != tile and fits(rung))


def last_resort(kind: str) -> ScaledTile:
    """The smallest tile with two stages."""
    return TILES[kind][0].tile | {"num_stages": 2}


def swaps(tile: ScaledTile, features: Collection[str]) -> bool:
    """Whether the weights are the first operand of the matrix instruction."""
    return "wgmma" in features and tile["BLOCK_M"] < 64 <= tile["BLOCK_N"]


def num_splits(num_rows: int, num_tiles: int, cols: int, num_sms: int, features: Collection[str] = ()) -> int:
    """Into how many parts K is split: for few rows so that two programs an SM read the weights, for up to NARROW_ROWS
    (without wgmma) so that every SM has something to do."""
    if num_rows <= SPLIT_ROWS:
        wanted, least = 2 * max(num_sms, 1) // num_tiles, MIN_SPLIT_COLS
    elif num_rows <= NARROW_ROWS and "wgmma" not in features:
        wanted, least = (12 * num_sms + 5 * num_tiles) // (10 * num_tiles), NARROW_COLS
    else:
        return 1
    return max(1, min(wanted, MAX_SPLITS, cols // least))
