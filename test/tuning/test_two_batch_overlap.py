"""The table of steps that run as two halves, beside what is predicted of the card."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from pairs import some_of

from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.hardware.topology import Topology
from sglang.srt.kernels.two_batch_table import TWO_BATCH_THRESHOLDS, two_batch_threshold
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from sglang.srt.plan.two_batch_overlap import min_tokens
from sglang.tuning.step import Step, decode_step, prefill_step, verify_step
from sglang.tuning.steps import time_step, total
from sglang.tuning.two_batch_overlap import (
    Stretch,
    alternating_seconds,
    overlapped_seconds,
    runs_overlapped,
    split_step,
    step_time,
)

from .test_card_times import model_of

CARD, H200 = arch_by_name("rtx-pro-6000-server"), arch_by_name("h200")
MODELS: dict[bool, dict[int, tuple[str, ...]]] = {
    True: {2: ("gpt_oss", "qwen3_moe"), 4: ("minimax_m2", "glm47"), 8: ("glm47", "kimi_k25")},
    False: {2: ("qwen3",), 4: ("qwen3",), 8: ("qwen3",)},
}
"""Models with experts and without, by ranks."""
CHUNKS = (2048, 4096, 8192)
QUICK = {(False, 2, False), (True, 8, True)}
CASES = some_of(itertools.product((False, True), (2, 4, 8), (False, True)), QUICK)


@pytest.mark.parametrize(("experts", "ranks", "eight_bits"), CASES)
def test_halves_are_predicted_to_gain_where_no_flag_asks_for_them(
    experts: bool, ranks: int, eight_bits: bool, tmp_path: Path
) -> None:
    row = two_batch_threshold(Topology.HOST_BRIDGE, ranks, experts, eight_bits)
    gains = []
    for name in MODELS[experts][ranks]:
        model = model_of(name, tmp_path)
        mode = "prefill" if eight_bits else "off"
        parallel = ParallelConfig(model.dtype, model.dtype, ranks=RankLayout(ranks), quantized_sums=mode)
        least = min_tokens(row, model, 1)
        for tokens in sorted({least, *(size for size in CHUNKS if size > least)}):
            step = prefill_step(tokens)
            whole = total(time_step(model, parallel, step, CARD)).seconds
            gains.append(whole / overlapped_seconds(model, parallel, step, CARD))
    if row.unasked:
        assert min(gains) > 1.0, gains
    else:
        assert min(gains) < 1.03, gains


def test_every_row_is_reached_and_says_why() -> None:
    reached = {
        id(two_batch_threshold(topology, ranks, experts, eight_bits))
        for topology in Topology
        for ranks in range(2, 9)
        for experts in (False, True)
        for eight_bits in (False, True)
    }
    assert {id(row) for row in TWO_BATCH_THRESHOLDS} <= reached and all(row.reason for row in TWO_BATCH_THRESHOLDS)
    assert not two_batch_threshold(Topology.NVLINK, 2, True, False).unasked
    assert not two_batch_threshold(None, 2, True, False).unasked


def test_a_prompt_of_glm_on_eight_cards(tmp_path: Path) -> None:
    """Of 8,192 tokens: at most 800 ms where sums travel in eight bits as well."""
    model, step = model_of("glm47", tmp_path), prefill_step(8192)
    plain = ParallelConfig("bfloat16", "bfloat16", ranks=RankLayout(8))
    both = replace(plain, quantized_sums="prefill", two_batch="auto")
    seconds = {
        (parallel.quantized_sums, parallel.two_batch): step_time(model, parallel, step, CARD).seconds
        for parallel in (plain, replace(plain, two_batch="auto"), replace(plain, quantized_sums="prefill"), both)
    }
    assert seconds["off", "auto"] < 0.8 * seconds["off", "off"]
    assert seconds["prefill", "auto"] < 0.7 * seconds["prefill", "off"] and seconds["prefill", "auto"] < 0.8
    time = step_time(model, both, step, CARD)
    assert time.low < time.seconds < time.high


@pytest.mark.parametrize(
    ("mode", "ranks", "step", "wanted"),
    [
        ("auto", RankLayout(8), prefill_step(8192), True),
        ("auto", RankLayout(8), prefill_step(512), False),
        ("auto", RankLayout(8), decode_step(4096), False),
        ("auto", RankLayout(8), verify_step(2048, 4), False),
        ("off", RankLayout(8), prefill_step(8192), False),
        ("on", RankLayout(8, attn_dp_size=2), prefill_step(8192), False),
        ("on", ONE_RANK, prefill_step(8192), False),
    ],
)
def test_which_steps_are_predicted_as_halves(
    mode: str, ranks: RankLayout, step: Step, wanted: bool, tmp_path: Path
) -> None:
    parallel = ParallelConfig("bfloat16", "bfloat16", ranks=ranks, two_batch=mode)
    model = model_of("glm47", tmp_path)
    assert runs_overlapped(model, parallel, step, CARD) == wanted
    assert not runs_overlapped(model, replace(parallel, two_batch="auto"), step, H200)


def test_three_clocks() -> None:
    """Computation hides sums, or sums hide it; what stands at the ends is not hidden."""
    long_sums = [Stretch(1.0, 10.0), Stretch(1.0, 0.0)]
    assert alternating_seconds(long_sums, long_sums, 1.0, 0.0) == 1.0 + 20.0 + 1.0
    short_sums = [Stretch(10.0, 1.0), Stretch(10.0, 0.0)]
    assert alternating_seconds(short_sums, short_sums, 1.0, 0.0) == 40.0
    assert alternating_seconds(short_sums, short_sums, 1.5, 0.0) == 60.0
    assert alternating_seconds(short_sums, short_sums, 1.0, 25.0) == 100.0, "the host is the slowest"
    first, second = split_step(prefill_step(8191))
    assert (first.new, first.context, second.new, second.context) == (4096, 4096, 4095, 8191)
    first, second = split_step(Step(3, 512, 512))
    assert (first.batch, second.batch, second.context) == (2, 1, 512)
