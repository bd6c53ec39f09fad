"""The lock files: what every tile of every kernel costs on an architecture, measured by compiling it. No torch, no Triton.

`sm120.lock.json` holds sm_120 and sm_121, `sm90.lock.json` sm_90. A row is one (op, variant, tile); its value gives for
each "triton version/architecture" the shared memory, registers, spilled bytes, stack bytes and matrix instructions.
The key of an attention variant starts with `variant_prefix(need)`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.spec import Need, Tile, TileRecord
from sglang.srt.kernels.tiles import attention_tiles

LOCK_DIR = Path(__file__).parent
LOCK_OF_ARCH: Mapping[str, str] = {"sm_120": "sm120", "sm_121": "sm120", "sm_90": "sm90"}
"""Architectures that we verify. Any other one is judged by sm_120's rows, whose limit is the smallest."""
PROXY_ARCH = "sm_120"

_LAUNCH_ONLY = frozenset({"ctas_per_sm", "waves"})
_SHORT = {"num_warps": "w", "num_stages": "s"}

Measurement = tuple[int, int, int, int, tuple[str, ...]]
"""Shared bytes, registers, spilled bytes, stack bytes, matrix instructions."""


def tile_key(tile: Tile) -> str:
    """"M64 N32 w4 s2": the parameters that the compiler sees. Tiles that differ in others share a row."""
    parts = [
        f"{_SHORT.get(name) or name.removeprefix('BLOCK_').removeprefix('SIZE_')}{value}"
        for name, value in sorted(tile.items())
        if name not in _LAUNCH_ONLY
    ]
    return " ".join(parts)


def variant_prefix(need: Need) -> str:
    """What the keys of all variants that can serve `need` start with; ends with a slash."""
    return f"{need.head_dim}x{need.v_head_dim}/{need.q_dtype}/{need.kv_dtype}/"


def arch_in_ledger(arch: ArchTraits) -> str:
    return arch.name if arch.name in LOCK_OF_ARCH else PROXY_ARCH


@dataclass(frozen=True, slots=True)
class FittingTiles:
    """Tiles in order of preference that fit; when there is none, why."""

    tiles: tuple[Tile, ...]
    reasons: tuple[str, ...] = ()


class Ledger:
    """The rows of all lock files. `rows[op][variant key][tile key]["3.9.0/sm_120"]` is a Measurement."""

    def __init__(self, rows: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Measurement]]]]) -> None:
        self.rows = rows

    @staticmethod
    @functools.cache
    def load() -> Ledger:
        """The shipped lock files."""
        merged: dict[str, Any] = {}
        for name in sorted(set(LOCK_OF_ARCH.values())):
            path = LOCK_DIR / f"{name}.lock.json"
            if not path.exists():
                continue
            for op, variants in json.loads(path.read_text())["rows"].items():
                for key, tiles in variants.items():
                    for tile, by_target in tiles.items():
                        merged.setdefault(op, {}).setdefault(key, {}).setdefault(tile, {}).update(by_target)
        return Ledger(merged)

    def measurements(self, need: Need, tile: Tile, arch: ArchTraits) -> Iterator[Measurement]:
        """Of every variant that can serve `need`, for every Triton version."""
        prefix, wanted, target = variant_prefix(need), tile_key(tile), "/" + arch_in_ledger(arch)
        for key, tiles in self.rows.get(need.op, {}).items():
            if key.startswith(prefix) and wanted in tiles:
                yield from (value for name, value in tiles[wanted].items() if name.endswith(target))

    def record(self, need: Need, tile: Tile, arch: ArchTraits) -> TileRecord | None:
        """The worst case of the tile over variants and Triton versions, or None if it is not in the ledger."""
        found = list(self.measurements(need, tile, arch))
        if not found:
            return None
        smem, registers, spills, stack = (max(m[i] for m in found) for i in range(4))  # type: ignore[type-var]
        return TileRecord(smem, registers, spills, stack, tuple(sorted({kind for m in found for kind in m[4]})))  # type: ignore[arg-type]

    def fitting_tiles(self, need: Need, arch: ArchTraits) -> FittingTiles:
        """The candidate tiles of `need` whose measured shared memory one block of `arch` can have."""
        candidates = attention_tiles(need.op, need.head_dim, need.v_head_dim, need.kv_dtype, arch.features)
        if not candidates:
            return FittingTiles((), (f"no tile for {need.describe()}",))
        fitting: list[Tile] = []
        reasons: list[str] = []
        for tile in candidates:
            record = self.record(need, tile, arch)
            if record is None:
                reasons.append(f"tile {tile_key(tile)} is not in the ledger for {need.describe()}")
            elif record.smem > arch.smem_per_block:
                reasons.append(
                    f"tile {tile_key(tile)} needs {record.smem:,} B of shared memory, {arch.name} has {arch.smem_per_block:,} B"
                )
            else:
                fitting.append(tile)
        return FittingTiles(tuple(fitting), tuple(reasons))
