"""Tiles of the experts' products. Data only: imports no torch, no Triton.

A row serves batches with up to `max_rows_per_expert` pairs per expert on average. Each row of TILES fits the 101,376
bytes of shared memory of the smallest GPUs, without spills (the ledger proves it); WIDE_TILES are for GPUs with wgmma
and more shared memory. Keys of both: `scaled_dot.ScaledProduct.tile_kind`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sglang.srt.configs.quant_scheme import PLANE_COLUMNS
from sglang.srt.kernels.scaled_product import ScaledProduct

GroupedTile = dict[str, int]

FEW, MANY, MIXED = "few pairs", "tiles", "sgl_kernel"
"""Variants of a tile config: pair by pair, grouped with Triton, and grouped with sgl-kernel's products."""
TILE_KEYS = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "num_warps", "num_stages")


@dataclass(frozen=True, slots=True)
class MoeTiles:
    """The tiles of both products for a range of pairs per expert."""

    max_rows_per_expert: float
    gate_up: GroupedTile
    down: GroupedTile
    whole: int = 1
    """Required divisor of the experts' intermediate dims; otherwise too much of a block would be empty."""


def tile(m: int, n: int, k: int, group: int, warps: int, stages: int) -> GroupedTile:
    """Returns a tile from its numbers, in the order of TILE_KEYS."""
    return dict(zip(TILE_KEYS, (m, n, k, group, warps, stages), strict=True))


def swaps(tile: GroupedTile, kind: str, features: Collection[str]) -> bool:
    """Returns whether the weights are the tall operand (M) of the matrix instruction. wgmma takes 64 rows of that
    operand and as few as 8 of the other, so that few tokens waste little; and it reads that operand from registers,
    where planes are dequantized."""
    return "wgmma" in features and tile["BLOCK_N"] >= 64 and (tile["BLOCK_M"] < 64 or kind == "planes")


_ANY = float("inf")

# gate_up holds two BLOCK_N wide operands and accumulators. "planes": every warp widens the weights that it multiplies,
# so that BLOCK_N above BLOCK_M has them widened once and not by each.
TILES: Mapping[str, tuple[MoeTiles, ...]] = {
    "plain": (
        MoeTiles(12, tile(16, 32, 128, 1, 4, 4), tile(16, 64, 128, 1, 4, 4)),
        MoeTiles(27, tile(32, 64, 64, 1, 4, 4), tile(32, 128, 64, 1, 4, 4)),
        MoeTiles(56, tile(64, 64, 64, 8, 4, 3), tile(64, 128, 64, 8, 4, 3)),
        MoeTiles(_ANY, tile(128, 64, 64, 8, 8, 3), tile(128, 128, 64, 8, 8, 3)),
    ),
    "scaled": (
        MoeTiles(12, tile(16, 64, 128, 1, 4, 4), tile(16, 128, 128, 1, 4, 4)),
        MoeTiles(27, tile(32, 64, 128, 1, 4, 4), tile(32, 128, 128, 1, 4, 3)),
        MoeTiles(56, tile(64, 64, 128, 8, 4, 3), tile(64, 128, 128, 8, 4, 3)),
        MoeTiles(_ANY, tile(128, 64, 128, 8, 8, 3), tile(128, 128, 128, 8, 8, 3)),
    ),
    "group128": (
        MoeTiles(12, tile(16, 64, 128, 1, 4, 4), tile(16, 128, 128, 1, 4, 4)),
        MoeTiles(27, tile(32, 64, 128, 1, 4, 4), tile(32, 128, 128, 1, 4, 3)),
        MoeTiles(56, tile(64, 64, 128, 8, 8, 3), tile(64, 128, 128, 8, 8, 3)),
        MoeTiles(_ANY, tile(128, 64, 64, 8, 8, 4), tile(128, 128, 64, 8, 8, 4)),
    ),
    "planes": (
        MoeTiles(12, tile(16, 64, 128, 1, 4, 4), tile(16, 128, 128, 1, 4, 4)),
        MoeTiles(27, tile(32, 64, 128, 1, 4, 3), tile(32, 128, 128, 1, 4, 3)),
        MoeTiles(_ANY, tile(64, 128, 128, 8, 8, 3), tile(64, 128, 128, 8, 8, 3)),
    ),
    # As "planes", whose weights take half of the shared memory.
    "widened": (
        MoeTiles(12, tile(16, 64, 128, 1, 4, 3), tile(16, 128, 128, 1, 4, 3)),
        MoeTiles(27, tile(32, 64, 128, 1, 4, 3), tile(32, 128, 128, 1, 4, 3)),
        MoeTiles(_ANY, tile(64, 128, 64, 8, 8, 3), tile(64, 128, 64, 8, 8, 3)),
    ),
    "mx": (
        MoeTiles(12, tile(16, 64, 128, 1, 4, 4), tile(16, 128, 128, 1, 4, 4)),
        MoeTiles(27, tile(32, 64, 128, 1, 4, 3), tile(32, 128, 128, 1, 4, 3)),
        MoeTiles(56, tile(64, 64, 128, 8, 8, 2), tile(64, 128, 128, 8, 8, 2)),
        MoeTiles(_ANY, tile(128, 32, 128, 8, 8, 3), tile(128, 128, 128, 8, 8, 2)),
    ),
    # Packed e2m1 beside e4m3: each warp converts what it multiplies, which above 32 rows are the same weights for most,
    # unless the block has more columns than rows.
    "mx_e2m1": (
        MoeTiles(12, tile(16, 64, 128, 1, 4, 4), tile(16, 128, 128, 1, 4, 4)),
        MoeTiles(36, tile(32, 64, 128, 1, 4, 3), tile(32, 128, 128, 1, 4, 3)),
        MoeTiles(_ANY, tile(64, 128, 128, 8, 8, 2), tile(64, 128, 128, 8, 4, 3)),
    ),
    "mx4": (
        MoeTiles(12, tile(16, 64, 256, 1, 4, 3), tile(16, 128, 128, 1, 4, 4)),
        MoeTiles(27, tile(32, 64, 128, 1, 4, 4), tile(32, 128, 128, 1, 4, 4)),
        MoeTiles(56, tile(64, 64, 128, 8, 8, 3), tile(64, 128, 128, 8, 8, 3)),
        MoeTiles(_ANY, tile(128, 64, 128, 8, 8, 3), tile(128, 128, 128, 8, 8, 3)),
    ),
}

