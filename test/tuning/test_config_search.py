"""The space of tiles, what is out before a compiler sees it, and the choice by the cost model."""

from __future__ import annotations

import math

import pytest

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import ArchTraits, arch_by_name
from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.kernels.scaled_product import product_of
from sglang.srt.kernels.spec import TileRecord
from sglang.srt.layers.moe.fused_moe_triton.capacity import ProductTile
from sglang.srt.layers.moe.fused_moe_triton.tiles import TILES, tile
from sglang.tuning.predict import Point, best_pair, point, predict, small_palette
from sglang.tuning.search_space import (
    KINDS,
    Candidates,
    MoeShape,
    candidates,
    deepest_stages,
    grouped_product,
    min_shared_bytes,
    space,
    why_not,
    widens,
)

SM120, H200 = arch_by_name("rtx-pro-6000-server"), arch_by_name("h200")
BF16 = MoeShape(128, 768, 2048, 8, None)
FP8 = MoeShape(161, 192, 5120, 9, "fp8_channel")
BF16_MMA = ("m16n8k16 bf16",)


def cost(product: ProductTile, arch: ArchTraits) -> TileRecord | str:
    """As Triton's pipeline takes it: all stages but one; spills where sums fill the registers."""
    t, width = product.tile, 2 if product.kind == "gate_up" else 1
    sums = t["BLOCK_M"] * t["BLOCK_N"] * width // (32 * t["num_warps"])
    bytes_of = (SCHEMES[product.scheme].bits if product.scheme else 16) / 8
    smem = int((t["BLOCK_M"] + width * t["BLOCK_N"]) * t["BLOCK_K"] * bytes_of * max(1, t["num_stages"] - 1))
    return TileRecord(smem, min(255, 48 + sums), 64 if sums > 64 else 0, 0, BF16_MMA)


def found(shape: MoeShape = BF16, kind: str = "gate_up", arch: ArchTraits = SM120) -> Candidates:
    return candidates(shape, kind, arch, cost)


# --- pruning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [BF16, FP8, MoeShape(384, 256, 7168, 8, "int4_g32")])
def test_every_tile_is_kept_or_out_for_a_reason(shape: MoeShape, kind: str) -> None:
    result = found(shape, kind)
    assert len(result.kept) + len(result.pruned) == len(list(space(kind)))
    assert result.kept and not result.unknown
    assert sum(result.reasons().values()) == len(result.pruned)
    for _, record in result.kept:
        assert record.smem <= SM120.smem_per_block and record.spills == 0
    assert all(": " in reason for _, reason in result.pruned)


def test_the_published_tile_is_pruned_on_sm_120_and_kept_on_sm_90() -> None:
    published = tile(64, 64, 128, 8, 4, 4)
    on_sm120 = {tile_key(t): reason for t, reason in found().pruned}
    assert on_sm120[tile_key(published)] == "too much shared memory: 147,456 B, sm_120 has 101,376 B"
    assert tile_key(published) in {tile_key(t) for t, _ in found(arch=H200).kept}


@pytest.mark.parametrize(
    ("shape", "kind", "choice", "reason"),
    [
        (BF16, "gate_up", tile(128, 128, 64, 8, 4, 2), "too many registers: 256 sums a thread"),
        (BF16, "gate_up", tile(16, 16, 64, 1, 8, 2), "idle threads: 2 sums a thread"),
        (FP8, "down", tile(16, 64, 512, 1, 4, 2), "larger than the weights: BLOCK_K 512 for 192 columns"),
        (FP8, "gate_up", tile(16, 512, 64, 1, 8, 2), "larger than the weights: BLOCK_N 512 for 192 rows"),
        (MoeShape(256, 256, 7168, 8, "fp8_block"), "gate_up", tile(16, 64, 256, 1, 4, 2), "scales: BLOCK_K 256"),
        (MoeShape(384, 256, 7168, 8, "int4_g32"), "gate_up", tile(16, 64, 64, 1, 4, 2), "no effect: widened"),
        (BF16, "gate_up", tile(16, 128, 256, 1, 4, 2), "too much shared memory: at least 131,072 B"),
    ],
)
def test_reasons_that_need_no_compiler(shape: MoeShape, kind: str, choice: dict[str, int], reason: str) -> None:
    assert (why_not(shape, kind, choice, SM120) or "").startswith(reason)


