"""The validation run with the GPU replaced: what is timed, what is written, and what happens when the time is up."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fit_cost_model
import pytest
import validate_cost_model as validation

from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.kernels.spec import TileRecord
from sglang.tuning.predict import predict
from sglang.tuning.search_space import KINDS, MoeShape

H200 = arch_by_name("h200")
SPILLS = "K64 M128 N64"


def cost(shape: MoeShape, kind: str, tile: dict[str, int]) -> TileRecord | str:
    if tile["BLOCK_M"] == 32:
        return "does not compile: no"
    spills = 8 if tile_key(tile).startswith(SPILLS) else 0
    return TileRecord(60_000, 100, spills, spills, ("wgmma m64n64k16 bf16",))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Takes 1 s of a clock for each timing; the times are the model's, doubled."""
    state: dict[str, Any] = {"now": 0.0, "timed": 0}

    class Problem:
        def __init__(self, shape: MoeShape) -> None:
            self.shape = shape

        def time(self, kind: str, tile: dict[str, int], tokens: int, best: float) -> float:
            state["now"] += 1.0
            state["timed"] += 1
            record = cost(self.shape, kind, tile)
            assert isinstance(record, TileRecord) and not record.spills
            return 2 * predict(self.shape, kind, tile, record, tokens, H200)

    def compile_all(wanted: Any, processes: int) -> Any:
        return {
            shape: {(kind, tile_key(t)): cost(shape, kind, t) for kind in KINDS for t in tiles[kind]}
            for shape, tiles in wanted.items()
        }

    monkeypatch.setattr(validation, "Problem", Problem)
    monkeypatch.setattr(validation, "compile_all", compile_all)
    monkeypatch.setattr(validation, "current_arch", lambda: H200)
    monkeypatch.setattr(validation, "device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(validation, "time", SimpleNamespace(monotonic=lambda: state["now"]))
    return state


def test_at_least_six_shapes_and_eight_batch_sizes() -> None:
    assert len(set(validation.SHAPES)) >= 6 and len(set(validation.BATCH_SIZES)) >= 8
    assert len({shape.scheme for shape in validation.SHAPES}) >= 3


def test_shapes_that_the_model_has_not_seen_can_be_named(
    machine: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "measured.json"
    flags = ["--output", str(output), "--minutes", "1e6", "--batch-size", "64"]
    assert validation.main([*flags, "--shape", "64,1408,2048,6,fp8_block", "64,1408,2048,6,bf16"]) == 0
    _, points = fit_cost_model.read_measured(output)
    assert [p.shape for p in points] == [MoeShape(64, 1408, 2048, 6, "fp8_block"), MoeShape(64, 1408, 2048, 6, None)]
    for wrong in ("64,1408,2048,6,fp7", "64,1408,2048,bf16", "64,x,2048,6,bf16"):
        with pytest.raises(SystemExit):
            validation.main([*flags, "--shape", wrong])
        assert wrong in capsys.readouterr().err


def test_an_interruption_leaves_what_was_timed(machine: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    output = tmp_path / "measured.json"
    points = validation.measure

    def interrupted(*args: Any) -> Any:
        for count, point in enumerate(points(*args)):
            if count == 2:
                raise KeyboardInterrupt
            yield point

    monkeypatch.setattr(validation, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        validation.main(
            ["--output", str(output), "--minutes", "1e6", "--batch-size", "8", "64", "1024", "--only", "N=768"]
        )
    _, kept = fit_cost_model.read_measured(output)
    assert [p.num_tokens for p in kept] == [8, 64]


def test_everything_that_can_be_launched_is_timed_and_the_model_judged(
    machine: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "measured.json"
    flags = ["--output", str(output), "--minutes", "1e6", "--batch-size", "8", "1024", "--only", "N=768"]
    assert validation.main(flags) == 0
    arch, points = fit_cost_model.read_measured(output)
    assert arch == H200
    assert {(p.shape.scheme, p.num_tokens) for p in points} == {(s, t) for s in (None, "fp8_block") for t in (8, 1024)}
    assert machine["timed"] == sum(len(p.timings[kind]) for p in points for kind in KINDS)
    few, many = (next(p for p in points if p.num_tokens == tokens) for tokens in (8, 1024))
    assert {t.tile["BLOCK_M"] for t in few.timings["down"]} == {16}  # half a token an expert
    assert {t.tile["BLOCK_M"] for t in many.timings["down"]} == {16, 64, 128}
    assert not any(tile_key(t.tile).startswith(SPILLS) for t in many.timings["gate_up"])
    out = capsys.readouterr().out
    assert "geometric mean 1.000, worst 1.00" in out  # times that are the model's own
    assert "before" not in out


def test_when_the_time_is_up_every_shape_has_had_a_part_of_it(
    machine: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "measured.json"
    validation.main(["--output", str(output), "--minutes", "10", "--batch-size", "64", "128", "256"])
    shapes = {json.dumps(point["shape"]) for point in json.loads(output.read_text())["points"]}
    assert len(shapes) == len(validation.SHAPES)
    assert "The time was up before" in capsys.readouterr().out