# The tiles for many rows were measured on an H200 (benchmark/results/experts.md#tiles-for-many-rows). "group128":
# while one program scales its partial sums, another of four warps on the same SM multiplies; beyond 384 rows an expert
# such small blocks would ask the L2 for more than it gives.
WIDE_TILES: Mapping[str, tuple[MoeTiles, ...]] = {
    "plain": (
        MoeTiles(12, tile(16, 64, 128, 1, 4, 3), tile(16, 128, 128, 1, 4, 3)),
        MoeTiles(27, tile(32, 64, 64, 1, 4, 4), tile(32, 128, 64, 1, 4, 4)),
        MoeTiles(56, tile(64, 128, 64, 8, 8, 4), tile(64, 256, 64, 8, 8, 4)),
        MoeTiles(_ANY, tile(128, 128, 64, 8, 8, 4), tile(128, 256, 64, 8, 8, 4)),
    ),
    "scaled": (
        MoeTiles(6, tile(16, 64, 256, 1, 4, 4), tile(16, 128, 128, 1, 4, 4), whole=128),
        MoeTiles(12, tile(16, 64, 128, 1, 4, 4), tile(16, 128, 64, 1, 4, 4)),
        MoeTiles(27, tile(32, 64, 128, 1, 4, 4), tile(32, 128, 64, 1, 4, 4)),
        MoeTiles(56, tile(64, 64, 128, 8, 4, 4), tile(64, 128, 64, 8, 4, 4)),
        MoeTiles(_ANY, tile(128, 128, 128, 8, 8, 4), tile(128, 256, 128, 8, 8, 4), whole=128),
        MoeTiles(_ANY, tile(128, 64, 128, 8, 8, 4), tile(128, 256, 64, 8, 8, 4)),
    ),
    "group128": (
        MoeTiles(12, tile(16, 128, 128, 1, 4, 3), tile(16, 128, 128, 1, 4, 4)),
        MoeTiles(27, tile(32, 64, 128, 1, 4, 4), tile(32, 128, 128, 1, 4, 4)),
        MoeTiles(384, tile(64, 64, 128, 8, 4, 4), tile(64, 128, 128, 8, 4, 4)),
        MoeTiles(_ANY, tile(128, 128, 128, 8, 8, 3), tile(128, 128, 128, 8, 8, 4)),
    ),
    "planes": (
        MoeTiles(12, tile(16, 64, 128, 1, 4, 4), tile(16, 64, 128, 1, 4, 4)),
        MoeTiles(27, tile(32, 64, 128, 1, 4, 4), tile(32, 128, 128, 1, 4, 3)),
        MoeTiles(56, tile(64, 64, 128, 8, 4, 4), tile(64, 128, 128, 8, 8, 4)),
        MoeTiles(_ANY, tile(128, 64, 128, 8, 4, 3), tile(128, 128, 128, 8, 8, 3)),
    ),
}