def test_a_tile_that_does_not_compile_is_out_and_an_unknown_one_is_neither() -> None:
    failing = candidates(BF16, "down", SM120, lambda product, arch: "does not compile: x")
    assert not failing.kept and not failing.unknown
    assert failing.reasons()["does not compile"] > 0
    unknown = candidates(BF16, "down", SM120, lambda product, arch: None)
    assert not unknown.kept and len(unknown.unknown) == failing.reasons()["does not compile"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_lower_bound_of_shared_memory_is_one(kind: str) -> None:
    """Of what the kernels' own tiles take, x included."""
    for rows in TILES["plain"]:
        choice = rows.gate_up if kind == "gate_up" else rows.down
        record = cost(BF16.product_tile(kind, choice), SM120)
        assert isinstance(record, TileRecord)
        assert 0 < min_shared_bytes(None, kind, choice) < record.smem


def test_the_deepest_pipelines_fill_an_sm() -> None:
    choice = tile(64, 64, 64, 8, 4, 2)  # 24,576 B a stage
    assert deepest_stages(None, "gate_up", choice, SM120) == {4, 3}
    assert deepest_stages(None, "gate_up", tile(128, 128, 128, 8, 8, 2), SM120) == {2}


@pytest.mark.parametrize("name", SCHEMES)
def test_which_weights_are_widened_agrees_with_the_kernels(name: str) -> None:
    for arch in (SM120, H200, arch_by_name("sm_80")):
        assert widens(name, arch) == (product_of(SCHEMES[name], arch.features).kind == "planes")


def test_what_the_cost_model_is_told() -> None:
    native, dequantized = (
        TileRecord(0, 0, 0, 0, mma) for mma in (("m16n8k64 mxf4nvf4 4X",), ("wgmma m64n64k16 bf16",))
    )
    shape = MoeShape(384, 256, 7168, 8, "nvfp4")
    product = grouped_product(shape, "gate_up", native)
    assert (product.columns, product.depth, product.width) == (256, 7168, 2)
    assert product.dequantize_cost is None and product.x_bytes == product.w_bytes == 0.5625
    product = grouped_product(shape, "down", dequantized)
    assert (product.columns, product.depth, product.width) == (7168, 256, 1)
    assert product.dequantize_cost is not None and product.x_bytes == 2.0 and product.w_bytes == 0.5625


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def points() -> list[Point]:
    kept = {kind: found(kind=kind).kept for kind in KINDS}
    return [point(BF16, tokens, arch, kept) for tokens in (1, 16, 256, 4096) for arch in (SM120, arch_by_name("gb10"))]


def test_the_best_pair_shares_block_m_and_is_the_best(points: list[Point]) -> None:
    kept = {kind: found(kind=kind).kept for kind in KINDS}
    for p in points:
        seconds, keys = p.best()
        pair = best_pair(p, kept)
        assert pair.gate_up["BLOCK_M"] == pair.down["BLOCK_M"]
        assert (tile_key(pair.gate_up), tile_key(pair.down)) == keys
        everything = (
            predict(BF16, "gate_up", up, a, p.num_tokens, p.arch) + predict(BF16, "down", down, b, p.num_tokens, p.arch)
            for up, a in kept["gate_up"]
            for down, b in kept["down"]
            if up["BLOCK_M"] == down["BLOCK_M"]
        )
        assert math.isclose(seconds, min(everything))


def test_a_small_palette_does_nearly_as_well(points: list[Point]) -> None:
    palette = small_palette(points, 8)
    assert 2 <= len(palette) <= 8
    for p in points:
        assert p.best(palette)[0] <= 1.15 * p.best()[0]
    two = small_palette(points, 2)
    assert len(two) == 2 and {kind for kind, _ in two} == set(KINDS)
    assert sum(p.best(two)[0] for p in points) >= sum(p.best(palette)[0] for p in points)


def test_a_palette_without_a_pair_serves_nothing(points: list[Point]) -> None:
    only_up = frozenset({("gate_up", points[0].best()[1][0])})
    assert points[0].best(only_up)[0] == math.inf
