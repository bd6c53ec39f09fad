"""Predicted steps with drafts: what they are made of, and what `explain` and `plan` print of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang import explain
from sglang.cli import main
from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.server_args import ServerArgs
from sglang.tuning.draft_steps import draft_ops
from sglang.tuning.step import verify_step

sys.path.insert(0, str(Path(__file__).parents[2] / "lab" / "speculation"))
import draft_shapes

CARD = "rtx-pro-6000-server"
EMBEDDED = ["--model-path", DEFAULT_MODEL_PATH, "--skip-tokenizer-init"]


def of_explain(flags: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert explain.main(["--arch", CARD, "--time", "--json", *flags]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)["time_with_drafts"]
    return result


@pytest.mark.parametrize(
    "flags",
    [
        ["NGRAM"],
        ["NEXTN", "--speculative-num-steps", "2"],
        ["EAGLE3", "--speculative-draft-model-path", str(Path(DEFAULT_MODEL_PATH).parent / "eagle3")],
        ["DFLASH", "--speculative-draft-model-path", str(Path(DEFAULT_MODEL_PATH).parent / "dflash")],
    ],
    ids=["NGRAM", "NEXTN", "EAGLE3", "DFLASH"],
)
def test_every_drafter_is_predicted(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    rows = of_explain([*EMBEDDED, "--speculative-algorithm", *flags, "--accept-length", "2"], capsys)
    assert set(rows) == {"1", "8", "32", "64"}
    for requests, row in rows.items():
        assert row["verify"] >= row["plain"] > 0 and (row["draft"] > 0) == (flags[0] != "NGRAM")
        assert row["pays_from"] == pytest.approx((row["verify"] + row["draft"]) / row["plain"])
        speed = int(requests) * 2 / (row["verify"] + row["draft"])
        assert row["tokens_per_second"] == {"2": pytest.approx(speed)}


@pytest.mark.parametrize("name", draft_shapes.CASES)
def test_what_drafts_multiply(name: str, tmp_path: Path) -> None:
    """Rows of the output head: one a guess and request. A block keeps every row of the step, and computes all its own
    rows whatever is guessed."""
    flags = [*draft_shapes.CASES[name].write(tmp_path, True), "--load-format", "dummy"]
    explained = explain.explain(ServerArgs.from_cli(flags), arch_by_name(CARD), frozenset({"triton"}))
    assert explained.draft is not None
    draft, step = explained.draft.description, verify_step(8, explained.width, 1024)
    ops = list(draft_ops(explained.model, draft, explained.parallel, step))
    heads = [op.tokens for called, op in ops if called == "lm_head"]  # type: ignore[union-attr]
    assert sum(heads) == 8 * (explained.width - 1)
    block = draft.form.rows_a_request > 1
    assert len(heads) == (1 if block else explained.width - 1)
    layers = [op.tokens for called, op in ops if called in ("attn.o", "attn.o_b")]  # type: ignore[union-attr]
    if block:
        assert layers == [8 * draft.form.rows_a_request] * len(draft.model.layers)
        (captured,) = [op for called, op in ops if called == "fc"]
        assert captured.tokens == 8 * explained.width  # type: ignore[union-attr]
    else:
        assert layers == [8 * explained.width, *[8] * (explained.width - 2)]


def test_plan_gives_the_speed_at_an_accept_length(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", *EMBEDDED, "--gpus", "1", "--gpu", "rtx-pro-6000", "--speculative-algorithm", "NEXTN"]
    words += ["--length", "1024", "--concurrency", "8"]
    speeds = []
    for length in ("1.5", "3"):
        assert main([*words, "--accept-length", length, "--json"]) == 0
        (layout,) = json.loads(capsys.readouterr().out)["layouts"]
        drafted = layout["with_drafts"]
        assert drafted["accept_length"] == float(length) and drafted["decode_load"]["pays_from"] > 1
        speeds.append(drafted["decode_one"]["tokens_per_second"])
    assert speeds[1] == pytest.approx(2 * speeds[0])
    assert main(words) == 0
    assert "Predicted with drafts, at 2.5 tokens of a request and step" in " ".join(capsys.readouterr().out.split())
    for length in ("0.5", "inf", "nan", "65"):
        assert main([*words, "--accept-length", length]) == 2
        assert "--accept-length must be from 1 to 64 tokens" in capsys.readouterr().err


def test_accept_lengths_that_no_step_reaches(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*EMBEDDED, "--speculative-algorithm", "NGRAM", "--accept-length", "9.5"]
    assert explain.main(["--arch", CARD, "--time", *flags]) == 2
    assert "a step verifies 8 tokens of a request; give 1 to 8" in capsys.readouterr().err
