"""Predicted times of experts in four bits: sgl-kernel's products, and comparisons with published times of the same
numbers and the same routing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sglang.srt.configs.quant_scheme import SCHEMES, expert_share
from sglang.srt.configs.quantization import quantization_of
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.layers.moe.fused_moe_triton.config_files import find
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_description import describe_model
from sglang.srt.plan.ranks import RankLayout
from sglang.tuning.best_times import best
from sglang.tuning.mixed_products import RECORDS, mixed_tile
from sglang.tuning.ops import Experts
from sglang.tuning.predicted_times import Predicted, predicted
from sglang.tuning.search_space import MoeShape, why_not
from sglang.tuning.step import decode_step, prefill_step
from sglang.tuning.steps import time_step

CARD = arch_by_name("rtx-pro-6000-server")
CONFIGS = Path(__file__).parents[1] / "srt" / "kernels" / "configs"
LOCK = Path(__file__).parents[2] / "sgl-kernel" / "kernels.lock.json"
GPT_OSS = Experts(8192, 128, 4, 2880, 2880, "mxfp4", bias=True)
EIGHT_BITS = replace(GPT_OSS, scheme="mxfp4_mxfp8", sgl_kernel=True)


def ours(op: Experts) -> Predicted:
    time = predicted(op, CARD)
    assert time is not None
    return time


def test_sgl_kernels_tiles_are_those_of_its_record() -> None:
    rows = json.loads(LOCK.read_text())["rows"]["120f"]
    shape = MoeShape(128, 2880, 2880, 4, "mxfp4_mxfp8", True)
    for (kind, block_m), record in RECORDS.items():
        tile = mixed_tile(shape, kind, block_m)
        name = f"{kind} {block_m}x{tile['BLOCK_N'] * shape.width(kind)}x{tile['BLOCK_K']} {tile['num_stages']} stages"
        row = rows[name]
        assert (record.smem, record.registers, record.spills) == (row["shared"], row["registers"], row["spills"])


def test_sgl_kernel_is_within_a_tenth_of_the_best_measured_product_of_both_types() -> None:
    fastest = best(EIGHT_BITS, CARD)
    assert fastest is not None and fastest.exact
    assert ours(EIGHT_BITS).comparable < 1.1 * fastest.served
    assert ours(EIGHT_BITS).seconds < 0.9 * ours(replace(EIGHT_BITS, sgl_kernel=False)).seconds
    few = replace(EIGHT_BITS, tokens=256)
    assert ours(few) == ours(replace(few, sgl_kernel=False)), "few pairs are Triton's"


def test_activations_of_16_bits_are_compared_with_such() -> None:
    sixteen, eight = best(GPT_OSS, CARD), best(EIGHT_BITS, CARD)
    assert sixteen is not None and eight is not None
    assert sixteen.served > 1.9 * eight.served
    one = replace(GPT_OSS, tokens=1)
    assert best(one, CARD) == replace(best(replace(one, scheme="mxfp4_mxfp8"), CARD), table="experts/mxfp4/2880x128x4")


def test_what_is_compared_has_the_routing_of_the_published_times() -> None:
    """Pairs shared out evenly fill blocks of prompts; few tokens that choose independently meet fewer experts."""
    assert ours(GPT_OSS).comparable < 0.95 * ours(GPT_OSS).seconds
    few = ours(replace(GPT_OSS, tokens=32))
    assert 1.2 * few.seconds < few.comparable < 2.0 * few.seconds
    one = ours(replace(GPT_OSS, tokens=1))
    assert one.comparable == one.seconds


def test_two_strips_are_for_few_rows() -> None:
    shape = MoeShape(384, 256, 7168, 8, "int4_g32")

    def reason(block_m: int, block_k: int) -> str | None:
        tile = {"BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_K": block_k, "GROUP_M": 1, "num_warps": 4, "num_stages": 2}
        return why_not(shape, "down", tile, CARD)

    assert reason(16, 256) is None and reason(32, 256) is None
    assert "strips of 128" in (reason(64, 256) or "") and "strips of 128" in (reason(16, 64) or "")


@pytest.mark.parametrize("cards", [1, 2, 4, 8])
def test_each_shard_of_gpt_oss_has_its_tiles(cards: int) -> None:
    share = expert_share(2880, cards, SCHEMES["mxfp4"])
    tiles = find(128, share, "mxfp4", CARD, hidden=2880).tiles
    assert tiles is not None and not tiles.other_hidden
    assert all(pair.gate_up["BLOCK_K"] == 256 for tokens, pair in tiles.by_tokens.items() if tokens <= 512)


@pytest.mark.parametrize(("name", "cards", "most"), [("gpt_oss", 1, 0.05), ("gpt_oss", 2, 0.05), ("kimi_k25", 8, 0.09)])
def test_no_experts_are_far_behind_the_best_measured(name: str, cards: int, most: float, tmp_path: Path) -> None:
    """By the share of their step; Kimi-K2.5's fall behind where 64 requests meet every expert."""
    values = json.loads((CONFIGS / f"{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = describe_model(values, quantization_of(values, tmp_path, None, "default"), source=name)
    parallel = ParallelConfig("bfloat16", "bfloat16", ranks=RankLayout(cards))
    for step in (*map(decode_step, (1, 16, 64, 256)), prefill_step(8192)):
        rows = time_step(model, parallel, step, CARD)
        whole = sum(row.seconds for row in rows)
        assert all(row.lost < 0.05 * whole for row in rows if row.name == "fused_moe"), step
