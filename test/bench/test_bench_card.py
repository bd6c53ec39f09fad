"""The kit for owners of a card, with a timer that needs none. What it launches: test_device_calls.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang.bench import card
from sglang.srt.hardware.arch import ArchTraits, arch_by_name
from sglang.tuning.ops import Linear, Op, parse_shape
from sglang.tuning.predicted_times import predicted

CARD = arch_by_name("rtx-pro-6000-server")


def twice_as_long(op: Op, arch: ArchTraits) -> float:
    forecast = predicted(op, arch)
    assert forecast is not None
    return 2 * forecast.seconds


def test_the_list_is_what_models_run_and_parses() -> None:
    shapes = list(card.shapes())
    assert len(shapes) == len(set(shapes)) >= 90
    assert {parse_shape(shape).kind for shape in shapes} == {
        "linear", "fused_moe", "decode_attention", "extend_attention", "gated_delta_rule", "latent_absorb",
    }  # fmt: skip
    first = [parse_shape(shape).kind for shape in shapes[:6]]
    assert len(set(first)) == 6, "a budget leaves out no op"


def test_the_file_has_predicted_measured_and_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "times.json"
    argv = ["--arch", "rtx-pro-6000-server", "--out", str(out), "--only", "tokens=64"]
    assert card.main(argv, measure=twice_as_long) == 0
    report = json.loads(out.read_text())
    assert report["card"]["product"] == "rtx-pro-6000-server" and report["card"]["torch"]
    assert len(report["rows"]) == len([shape for shape in card.shapes() if "tokens=64" in shape]) == 16
    for row in report["rows"]:
        assert row["measured"] == pytest.approx(2 * row["predicted"])
        assert row["floor"] <= row["predicted"] * 1.03
    assert report["summary"]["linear"]["measured_over_predicted"] == pytest.approx(2)
    text = capsys.readouterr().out
    assert "measured / predicted 2.00" in text and "best known" in text and str(out) in text


def test_an_h200_gets_predictions_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "times.json"
    shape = "linear tokens=64 rows=4096 cols=7168"
    assert card.main(["--arch", "h200", "--out", str(out), "--shape", shape], measure=twice_as_long) == 0
    (row,) = json.loads(out.read_text())["rows"]
    (other,) = [card.row_of(shape, CARD, twice_as_long)]
    assert row["best"] is None and other.best is not None
    assert other.predicted is not None and row["predicted"] < other.predicted


def test_a_card_that_nobody_measured_is_measured_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "times.json"
    for product, known in (("l40s", False), ("rtx-5090", True)):  # the latter by its data sheet
        argv = ["--arch", product, "--out", str(out), "--shape", "linear tokens=64 rows=4096 cols=7168"]
        assert card.main(argv, measure=lambda op, arch: 1e-6) == 0
        (row,) = json.loads(out.read_text())["rows"]
        assert row["measured"] == pytest.approx(1.0) and (row["predicted"] is not None) == known
        assert ("nothing is predicted" in capsys.readouterr().out) != known


def test_a_kernel_that_fails_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(op: Op, arch: ArchTraits) -> float:
        if isinstance(op, Linear):
            raise RuntimeError("no such instruction\nand more")
        return 1e-6

    out = tmp_path / "times.json"
    shapes = ["linear tokens=1 rows=64 cols=64", "latent_absorb tokens=1 heads=8 rows=512 cols=128"]
    argv = ["--arch", "rtx-pro-6000-server", "--out", str(out), *(a for s in shapes for a in ("--shape", s))]
    assert card.main(argv, measure=fails) == 0
    first, second = json.loads(out.read_text())["rows"]
    assert first["problem"] == "RuntimeError: no such instruction" and first["measured"] is None
    assert second["measured"] == pytest.approx(1.0)
    assert "no such instruction" in capsys.readouterr().out


def test_the_budget_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ticks = iter(range(0, 100_000, 100))
    out = tmp_path / "times.json"
    argv = ["--arch", "rtx-pro-6000-server", "--out", str(out), "--budget", "350"]
    assert card.main(argv, measure=twice_as_long, clock=lambda: float(next(ticks))) == 0
    assert len(json.loads(out.read_text())["rows"]) == 3
    assert "shapes left out" in capsys.readouterr().err


def test_a_run_that_is_stopped_keeps_what_it_has(tmp_path: Path) -> None:
    seen: list[str] = []

    def stops(op: Op, arch: ArchTraits) -> float:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(op.kind)
        return 1e-6

    out = tmp_path / "times.json"
    with pytest.raises(KeyboardInterrupt):
        card.main(["--arch", "rtx-pro-6000-server", "--out", str(out)], measure=stops)
    assert len(json.loads(out.read_text())["rows"]) == 2


@pytest.mark.parametrize(
    "argv", [["--shape", "linear rows=3"], ["--only", "nothing like this"], ["--budget", "0"], ["--budget", "nan"]]
)
def test_a_bad_request_says_what_to_do(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert card.main(["--arch", "rtx-pro-6000-server", *argv], measure=twice_as_long) == 2
    assert capsys.readouterr().err.startswith("error: ")
