from __future__ import annotations

import interpreter
import pytest

from sglang.srt.layers.moe.fused_moe_triton import expert_tile_configs
from sglang.srt.layers.moe.fused_moe_triton.tiles import PAIR_TILES, PairTile


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a program of one row as for one of many."""
    if interpreter.INTERPRETED:
        large = (PairTile(8192, 1024, 2), PairTile(4096, 256, 2))
        monkeypatch.setattr(expert_tile_configs, "PAIR_TILES", dict.fromkeys(PAIR_TILES, large))
