"""The model of attention and the shipped tables against a sample of the published rows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import derive_h200
import fit_attention as fitting
import model_tables
import pytest
from measured_attention import MeasuredDecode, MeasuredPrompt

from sglang.tuning import upstream_attention as upstream
from sglang.tuning.attention_model import SHARED, Keys, Prompt
from sglang.tuning.measured import measured_times, table_path
from sglang.tuning.ops import Linear
from sglang.tuning.rates import CEILINGS
from sglang.tuning.sglang_times import time_by_sglang
from sglang.tuning.step import decode_step, prefill_step
from sglang.tuning.steps import time_step, total

ROWS = json.loads(Path(fitting.__file__).with_name("measured_rows.json").read_text())
TABLES = measured_times("rtx-pro-6000-server")
SCHEMES = {"bfloat16": None, "fp8": "fp8_channel", "nvfp4": "nvfp4"}


PAGE = Path(__file__).parents[2] / "benchmark" / "results" / "card.md"
CONFIGS = Path(__file__).parents[2] / "test" / "srt" / "kernels" / "configs"


def rms(errors: Sequence[float]) -> float:
    return math.sqrt(math.fsum(error**2 for error in errors) / len(errors))


def test_decode_attention_is_known_within_a_tenth_or_so() -> None:
    rows = [MeasuredDecode(Keys(*row[:-1]), row[-1]) for row in ROWS["decode"]]
    errors = [fitting.error_of_decode(row, SHARED, upstream.DECODE_TIMES) for row in rows]
    assert len(rows) >= 150 and rms(errors) < 0.13
    assert abs(math.fsum(errors) / len(errors)) < 0.03
    few = [error for row, error in zip(rows, errors, strict=True) if row.keys.batch <= 4]
    many = [error for row, error in zip(rows, errors, strict=True) if row.keys.batch >= 256]
    assert abs(math.fsum(few) / len(few) - math.fsum(many) / len(many)) < 0.08, "a trend over requests"


def test_prompts_are_known_within_a_tenth_or_so() -> None:
    rows = [MeasuredPrompt(Prompt(*row[:-2]), row[-2], row[-1]) for row in ROWS["prompts"]]
    errors = [fitting.error_of_prompt(row, upstream.PROMPT_TIMES) for row in rows]
    assert len(rows) >= 120 and rms(errors) < 0.09


def product_errors(name: str) -> list[float]:
    """Of what the command line says."""
    errors = []
    for kind, m, n, k, seconds in ROWS[name]:
        known = time_by_sglang(Linear(m, n, k, SCHEMES[kind]), model_tables.CARD)
        assert known is not None
        errors.append(math.log(known[0] / seconds))
    return errors


def test_rows_on_the_grid_are_as_published() -> None:
    errors = product_errors("products on the grid")
    assert len(errors) >= 60 and max(map(abs, errors)) < 0.01


def test_rows_between_are_known_within_a_tenth() -> None:
    errors = product_errors("products between")
    assert len(errors) >= 100 and rms(errors) < 0.1
    assert abs(math.fsum(errors) / len(errors)) < 0.06


def test_all_reduces_are_no_slower_than_one_framework() -> None:
    table, size = TABLES["all_reduce/best"], 0
    for cards, elements, seconds in ROWS["all-reduce elements"]:
        if 2 * elements in table.axes[1]:
            size += 1
            assert table.seconds(cards, 2 * elements) <= 1.01 * seconds
    assert size >= 12


def test_no_sampled_row_beats_the_ceilings() -> None:
    ceilings, found = CEILINGS["rtx-pro-6000-server"], 0
    operands = {"bfloat16": "half", "fp8": "fp8", "nvfp4": "fp4"}
    for kind, m, n, k, seconds in [*ROWS["products on the grid"], *ROWS["products between"]]:
        found += 1
        assert 2.0 * m * n * k / seconds <= ceilings.products[operands[kind]] * 1.001
    for row in ROWS["decode"]:
        keys = Keys(*row[:-1])
        if keys.cache_bytes > 384e6:
            assert keys.cache_bytes / row[-1] <= ceilings.read * 1.02
    assert found >= 160


@pytest.mark.parametrize(("config", "name", "cards"), [("qwen3", "Qwen3-8B", 1), ("glm47", "GLM-4.7-FP8", 8)])
def test_the_page_of_the_card_says_what_is_predicted(config: str, name: str, cards: int) -> None:
    """Within a sixth: tiles may change before someone makes the page again."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} | {cards} | ")]
    written = [float(cell.split("(")[0]) for cell in rows[0].split("|")[3:-1]]
    steps = (*(decode_step(batch) for batch in (1, 16, 64, 256)), prefill_step(8192))
    model, serving = model_tables.described(CONFIGS, config, cards)
    for figure, step in zip(written, steps, strict=True):
        seconds = total(time_step(model, serving, step, model_tables.CARD)).seconds
        assert abs(math.log(figure / (seconds * 1e3))) < 0.16, step


def test_the_tables_of_an_h200_come_out_of_the_times_again(tmp_path: Path) -> None:
    assert derive_h200.main(["--out", str(tmp_path / "h200.json")]) == 0
    assert (tmp_path / "h200.json").read_text() == table_path("h200").read_text()
    measured = measured_times("h200")
    assert measured["extend_attention/128/bf16"].seconds(32, 8192) == pytest.approx(1177.3e-6, rel=0.01)
    assert measured["experts/int4/7168x384x8"].seconds(256, 64) == pytest.approx(586.1e-6, rel=0.01)
    assert measured["all_reduce/best"].seconds(2, 1024) == pytest.approx(2.6e-6, rel=0.02)
