"""What a tile costs: from the record, from the ledger, from the compiler; and the layer that gets its tiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.hardware.arch import CPU, arch_by_name
from sglang.srt.kernels.ledger_file import Ledger, Row, tile_key
from sglang.srt.kernels.spec import TileRecord
from sglang.srt.layers.moe.fused_moe_triton import capacity
from sglang.srt.layers.moe.fused_moe_triton.capacity import ProductTile, recorded_cost
from sglang.srt.layers.moe.fused_moe_triton.config_files import find
from sglang.srt.layers.moe.fused_moe_triton.tiles import tile

SM120, H200 = arch_by_name("rtx-pro-6000-server"), arch_by_name("h200")
PUBLISHED = tile(64, 64, 128, 8, 4, 4)
"""147,456 B in bf16, where the default of other servers came from."""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces tile_costs.json."""

    def make(products: dict[str, dict[str, Any]]) -> None:
        path = tmp_path / "tile_costs.json"
        path.write_text(json.dumps({"products": products}))
        read = capacity.read_record.__wrapped__
        monkeypatch.setattr(capacity, "read_record", lambda: read(path))

    return make


def test_costs_on_record(record: Any) -> None:
    good, bad = tile(16, 32, 64, 1, 4, 2), tile(16, 32, 64, 1, 4, 3)
    costs = {"K64 M16 N32 w4 s2": [1000, 50, 0, 0, "m16n8k16 bf16; x"], "K64 M16 N32 w4 s3": "does not compile: y"}
    record({"gate_up/bf16/even": {"code": "", "tiles": costs}})
    expected = TileRecord(1000, 50, 0, 0, ("m16n8k16 bf16", "x"))
    for arch in (SM120, arch_by_name("gb10"), arch_by_name("sm_89")):  # sm_120's numbers stand for both
        assert recorded_cost(ProductTile("gate_up", None, 2048, 768, good), arch) == expected
    assert recorded_cost(ProductTile("gate_up", None, 2048, 768, bad), SM120) == "does not compile: y"
    assert recorded_cost(ProductTile("gate_up", None, 2048, 768, good | {"GROUP_M": 8}), SM120) == expected
    assert recorded_cost(ProductTile("gate_up", None, 2048, 768, good), H200) is None
    others = {"kind": "down"}, {"scheme": "nvfp4"}, {"hidden": 2080}, {"bias": True}
    for other in others:
        same = {"kind": "gate_up", "scheme": None, "hidden": 2048, "intermediate": 768, "tile": good} | other
        assert recorded_cost(ProductTile(**same), SM120) is None


def test_the_ledger_knows_the_worst_of_its_triton_versions(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record({})
    product = ProductTile("down", "fp8_channel", 2048, 768, tile(16, 64, 128, 1, 4, 3))
    row = Row(
        "", {"3.6.0/sm_120": (5, 1, 0, 0, ()), "3.9.0/sm_120": (7, 1, 0, 0, ()), "3.9.0/sm_121": (9, 1, 0, 0, ())}
    )
    ledger = Ledger({("fused_moe", product.record_keys[0], tile_key(product.tile)): row})
    monkeypatch.setattr(capacity, "_ledger", lambda: ledger)
    assert recorded_cost(product, SM120) == TileRecord(7, 1, 0, 0, ())


def test_shipped_files_of_other_gpus_are_on_record_without_a_compiler() -> None:
    """`explain` shows them on machines that have no Triton."""
    for shape in ((161, 192, "fp8_channel", 5120), (128, 768, None, 2048), (384, 256, "int4_g32", 7168)):
        found = find(*shape[:3], H200, hidden=shape[3])
        assert found.tiles is not None and found.tiles.source == "measured" and not found.rejected


def test_of_what_is_on_no_record_nothing_is_known(record: Any) -> None:
    record({})
    product = ProductTile("down", None, 2048, 768, PUBLISHED)
    assert recorded_cost(product, CPU) is None and recorded_cost(product, SM120) is None
