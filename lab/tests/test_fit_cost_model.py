"""Fitting the cost model: on times made up from other constants, and judged on shapes that were left out."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import fit_cost_model as fitting
import pytest

from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.spec import TileRecord
from sglang.srt.layers.moe.fused_moe_triton.tiles import tile
from sglang.tuning.cost_model import DEFAULT, Constants
from sglang.tuning.predict import predict
from sglang.tuning.search_space import KINDS, MoeShape

H200 = arch_by_name("h200")
SHAPES = (MoeShape(128, 768, 2048, 8, None), MoeShape(161, 192, 5120, 9, "fp8_channel"))
TRUTH = fitting.START.replaced({"latency": 2.5e-6, "matrix_share": 0.3, "step_overhead": 4e-7, "prologue": 5e-6})
MEASURED = Path(fitting.__file__).parent / "measured" / "2026-11-21-h200.json.gz"
HELD_OUT = MEASURED.with_name("2026-11-21-h200-held-out.json.gz")


def measured(truth: Constants = TRUTH, noise: float = 0.02) -> list[fitting.Measured]:
    """What a GPU with these constants would take, a few tiles a kind."""
    generator = random.Random(1)
    points = []
    for shape in SHAPES:
        for tokens in (1, 64, 1024):
            timings = {}
            for kind in KINDS:
                tiles = [tile(m, n, k, 1, 4, s) for m in (16, 64) for n in (32, 128) for k in (64, 128) for s in (2, 4)]
                timings[kind] = []
                for choice in tiles:
                    smem = 2 * (choice["BLOCK_M"] + choice["BLOCK_N"]) * choice["BLOCK_K"] * choice["num_stages"]
                    mma = ("wgmma m64n64k16 bf16",) if choice["BLOCK_M"] == 64 else ("m16n8k16 bf16",)
                    record = TileRecord(min(smem, 200_000), 120, 0, 0, mma)
                    seconds = predict(shape, kind, choice, record, tokens, H200, truth)
                    timings[kind].append(fitting.Timing(choice, record, seconds * generator.uniform(1, 1 + noise)))
            points.append(fitting.Measured(shape, tokens, timings))
    return points


def test_a_fit_lowers_the_objective_and_stays_physical() -> None:
    points = measured()
    before, after = fitting.objective(points, H200, fitting.START), fitting.fit(points, H200, rounds=4)
    assert fitting.objective(points, H200, after) < 0.8 * before
    assert all(value > 0 for value in asdict(after).values())
    assert after.matrix_share <= 1 and after.bandwidth_share <= 1


def test_what_the_times_do_not_decide_stays() -> None:
    """Nothing is widened here, and no partial sum is scaled."""
    after = fitting.fit(measured()[:3], H200, rounds=4)
    assert (after.issue_share, after.scale_ops) == (fitting.START.issue_share, fitting.START.scale_ops)
    assert after.spill_penalty == fitting.START.spill_penalty
    assert after != fitting.START


@pytest.mark.parametrize(("path", "shapes", "worst", "mean"), [(MEASURED, 7, 1.06, 1.045), (HELD_OUT, 3, 1.055, 1.035)])
def test_the_committed_constants_choose_well(path: Path, shapes: int, worst: float, mean: float) -> None:
    """Within 15% of the fastest tiles for each shape, as benchmark/results/experts.md#the-choice-of-tiles says."""
    arch, points = fitting.read_measured(path)
    choices = fitting.judge(points, arch, DEFAULT)
    by_shape: dict[str, list[float]] = {}
    for choice in choices:
        by_shape.setdefault(choice.shape, []).append(choice.ratio)
    assert arch == H200
    assert len(by_shape) == shapes and all(len(ratios) >= 8 for ratios in by_shape.values())
    assert min(choice.ratio for choice in choices) >= 1.0
    assert max(fitting.geometric_mean(ratios) for ratios in by_shape.values()) < worst
    assert fitting.geometric_mean([choice.ratio for choice in choices]) < mean


