"""The cost model's constants of SM120 against a sample of times measured on an RTX PRO 6000 Server."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import fit_experts as fitting
import pytest
from measured_experts import MeasuredLayer

from sglang.tuning.cost_model import even_blocks
from sglang.tuning.upstream_experts import LARGE

ROWS = json.loads(Path(fitting.__file__).with_name("measured_sample.json").read_text())
SAMPLE = [MeasuredLayer(*row) for row in ROWS]


def test_the_committed_constants_know_the_card() -> None:
    errors = [fitting.COMMITTED.error(layer) for layer in SAMPLE]
    judged = fitting.judge(SAMPLE, errors)
    assert judged["all"]["rms"] < 0.06
    assert abs(judged["all"]["mean"]) < 0.02
    h200 = fitting.judge(SAMPLE, [fitting.H200.error(layer) for layer in SAMPLE])
    assert h200["all"]["rms"] > 1.5 * judged["all"]["rms"], "the constants of another card would do as well"


@pytest.mark.parametrize(("tokens", "expected"), [(1, (8.0, 8.0)), (16, (128.0, 128.0)), (1040, (128.0, 256.0))])
def test_even_routing(tokens: int, expected: tuple[float, float]) -> None:
    """1,040 tokens give each of 128 experts 65 rows: two blocks of 64."""
    layer = MeasuredLayer("bf16", tokens, 2048, 768, 128, 8, 1.0)
    assert even_blocks(layer.pairs, layer.num_experts, LARGE["BLOCK_M"]) == expected


def test_an_error_is_a_logarithm_of_predicted_over_measured() -> None:
    layer = SAMPLE[0]
    predicted = layer.seconds * math.exp(fitting.COMMITTED.error(layer))
    assert math.isclose(fitting.COMMITTED.error(replace(layer, seconds=2 * predicted)), -math.log(2), rel_tol=1e-6)
