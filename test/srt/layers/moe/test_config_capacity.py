"""What a tile costs: from the record, from the ledger, from the compiler; and the layer that gets its tiles."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.distributed.parallel_state import ALONE, groups_of
from sglang.srt.hardware.arch import CPU, arch_by_name
from sglang.srt.kernels.ledger_file import Ledger, Row, tile_key
from sglang.srt.kernels.spec import TileRecord
from sglang.srt.layers.moe import layer as layer_module
from sglang.srt.layers.moe.fused_moe_triton import capacity, config_files
from sglang.srt.layers.moe.fused_moe_triton.capacity import ProductTile, recorded_cost
from sglang.srt.layers.moe.fused_moe_triton.config_files import find
from sglang.srt.layers.moe.fused_moe_triton.tiles import tile
from sglang.srt.layers.quantization.experts import ExpertSizes
from sglang.srt.plan.ranks import RankLayout

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


# --- the layer --------------------------------------------------------------------------------------------------------


def scope(arch: Any, tp_size: int = 1) -> Any:
    return SimpleNamespace(plan=SimpleNamespace(arch=arch), groups=groups_of(RankLayout(tp_size), 0))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(layer_module, "lookup", lambda *args, **kwargs: calls.append((args, kwargs)))
    return calls


def test_the_layer_asks_for_its_ranks_shape(asked: list[Any]) -> None:
    """GLM-4.7's with the shared expert among the routed ones, and GPT-OSS's, whose ranks hold whole groups."""
    sizes = ExpertSizes(160, 5120, 1536, shared=True)
    layer_module._tuned_tiles(scope(SM120, 8), sizes, ModuleQuant("fp8_channel", "compressed-tensors"))
    layer_module._tuned_tiles(scope(SM120, 4), ExpertSizes(128, 2880, 2880, bias=True), ModuleQuant("mxfp4", "mxfp4"))
    layer_module._tuned_tiles(scope(CPU), sizes, None)
    assert asked == [
        ((161, 192, "fp8_channel", SM120), {"hidden": 5120, "bias": False}),
        ((128, 768, "mxfp4", SM120), {"hidden": 2880, "bias": True}),
    ]


def test_the_layer_launches_with_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Many pairs get the tiles of the nearest entry; few are not grouped, and take none."""
    entry = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4}
    content = {"8": entry | {"num_stages": 2}, "64": entry | {"num_stages": 3}}
    (tmp_path / "E=8,N=64,arch=sm_120,sms=188.json").write_text(json.dumps(content))
    monkeypatch.setattr(config_files, "PACKAGE_CONFIGS", tmp_path)
    tuned = find(8, 64, None, SM120, cost=lambda product, arch: TileRecord(1, 1, 0, 0, ())).tiles
    launched: list[Any] = []
    layer = layer_module.MoELayer.__new__(layer_module.MoELayer)
    layer.experts = SimpleNamespace(w13=None, w2=None)  # type: ignore[assignment]
    layer.route = lambda x, batch: (None, torch.zeros((len(x), 2), dtype=torch.int32))  # type: ignore[assignment]
    layer.products = lambda *args: launched.append(args[6]) or args[0]
    layer.activation, layer.features, layer.shared, layer.tuned = None, SM120.features, None, tuned  # type: ignore
    layer.latent = None  # type: ignore[assignment]
    layer.group, layer.ep_size, layer.reduce = ALONE, 1, False
    for num_tokens in (1, 3, 50):
        layer(torch.zeros((num_tokens, 4)))
    assert launched[0] is None
    assert [t.gate_up["num_stages"] for t in launched[1:]] == [2, 3]
    assert launched[1].gate_up["BLOCK_N"] == 32 and launched[1].down["BLOCK_N"] == 64
