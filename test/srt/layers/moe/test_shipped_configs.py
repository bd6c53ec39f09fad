"""The shipped configurations: there for every published shape and card, of tiles that fit, from today's kernels."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.ledger_file import read_lock, tile_key
from sglang.srt.kernels.spec import TileRecord
from sglang.srt.layers.moe.fused_moe_triton import capacity
from sglang.srt.layers.moe.fused_moe_triton.capacity import recorded_cost
from sglang.srt.layers.moe.fused_moe_triton.config_files import PACKAGE_CONFIGS, find
from sglang.srt.layers.moe.fused_moe_triton.config_format import read_content
from sglang.srt.layers.moe.fused_moe_triton.config_names import parse_name
from sglang.tuning.search_space import BATCH_SIZES
from srt.layers.moe.shipped_products import shipped_products

sys.path.insert(0, str(Path(__file__).parents[4] / "lab" / "kernels" / "fused_moe_triton"))
import model_configs
from published_shapes import shapes

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
    assert all(len(tiles) <= model_configs.MAX_TILES for tiles in keys.values())


def test_shipped_tiles_are_launches_for_the_ledger() -> None:
    rows = {(*key.split("/")[:2], tile) for op, key, tile in read_lock("sm120") if op == "fused_moe"}
    for product in shipped_products(arch_by_name("sm_120").features):
        assert (product.kind, product.scheme or "bf16", tile_key(product.tile)) in rows


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
