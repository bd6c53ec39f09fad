"""How tiles are chosen for the configurations that are shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import model_configs
import pytest
from published_shapes import CARDS

from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.kernels.spec import TileRecord
from sglang.srt.layers.moe.fused_moe_triton.capacity import ProductTile
from sglang.srt.layers.moe.fused_moe_triton.config_format import read_content
from sglang.srt.layers.moe.fused_moe_triton.config_names import parse_name
from sglang.srt.layers.moe.fused_moe_triton.tiles import tile
from sglang.tuning.search_space import MoeShape


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Costs by a formula instead of the record, and one shape; configurations go to a directory of their own."""

    def cost(product: ProductTile, arch: Any) -> TileRecord:
        t, width = product.tile, 2 if product.kind == "gate_up" else 1
        smem = 2 * (t["BLOCK_M"] + width * t["BLOCK_N"]) * t["BLOCK_K"] * max(1, t["num_stages"] - 1)
        return TileRecord(smem, 100, 0, 0, ("m16n8k16 bf16",))

    monkeypatch.setattr(model_configs, "recorded_cost", cost)
    monkeypatch.setattr(model_configs, "shapes", lambda: [MoeShape(8, 768, 2048, 2, None)])
    monkeypatch.setattr(model_configs, "PACKAGE_CONFIGS", tmp_path)
    monkeypatch.setattr(model_configs, "BATCH_SIZES", (1, 64, 4096))
    return [tmp_path]


def test_configurations_are_written_for_every_card(made_up: list[Path]) -> None:
    model_configs.write("", None)
    written = [parse_name(path.name) for path in made_up[0].rglob("*.json")]
    assert {(name.arch, name.num_sms) for name in written if name} == {
        (arch_by_name(card).name, arch_by_name(card).num_sms) for card in CARDS
    }
    for path in made_up[0].rglob("*.json"):
        content = read_content(path)
        assert content.source == "model" and set(content.by_tokens) == {1, 64, 4096}


def test_tiles_that_another_triton_rejects_are_replaced(
    made_up: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever was chosen first spills there: the second choice shares nothing with it."""
    rounds: list[set[tuple[str, str]]] = []

    def measure(triton: Path, wanted: list[ProductTile]) -> list[Any]:
        rounds.append({(product.kind, tile_key(product.tile)) for product in wanted})
        spills = 8 if len(rounds) == 1 else 0
        return [[1000, 100, spills, 0, ""] for _ in wanted]

    monkeypatch.setattr(model_configs, "_measure_with", measure)
    model_configs.write("", Path("/elsewhere"))
    assert len(rounds) == 2 and not rounds[0] & rounds[1]
    assert "out with the other Triton" in capsys.readouterr().out
    for path in made_up[0].rglob("*.json"):
        for pair in read_content(path).by_tokens.values():
            assert {("gate_up", tile_key(pair.gate_up)), ("down", tile_key(pair.down))} <= rounds[1]


def test_what_is_worth_recording() -> None:
    """Not a tile of the published size, which does not fit, nor one that pads a sum which a smaller one divides."""
    glm = MoeShape(161, 192, 5120, 9, "fp8_channel")
    recorded = {p.record_keys for p in model_configs.products()}
    assert ("gate_up/bf16/even", "K128 M64 N64 w4 s4") not in recorded
    assert ("gate_up/bf16/even", "K128 M64 N64 w4 s2") in recorded
    wasteful = tile(16, 64, 256, 1, 4, 2)
    assert model_configs.worth_recording(glm, "gate_up", wasteful | {"num_stages": 3})
    assert not model_configs.worth_recording(glm, "down", wasteful | {"num_stages": 3})
