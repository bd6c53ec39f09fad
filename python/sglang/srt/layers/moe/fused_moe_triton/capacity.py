"""The GPU resources that a tile of the grouped products takes, from records. Imports no torch.

`tile_costs.json` records the tiles that tuning chooses from, compiled for sm_120 (and so for sm_121); the ledger
records the shipped ones. A tile in neither is tried at launch, with a smaller one as fallback.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.ledger_file import Ledger, Measurement, judged_as, tile_key
from sglang.srt.kernels.spec import Tile, TileRecord

RECORD_FILE = Path(__file__).parent / "tile_costs.json"
RECORDED_ARCHS = ("sm_120", "sm_121")
"""sm_121 gets the code of sm_120."""


@dataclass(frozen=True, slots=True)
class ProductTile:
    """A tile of one product of a layer. `hidden` and `intermediate` are sizes of this rank, 0 if unknown."""

    kind: str  # "gate_up" or "down"
    scheme: str | None  # a name of SCHEMES; None: 16-bit weights
    hidden: int
    intermediate: int
    tile: Tile
    bias: bool = False  # GPT-OSS: its experts have biases, and its activation goes with them

    @property
    def even(self) -> bool:
        """Returns whether BLOCK_K divides the summed dimension, so that the kernel needs no masks."""
        depth = self.hidden if self.kind == "gate_up" else self.intermediate
        return depth % self.tile["BLOCK_K"] == 0

    @property
    def record_keys(self) -> tuple[str, str]:
        """Returns the keys (product, tile) in the record. GROUP_M only orders programs and is left out."""
        product = f"{self.kind}/{self.scheme or 'bf16'}/{'even' if self.even else 'ragged'}"
        product += "/bias" if self.bias else ""
        return product, tile_key({name: value for name, value in self.tile.items() if name != "GROUP_M"})


CostOf = Callable[[ProductTile, ArchTraits], "TileRecord | str | None"]
"""Returns the cost of a tile, or why it cannot be used, or None if neither is known."""


@functools.cache
def read_record(path: Path = RECORD_FILE) -> Mapping[str, Mapping[str, Any]]:
    """Returns product -> {"code": hash, "tiles": tile -> costs, or why it does not compile}; empty without a file."""
    if not path.exists():
        return {}
    products: Mapping[str, Mapping[str, Any]] = json.loads(path.read_text())["products"]
    return products


def recorded_cost(product: ProductTile, arch: ArchTraits) -> TileRecord | str | None:
    """Returns the cost in `tile_costs.json`, or why the tile does not compile, or the cost in the ledger; None if it is
    in neither. Never imports Triton."""
    name, tile = product.record_keys
    if judged_as(arch) in RECORDED_ARCHS:
        entry = read_record().get(name, {}).get("tiles", {}).get(tile)
        if isinstance(entry, str):
            return entry
        if entry is not None:
            smem, registers, spills, stack, mma = entry
            return TileRecord(smem, registers, spills, stack, tuple(mma.split("; ")))
    return _shipped_cost(name, tile_key(product.tile), arch)


def _shipped_cost(variant: str, tile: str, arch: ArchTraits) -> TileRecord | None:
    """Returns the cost in the ledger: of the supported Triton versions the one with most shared memory."""
    row = _ledger().rows.get(("fused_moe", variant, tile))
    known = [m for target, m in row.by_target.items() if target.endswith("/" + arch.name)] if row is not None else []
    return max((_record(m) for m in known), key=lambda record: record.smem, default=None)


_ledger = functools.cache(Ledger.load)


def _record(measurement: Measurement) -> TileRecord:
    return TileRecord(*measurement)
