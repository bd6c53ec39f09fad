"""The shipped configurations: there for every published shape and card, of tiles that fit, from today's kernels."""

from __future__ import annotations

import importlib.metadata
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import model_configs
import pytest
from published_shapes import CARDS, shapes

from sglang.ledger.shipped_products import shipped_products
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.kernels.spec import TileRecord
from sglang.srt.layers.moe.fused_moe_triton import capacity
from sglang.srt.layers.moe.fused_moe_triton.capacity import ProductTile, recorded_cost
from sglang.srt.layers.moe.fused_moe_triton.config_files import PACKAGE_CONFIGS, find
from sglang.srt.layers.moe.fused_moe_triton.config_format import read_content
from sglang.srt.layers.moe.fused_moe_triton.config_names import parse_name
from sglang.srt.layers.moe.fused_moe_triton.tiles import tile
from sglang.tuning.search_space import BATCH_SIZES, MoeShape

SHIPPED = sorted(PACKAGE_CONFIGS.rglob("*.json"))
EDITIONS = ("rtx-pro-6000-server", "rtx-pro-6000-workstation", "rtx-pro-6000-max-q", "rtx-5090", "gb10")


@pytest.mark.parametrize("card", EDITIONS)
def test_every_published_shape_has_a_file_that_fits(card: str) -> None:
    arch = arch_by_name(card)
    for shape in shapes():
        found = find(
            shape.num_experts,
            shape.intermediate,
            shape.scheme,
            arch,
            hidden=shape.hidden,
            bias=shape.bias,
            cost=recorded_cost,
        )
        assert found.tiles is not None, f"{shape} on {card}: {found.rejected}"
        assert not found.rejected
        assert found.tiles.smem <= 101_376
        assert tuple(found.tiles.by_tokens) == BATCH_SIZES
        assert f"H={shape.hidden}," in found.tiles.path.name


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_file_says_where_it_comes_from(path: Path) -> None:
    name, content = parse_name(path.name), read_content(path)
    assert name is not None
    assert content.source in ("model", "measured")
    if content.source == "model":
        assert (content.about["arch"], content.about["num_sms"]) == (name.arch, name.num_sms)
        assert content.about["hidden"] == name.hidden


def test_few_tiles_a_scheme_and_none_spills() -> None:
    """Each is one more for the ledger to verify."""
    keys: dict[str | None, set[tuple[str, str]]] = defaultdict(set)
    arch = arch_by_name("sm_120")
    for product in shipped_products(arch.features):
        keys[product.scheme].add((product.kind, tile_key(product.tile)))
        cost = recorded_cost(product, arch)
        assert isinstance(cost, TileRecord), f"{product}: {cost}"
        assert cost.spills == 0
    assert set(keys) == {shape.scheme for shape in shapes()}
    assert all(len(tiles) <= model_configs.MOST_TILES for tiles in keys.values())


def test_shipped_tiles_are_launches_for_the_ledger() -> None:
    variants = pytest.importorskip("sglang.ledger.variants.experts")
    expert_products = pytest.importorskip("sglang.ledger.variants.expert_products")
    features = tuple(sorted(arch_by_name("sm_120").features))
    described = {(variant.key, tile_key(variant.tile)) for variant in variants.variants("fused_moe", features)}
    for product in shipped_products(features):
        variant = expert_products.product_variant_of(product, features)
        assert (variant.key, tile_key(variant.tile)) in described


def test_the_record_is_of_todays_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    if importlib.metadata.version("triton") != json.loads(capacity.RECORD_FILE.read_text())["triton"]:
        pytest.skip("recorded with another Triton")
    assert model_configs.check() == 0, capsys.readouterr().err


def test_nvfp4_is_multiplied_natively_on_sm_120() -> None:
    """Shipped tiles of it use the block-scaled instruction with e4m3 scales, those of fp8 the native one."""
    wanted = {"nvfp4": "m16n8k64 mxf4nvf4 4X", "fp8_channel": "m16n8k32 e4m3", "fp8_block": "m16n8k32 e4m3"}
    arch = arch_by_name("sm_120")
    for product in shipped_products(arch.features):
        cost = recorded_cost(product, arch)
        assert isinstance(cost, TileRecord)
        if product.scheme in wanted:
            assert cost.mma == (wanted[product.scheme],)


MEASURED_BLOCK_M = {
    1: 16, 2: 16, 4: 16, 8: 16, 24: 16, 32: 16, 48: 16, 64: 16, 96: 16, 128: 16, 256: 32, 512: 32, 1024: 64, 1536: 128,
    2048: 64, 3072: 128, 4096: 128,
}  # fmt: skip
"""By tokens: the height of the fastest tile that others published for GLM-4.7 on four RTX PRO 6000 Max-Q."""


def test_block_heights_are_near_those_that_others_measured() -> None:
    """For their kernel, so not the same everywhere. More than one step off only between 1024 and 2048 tokens, where
    what was measured goes up and down itself."""
    found = find(161, 384, "fp8_channel", arch_by_name("rtx-pro-6000-max-q"), hidden=5120, cost=recorded_cost).tiles
    assert found is not None
    ours = {tokens: found.at(tokens).gate_up["BLOCK_M"] for tokens in MEASURED_BLOCK_M}
    far = {t for t, theirs in MEASURED_BLOCK_M.items() if not theirs / 2 <= ours[t] <= theirs * 2}
    assert far <= {1536}, ours
    assert sum(ours[tokens] == theirs for tokens, theirs in MEASURED_BLOCK_M.items()) >= 12, ours


# --- choosing ---------------------------------------------------------------------------------------------------------


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