@dataclass(frozen=True, slots=True)
class PairTile:
    """The tile of products for few pairs: `size` weights of each matrix at a time, at most `max_cols` of a row, in
    `unroll` steps at once. The weights of the first `early` steps are loaded before the previous kernel has ended
    (PDL)."""

    size: int
    max_cols: int
    unroll: int
    num_warps: int = 4
    ragged_cols: int = 512
    early: int = 0

    def cut(self, cols: int, multiple: int) -> GroupedTile:
        """Returns the tile for rows of `cols` weights: its columns per step are a multiple of `multiple` that divides
        them, or, if that is small, at most `ragged_cols`."""
        dividing = min(self.max_cols, cols & -cols)
        step = dividing if dividing >= 256 else min(self.max_cols, self.ragged_cols, 1 << (cols - 1).bit_length())
        step = max(step, multiple)
        rows = max(1, self.size // step)
        return {"BLOCK_N": rows, "COLS": step, "UNROLL": self.unroll, "num_warps": self.num_warps}


def pair_cut(product: ScaledProduct, tile: PairTile, rows: int, cols: int) -> GroupedTile:
    """Returns the tile for a matrix [rows, cols]."""
    multiple = PLANE_COLUMNS if product.four_bit else 128 if product.kind == "group128" else 16
    cut = tile.cut(cols, multiple)
    if product.kind == "group128":  # a tile's rows share their scales
        while 128 % cut["BLOCK_N"] or rows % cut["BLOCK_N"]:
            cut["BLOCK_N"] //= 2
    return cut


PAIR_TILES: Mapping[str, tuple[PairTile, PairTile]] = {
    "16-bit": (PairTile(256, 256, 4, 1), PairTile(256, 256, 8, 1)),
    "e4m3": (PairTile(256, 256, 4, 1), PairTile(512, 256, 8, 1)),
    "int8": (PairTile(256, 256, 4, 1), PairTile(512, 256, 8, 1)),
    "mxfp8": (PairTile(256, 256, 4, 1), PairTile(512, 256, 8, 1)),
    "planes": (PairTile(1024, 1024, 1, 1), PairTile(2048, 256, 4, 4)),
    "pairs": (PairTile(2048, 1024, 1, 1, 1024), PairTile(2048, 1024, 1, 1, 1024)),
    "packed": (PairTile(512, 512, 4, 1), PairTile(512, 256, 4, 1)),
}
"""(gate and up, down); "packed": two e2m1 to a byte as published.

Mostly one warp for one or two rows: then x is loaded in the threads that need it, nothing goes through shared memory,
and many small programs have more loads on their way than few large ones. Measured on an H200, "pairs" on an H100, too
(benchmark/results).
"""


EARLY_TILES: Mapping[str, int] = {"plain": 16, "group128": 16}
"""Number of tiles of 256 columns, by kind of product, that the second product of few pairs loads before the first has
ended (PDL). Kinds with a scale per row would spill registers; four-bit weights are loaded where they are multiplied."""


def early_tiles(kind: str, step: int, num_tiles: int) -> int:
    """The early ones of `num_tiles` tiles of `step` columns. Narrow ones have more rows, and so more addresses."""
    return min(EARLY_TILES.get(kind, 0) * step // 256, num_tiles)


def tile_rows(kind: str, features: Collection[str]) -> tuple[MoeTiles, ...]:
    """Returns the tiles of a kind on a GPU with these features (of ArchTraits)."""
    return WIDE_TILES[kind] if "wgmma" in features and kind in WIDE_TILES else TILES[kind]


def smaller_tiles(tiles: MoeTiles, kind: str) -> tuple[MoeTiles, ...]:
    """The tiles to which a launch steps down should `tiles` (of a table or a tuning file) not fit: the tiles of every
    GPU with as many rows or fewer, largest first. Small blocks have more stages, so that they do not always take less
    shared memory than large ones: the last resort does."""
    rows = (row for row in reversed(TILES[kind]) if row.gate_up["BLOCK_M"] <= tiles.gate_up["BLOCK_M"])
    candidates = (*rows, last_resort(kind))
    return tuple(row for row in candidates if (row.gate_up, row.down) != (tiles.gate_up, tiles.down))


def last_resort(kind: str) -> MoeTiles:
    """Returns the smallest tiles with two stages."""
    smallest = TILES[kind][0]
    return MoeTiles(_ANY, smallest.gate_up | {"num_stages": 2}, smallest.down | {"num_stages": 2})


FEW_PAIRS = 0.4
"""Pairs for each expert up to which they are not grouped. On an H200 0.25 was faster without grouping and 0.5 with it
in bf16 and fp8 128x128, and 0.4 without it in fp8 per channel."""


def few_pairs(num_pairs: int, num_experts: int) -> bool:
    """Returns whether so few pairs meet at one expert that grouping them would save little reading."""
    return num_pairs <= FEW_PAIRS * num_experts
