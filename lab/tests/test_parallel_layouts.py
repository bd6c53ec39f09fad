"""Layouts that a machine of several GPUs is tried in: all of them can be planned, and answers are judged rightly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import calm
import layouts
import pytest
import shapes
import torch
from layouts import MODELS, Answer, Layouts, apart, layouts_of, runs
from transformers import AutoModelForCausalLM

from sglang import explain

CASES = [
    pytest.param(gpus, model, marks=[] if (gpus, model) == (4, "experts") else pytest.mark.thorough)
    for gpus in (2, 4, 8)
    for model in layouts.MODELS
]


SLOW = ("latents", "states", "selections")


@pytest.mark.parametrize(("gpus", "model"), CASES)
def test_servers_of_each_layout_can_be_planned(
    gpus: int, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Layouts(layouts.Window(tmp_path, 60.0), cpu=False)
    for run in runs([model], gpus, ()):
        flags = (*bench.flags, *run.flags, "--dtype", "bfloat16")
        status = explain.main(["--arch", "sm_90", "--model-path", str(bench.save(run.model)), *flags])
        assert status == 0, f"{run.name}: {capsys.readouterr().out}"


def test_one_gpu_comes_first_and_each_layout_once() -> None:
    found = runs(["dense", "latents"], 4, ("TP4", "DCP4"), faults=True)
    assert [run.name for run in found] == [
        "dense, one GPU",
        "latents, one GPU",
        *(f"dense, one GPU, {fault}" for fault in calm.FAULTS if "experts" not in fault),
        *(f"latents, one GPU, {fault}" for fault in calm.FAULTS),
        *("dense, TP4", "latents, TP4, n-grams", "latents, DCP4"),
        *("dense, TP4, n-grams", "latents, TP4, NEXTN", "latents, DCP4, n-grams"),
        *("latents, TP4", "latents, DCP4, NEXTN"),
    ]
    assert not any(run.draft for run in runs(["dense"], 4, (), drafts=False))


def test_the_layouts_of_four() -> None:
    every = {"TP4", "PP4", "TP2 x PP2", "DP attention 4"}
    assert set(layouts_of(MODELS["dense"], 4)) == every | {"DCP2"}
    assert set(layouts_of(MODELS["latents"], 4)) == every | {"EP4", "DCP4", "TP2 x DCP2"}


def test_answers_are_apart_up_to_the_first_other_token() -> None:
    wanted = Answer([5, 6, 7], [{5: -0.1, 9: -3.0}, {6: -0.7, 8: -0.8}, {7: -0.2}])
    assert apart(wanted, wanted) == [0.0] * 3
    other = Answer([5, 8, 1], [{5: -0.2, 4: -3.0}, {6: -0.9, 8: -0.5}, {1: -0.1, 7: -9.0}])
    assert apart(wanted, other) == pytest.approx([0.1, 0.25]), "what comes behind it does not count"
    alike = [{5: -0.1, 9: -3.0}, *wanted.likely[1:]]
    assert apart(wanted, Answer([9, 6, 7], alike)) == pytest.approx([1.45]), "a token that is not the likeliest"
    assert apart(wanted, Answer([2, 6, 7], alike)) == [float("inf")]
    assert apart(Answer([5], [{5: -0.1}]), Answer([5], [{3: -0.1}])) == [float("inf")], "no token in common"


@pytest.mark.parametrize(
    ("dtype", "shift", "same", "right"),
    [
        *(("float32", 0.0, True, True), ("float32", 0.0, False, False), ("float32", 0.02, True, False)),
        *(("bfloat16", 0.03, True, True), ("bfloat16", 0.03, False, True), ("bfloat16", 0.1, True, False)),
    ],
)
def test_a_layout_that_answers_otherwise_is_wrong(
    dtype: str, shift: float, same: bool, right: bool, tmp_path: Path
) -> None:
    bench = Layouts(layouts.Window(tmp_path, 60.0), True, dtype)
    wanted = [Answer([6, 7], [{6: -0.7, 8: -0.76}, {7: -0.2}])] * 20
    got = Answer([6 if same else 8, 7], [{6: -0.7 - shift, 8: -0.76 - shift}, {7: -0.2 - shift}])
    for others in ([got] * 20, [*wanted[1:], got]):
        bench.compare(wanted, "a layout", others)
        bench.compare(wanted, "a fault", others, alike=False)
    assert [row.right for row in bench.rows] == [right, not right] * 2, "one answer is enough"
    assert [path.name for path in tmp_path.iterdir()] == ["wrong_a_layout.json"] * (not right)


@pytest.mark.parametrize(
    ("model", "num_wrong", "right"), [("embedded", 1, True), ("embedded", 2, False), ("dense", 1, False)]
)
def test_one_answer_of_the_embedded_model_may_be_another(
    model: str, num_wrong: int, right: bool, tmp_path: Path
) -> None:
    bench = Layouts(layouts.Window(tmp_path, 60.0), True, "bfloat16")
    wanted = [Answer([6, 7] * 20, [{6: -0.7, 8: -0.76}, {7: -0.2, 9: -3.0}] * 20)] * 30
    other = Answer([8, 7] * 20, [{6: -2.7, 8: -0.1}, {7: -0.2, 9: -3.0}] * 20)
    bench.compare(wanted, f"{model}, a layout", [other] * num_wrong + wanted[num_wrong:])
    assert bench.rows[0].right is right


def answers_by(folder: Path, dtype: torch.dtype, prompts: list[list[int]]) -> list[Answer]:
    """What comes behind each token of each prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    found = []
    for prompt in prompts:
        with torch.inference_mode():
            rows = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        values, tokens = rows.topk(layouts.TOP)
        likely = [dict(zip(*each, strict=True)) for each in zip(tokens.tolist(), values.tolist(), strict=True)]
        found.append(Answer(tokens[:, 0].tolist(), likely))
    return found


