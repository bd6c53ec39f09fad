"""Published times of a card as small grids: `tables/PRODUCT.json`, written by lab/kernels/card/derive_tables.py. The
file names its source. Weights and caches below about 100 MB were in the L2 during these measurements, which they are
not when a model is served: `op_times` adds reading them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path

from sglang.srt.hardware.arch import ArchTraits
from sglang.tuning.grid import Grid

TABLES = Path(__file__).parent / "tables"
SAME_CARD = {"rtx-pro-6000-workstation": "rtx-pro-6000-server"}
"""Editions that differ in cooling only."""


def table_path(product: str) -> Path:
    """Returns the path of a product's measured times."""
    return TABLES / f"{product}.json"


@functools.cache
def measured_times(product: str | None) -> Mapping[str, Grid]:
    """Returns the grids by table name ("product/bf16/best"); empty for a product that nobody has timed."""
    path = table_path(SAME_CARD.get(product or "", product or ""))
    if not path.is_file():
        return {}
    return {name: Grid.from_json(table) for name, table in json.loads(path.read_text())["tables"].items()}


def tables_of(arch: ArchTraits) -> Mapping[str, Grid]:
    """Returns the measured times of an architecture's product; empty if there are none."""
    return measured_times(arch.product)