def test_the_measured_space_is_wide_enough_for_a_claim() -> None:
    """Tiles chosen at random, with one BLOCK_M, are far slower than the best."""
    arch, points = fitting.read_measured(MEASURED)
    generator = random.Random(0)
    ratios = []
    for point in points:
        order = {kind: [generator.random() for _ in point.timings[kind]] for kind in KINDS}
        ratios.append(point.best(order) / point.best())
    assert fitting.geometric_mean(ratios) > 1.3


def test_shapes_are_judged_with_constants_that_have_not_seen_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[MoeShape]] = []

    def spy(points: list[fitting.Measured], arch: object, rounds: int) -> Constants:
        seen.append({point.shape for point in points})
        return DEFAULT

    monkeypatch.setattr(fitting, "fit", spy)
    judged = fitting.leave_one_out(measured(), H200, 1)
    assert seen == [{SHAPES[1]}, {SHAPES[0]}]
    assert [c.shape for c in judged] == [str(SHAPES[0])] * 3 + [str(SHAPES[1])] * 3


def test_the_truth_is_judged_perfect_and_another_model_is_not() -> None:
    points = measured(noise=0.0)
    assert [choice.ratio for choice in fitting.judge(points, H200, TRUTH)] == pytest.approx([1.0] * 6)
    wrong = TRUTH.replaced({"latency": 1e-12, "prologue": 1e-12, "matrix_share": 1e-3})
    assert max(choice.ratio for choice in fitting.judge(points, H200, wrong)) > 1.05


def test_the_choice_counts_with_the_measured_time_of_tiles_of_one_block_m() -> None:
    """Not with the best measured time of each product apart, nor with predicted times."""
    record = TileRecord(0, 0, 0, 0, ())
    low, high = tile(16, 32, 64, 1, 4, 2), tile(64, 32, 64, 1, 4, 2)
    timings = {
        "gate_up": [fitting.Timing(low, record, 1.0), fitting.Timing(high, record, 4.0)],
        "down": [fitting.Timing(low, record, 5.0), fitting.Timing(high, record, 1.0)],
    }
    point = fitting.Measured(SHAPES[0], 1, timings)
    assert point.best() == 5.0  # 64 rows: 4 + 1, and not 1 + 1
    assert point.best({"gate_up": [1.0, 2.0], "down": [1.0, 2.0]}) == 6.0  # predicted 2.0; measured 1 + 5


def test_the_script_reads_what_validation_wrote_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [
        {
            "shape": asdict(point.shape),
            "num_tokens": point.num_tokens,
            "timings": {
                kind: [[t.tile, [*asdict(t.record).values()], t.seconds] for t in point.timings[kind]] for kind in KINDS
            },
        }
        for point in measured()
    ]
    source, report = tmp_path / "measured.json", tmp_path / "report.json"
    source.write_text(json.dumps({"device": "NVIDIA H200", "product": "h200", "points": points}))
    assert fitting.main([str(source), "--report", str(report), "--rounds", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("geometric mean") == 4 and "latency: float = " in out
    written = json.loads(report.read_text())
    ratios = [c["chosen_us"] / c["best_us"] for c in written["held_out"]]
    assert len(ratios) == 6 and min(ratios) >= 1.0
    assert written["geometric_means"]["held_out"] == pytest.approx(fitting.geometric_mean(ratios))
    assert set(written["constants"]) == set(asdict(DEFAULT))


def test_the_table_has_a_line_a_shape() -> None:
    choices = [
        fitting.Choice("a", 1, 10.0, 12.0),
        fitting.Choice("a", 8, 10.0, 10.0),
        fitting.Choice("bb", 8, 5.0, 10.0),
    ]
    header, first, second, last = fitting.table(choices)
    assert header.split() == ["1", "8", "mean"]
    assert first.split() == ["a", "1.20", "1.00", "1.095"]
    assert second.split() == ["bb", "2.00", "2.000"]
    assert last == "geometric mean 1.339, worst 2.00"