def behind_the_same(wanted: list[Answer], got: list[Answer]) -> list[Answer]:
    """With the tokens of the others: the next place is behind the prompt's token, whatever either would say."""
    return [replace(other, tokens=one.tokens) for one, other in zip(wanted, got, strict=True)]


def last_of(answers: list[Answer]) -> list[Answer]:
    return [Answer(answer.tokens[-1:], answer.likely[-1:]) for answer in answers]


@pytest.mark.parametrize(
    "name", ["dense", "experts", *(pytest.param(name, marks=pytest.mark.thorough) for name in SLOW)]
)
def test_sixteen_bits_tell_roundings_from_faults(name: str, tmp_path: Path) -> None:
    bench = Layouts(layouts.Window(tmp_path, 60.0), True)
    folder, prompts = bench.save(name), [prompt for prompt in layouts.prompts_of(4, 250) if len(prompt) > 8]
    exact, rounded = (answers_by(folder, dtype, prompts) for dtype in (torch.float32, torch.bfloat16))
    bench.compare(exact, f"{name}, roundings", behind_the_same(exact, rounded))
    for run in runs([name], 2, ("none",), faults=True)[1:]:
        wrong = answers_by(bench.save(name, run.fault), torch.bfloat16, prompts)
        bench.compare(rounded, run.name, behind_the_same(rounded, wrong), alike=False)
    mixed_up = answers_by(folder, torch.bfloat16, [calm.with_other_tokens(prompt) for prompt in prompts])
    bench.compare(last_of(rounded), f"{name}, a cache mixed up", last_of(mixed_up), alike=False)
    assert all(row.right for row in bench.rows), layouts.table(bench.rows)


def test_a_prompt_of_a_mixed_up_cache_ends_as_it_did() -> None:
    assert calm.with_other_tokens([*range(12)]) == [0, 1, 2, 3, 4, 5, 2, 7, 8, 9, 6, 11]


@pytest.mark.parametrize("name", shapes.LAYERS)
def test_a_few_layers_of_a_large_model_can_be_planned_on_four(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shapes.write(tmp_path, name)
    status = explain.main(["--arch", "sm_90", "--model-path", str(folder), "--tp", "4", "--load-format", "dummy"])
    assert status == 0, capsys.readouterr().out
