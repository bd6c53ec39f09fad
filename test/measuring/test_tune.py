"""From a model's config to its plan with measured times, on a faked GPU."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.explain import explain
from sglang.measuring import __main__ as at_start
from sglang.measuring import command
from sglang.measuring.plan_points import points_of
from sglang.measuring.points import Candidate, Point
from sglang.measuring.tune import run, unanswered
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.measured import store
from sglang.srt.kernels.measured.choices import MeasuredChoices
from sglang.srt.kernels.measured.records import Setting
from sglang.srt.kernels.tile_configs import config_for
from sglang.srt.managers import measure_first as measure_first_module
from sglang.srt.managers.measure_first import measure_first
from sglang.srt.server_args import ServerArgs

CONFIGS = Path(__file__).parents[1] / "srt" / "kernels" / "configs"
SETTING = Setting("a GPU", "1", "3.9.0", "2.13.0", "0.2.0", "abc", "600", "3090")


class Faked:
    """A GPU on which each candidate takes the predicted time, and some take half of it. Time passes by one second a
    turn."""

    def __init__(self, halved: str = "") -> None:
        self.now, self._halved = 0.0, halved

    def clock(self) -> float:
        return self.now

    def open(self, point: Point, candidate: Candidate, limit_s: float) -> Faked.Timer:
        return Faked.Timer(self, (candidate.predicted or 1e-4) * (0.5 if candidate.name == self._halved else 1.0))

    class Timer:
        def __init__(self, gpu: Faked, seconds: float) -> None:
            self._gpu, self._seconds = gpu, seconds

        def seconds(self, limit_s: float) -> float:
            self._gpu.now += 1.0
            return self._seconds

        def close(self) -> None: ...


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerArgs:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text((CONFIGS / "qwen3_moe.json").read_text())
    return ServerArgs.from_kwargs(model_path=str(tmp_path))


def test_points_are_what_steps_launch_the_most_valuable_first(args: ServerArgs) -> None:
    explanation = explain(args, arch_by_name("sm_120"), frozenset({"triton"}), advises=False)
    points = points_of(explanation)
    values = [point.value for point in points]
    assert values == sorted(values, reverse=True) and values[-1] > 0
    assert len({point.question for point in points}) == len(points)
    assert {point.question.op for point in points} == {"linear", "fused_moe", "decode_attention", "extend_attention"}
    assert points[0].question.op == "fused_moe", "most of this model's steps"
    for point in points:
        assert len(point.candidates) >= 2 and len({each.name for each in point.candidates}) == len(point.candidates)
        assert point.ops and (point.question.tokens == 0 or len(point.ops) == 1)


def test_what_was_measured_is_what_the_next_plan_takes(args: ServerArgs) -> None:
    arch, packages, said = arch_by_name("sm_120"), frozenset({"triton"}), list[str]()
    before = explain(args, arch, packages, advises=False)
    points = points_of(before)
    first = points[0]
    gpu = Faked(halved=first.candidates[1].name)
    assert run(points[:6], gpu, SETTING, 1e9, said.append, gpu.clock) == 6
    assert len(said) == 6 and f"{first.candidates[1].name} instead" in said[0] and "measured here: " in said[0]
    assert len(unanswered(points, SETTING)) == len(points) - 6, "a later start measures the others only"

    measured = MeasuredChoices.of(store.read(SETTING))
    after = explain(args, arch, packages, advises=False, measured=measured)
    now = config_for(after.tile_configs["fused_moe"].by_shape[None], first.question.tokens)
    assert first.candidates[1].config is not None
    assert now.candidates == first.candidates[1].config.candidates, "its own reason is gone where a neighbour is equal"
    assert any("; the table's took" in line for line in after.tile_configs["fused_moe"].measured)
    again = points_of(explain(args, arch, packages, advises=False))
    assert [point.question for point in again] == [point.question for point in points]


def test_the_time_ends_it_and_all_that_is_complete_is_kept(args: ServerArgs) -> None:
    points = points_of(explain(args, arch_by_name("sm_120"), frozenset({"triton"}), advises=False))
    gpu, said = Faked(), list[str]()
    count = run(points, gpu, SETTING, 60.0, said.append, gpu.clock)
    assert 0 < count < len(points) and gpu.now <= 61
    assert len({question for question, _ in store.read(SETTING)}) == count


def test_a_disk_that_gets_full_ends_it(args: ServerArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    points = points_of(explain(args, arch_by_name("sm_120"), frozenset({"triton"}), advises=False))
    said, gpu = list[str](), Faked()
    monkeypatch.setattr("sglang.measuring.tune.add", lambda setting, records: "No space left on device")
    assert run(points, gpu, SETTING, 60.0, said.append, gpu.clock) == 0
    assert said == ["What was measured could not be kept: No space left on device. Measuring ends."]


# --- the command, and a server's start --------------------------------------------------------------------------------


@pytest.mark.parametrize("minutes", ["0", "61", "nan"])
def test_minutes_out_of_range_are_refused(minutes: str) -> None:
    with pytest.raises(UserError, match="--minutes"):
        command.run_tune(["--minutes", minutes, "--model-path", str(DEFAULT_MODEL_PATH)])


def test_no_gpu_measures_nothing_and_a_start_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sglang.measuring.tune.current_arch", no_gpu)
    with pytest.raises(UserError, match="no CUDA device"):
        command.run_tune([str(DEFAULT_MODEL_PATH)])
    args = ServerArgs.from_kwargs(model_path=str(DEFAULT_MODEL_PATH), measure_seconds=5)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asdict(args))))
    at_start.main()
    assert capsys.readouterr().out == "Nothing is measured: torch sees no CUDA device\n"


def no_gpu(gpu: int, device: str) -> object:
    raise UserError("torch sees no CUDA device")


def test_a_forced_gpu_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_FORCE_ARCH", "sm_120")
    with pytest.raises(UserError, match="SGLANG_FORCE_ARCH"):
        command.run_tune([str(DEFAULT_MODEL_PATH)])


def test_a_start_without_the_flag_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr(measure_first_module.subprocess, "Popen", started)
    measure_first(ServerArgs.from_kwargs(model_path=str(DEFAULT_MODEL_PATH)))
    for flags in ({"no_measured_choices": True}, {"nnodes": 2, "tp_size": 2, "dist_init_addr": "127.0.0.1:1"}):
        measure_first(ServerArgs.from_kwargs(model_path=str(DEFAULT_MODEL_PATH), measure_seconds=5, **flags))


def test_a_start_gives_its_options_and_outlives_what_fails_and_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = ServerArgs.from_kwargs(model_path=str(DEFAULT_MODEL_PATH), measure_seconds=0.1)
    copy = tmp_path / "options.json"
    measure_first(args, ["sh", "-c", f"cat > {copy}"], grace_s=60.0)
    assert asdict(ServerArgs.from_kwargs(**json.loads(copy.read_text()))) == asdict(args)
    assert not caplog.text
    measure_first(args, ["sh", "-c", "cat > /dev/null; exit 3"], grace_s=60.0)
    assert "status 3" in caplog.text
    measure_first(args, ["sh", "-c", "cat > /dev/null; sleep 1000 & sleep 1000"], grace_s=0.1)
    assert "did not end" in caplog.text
    measure_first(args, [str(tmp_path / "no program")])
    assert "could not begin" in caplog.text
