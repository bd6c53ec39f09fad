"""Layouts that a machine of several GPUs is tried in: all of them can be planned, and answers are judged rightly."""

from __future__ import annotations

from pathlib import Path

import layouts
import pytest
import shapes
from layouts import Answer, Layouts, apart, runs

from sglang import explain

CASES = [
    pytest.param(gpus, model, marks=[] if (gpus, model) == (8, "latents") else pytest.mark.thorough)
    for gpus in (2, 4, 8)
    for model in layouts.MODELS
]


@pytest.mark.parametrize(("gpus", "model"), CASES)
def test_servers_of_each_layout_can_be_planned(
    gpus: int, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Layouts(layouts.Window(tmp_path, 60.0), cpu=False)
    for run in runs([model], gpus, ()):
        flags = (*bench.flags, *run.flags, "--dtype", "bfloat16")
        status = explain.main(["--arch", "sm_90", "--model-path", str(bench.save(run.model)), *flags])
        assert status == 0, f"{run.name}: {capsys.readouterr().out}"


def test_the_models_without_drafts_come_first_on_one_gpu() -> None:
    found = runs(["dense", "latents"], 4, ("TP4", "DCP4"))
    assert [run.name for run in found] == [
        "dense, one GPU",
        "latents, one GPU",
        "dense, TP4",
        "dense, TP4, n-grams",
        "latents, TP4",
        "latents, TP4, n-grams",
        "latents, TP4, NEXTN",
        "latents, DCP4",
        "latents, DCP4, n-grams",
        "latents, DCP4, NEXTN",
    ]


def test_log_probabilities_count_up_to_the_first_other_token() -> None:
    wanted = Answer([5, 6, 7], [{5: -0.1, 9: -3.0}, {6: -0.7, 8: -0.8}, {7: -0.2}])
    assert apart(wanted, wanted) == [0.0] * 5
    other = Answer([5, 8, 1], [{5: -0.2, 4: -3.0}, {6: -0.9, 8: -0.5}, {1: -0.1, 7: -9.0}])
    assert sorted(apart(wanted, other)) == pytest.approx([0.1, 0.2, 0.3]), "what comes behind it does not count"


@pytest.mark.parametrize(
    ("dtype", "shift", "same", "right"),
    [
        *(("float32", 0.0, True, True), ("float32", 0.0, False, False)),
        *(("bfloat16", 0.05, False, True), ("bfloat16", 1.0, True, False)),
    ],
)
def test_a_layout_that_answers_otherwise_is_wrong(
    dtype: str, shift: float, same: bool, right: bool, tmp_path: Path
) -> None:
    bench = Layouts(layouts.Window(tmp_path, 60.0), True, dtype)
    wanted = [Answer([6, 7], [{6: -0.7, 8: -0.8}, {7: -0.2}])] * 2
    got = Answer([6 if same else 8, 7], [{6: -0.7 - shift, 8: -0.8 - shift}, {7: -0.2 - shift}])
    bench.compare(wanted, runs(["dense"], 2, ("TP2",))[-1], [got, got])
    assert [row.right for row in bench.rows] == [right]


@pytest.mark.parametrize("name", shapes.LAYERS)
def test_a_few_layers_of_a_large_model_can_be_planned_on_eight(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shapes.write(tmp_path, name)
    status = explain.main(["--arch", "sm_90", "--model-path", str(folder), "--tp", "8", "--load-format", "dummy"])
    assert status == 0, capsys.readouterr().out
