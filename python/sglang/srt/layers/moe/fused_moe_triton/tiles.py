"""Tiles of the grouped products. Data only: no torch, no Triton.

All of them fit 101,376 bytes of shared memory, so every GPU may use them. A row serves batches with up to
`max_rows_per_expert` pairs per expert on average.
"""

from __future__ import annotations

from dataclasses import dataclass

Tile = dict[str, int]


@dataclass(frozen=True, slots=True)
class MoeTiles:
    max_rows_per_expert: float
    gate_up: Tile
    down: Tile


def _tile(m: int, n: int, k: int, group: int, warps: int, stages: int) -> Tile:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group, "num_warps": warps, "num_stages": stages}


# gate_up holds two BLOCK_N wide operands and accumulators.
TILES: tuple[MoeTiles, ...] = (
    MoeTiles(12, _tile(16, 32, 128, 1, 4, 4), _tile(16, 64, 128, 1, 4, 4)),
    MoeTiles(24, _tile(32, 64, 64, 1, 4, 4), _tile(32, 128, 64, 1, 4, 4)),
    MoeTiles(96, _tile(64, 64, 64, 8, 4, 3), _tile(64, 128, 64, 8, 4, 3)),
    MoeTiles(float("inf"), _tile(128, 64, 64, 8, 8, 3), _tile(128, 128, 64, 8, 8, 3)),
)

# Few pairs: BLOCK_K elements of BLOCK_N rows at a time, without shared memory.
PAIR_GATE_UP: Tile = {"BLOCK_N": 4, "BLOCK_K": 512, "num_warps": 4, "num_stages": 2}
PAIR_DOWN: Tile = {"BLOCK_N": 8, "BLOCK_K": 256, "num_warps": 4, "num_stages": 2}


def tiles_for(num_pairs: int, num_experts: int) -> MoeTiles:
    rows = num_pairs / num_experts
    return next(tiles for tiles in TILES if rows <= tiles.max_rows_per_expert)


def few_pairs(num_pairs: int, num_experts: int) -> bool:
    """Whether so few pairs meet at one expert that grouping them would save little reading."""
    return num_pairs <= num_experts // 2
