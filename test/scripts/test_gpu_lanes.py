"""Lanes of `scripts/gpu_lanes.py`: each has GPUs, ports and logs of its own, and waits for what another one has."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_lanes  # noqa: E402

SAY = 'echo "$CUDA_VISIBLE_DEVICES $BENCHMARK_PORT"; ls -d $LOGS'


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, gpus: str = "4,5,6,7", limit: float = 300.0) -> int:
    (tmp_path / "lanes").write_text(text)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    return gpu_lanes.main([str(tmp_path / "lanes"), "--out", str(tmp_path / "out"), "--limit", str(limit)])


def said(tmp_path: Path, name: str) -> list[str]:
    return (tmp_path / "out" / f"{name}.log").read_text().split()


def test_lanes_share_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two_runs = tmp_path / "two_runs"
    wait = f"until test -e {two_runs}; do sleep 0.02; done"  # a lane that ends gives its GPU to the next
    lanes = f"# name | GPUs | command\none | 1 | {SAY}; {wait}\n\n"
    lanes += f"two | 2 | touch {two_runs}; {SAY} | cat\nbad | 1 | echo wrong; exit 3\n"
    assert run(tmp_path, monkeypatch, lanes) == 1
    found = {name: said(tmp_path, name) for name in ("one", "two")}
    assert found["one"] == ["4", "32000", str(tmp_path / "out" / "one")]
    assert found["two"] == ["5,6", "32100", str(tmp_path / "out" / "two")]
    out = capsys.readouterr().out
    assert "== one: 0" in out and "== bad: 3\nwrong" in out


def test_a_lane_waits_for_gpus_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "mark"
    lanes = f"first | 2 | sleep 0.3; touch {mark}\nsecond | 1 | test -e {mark} && echo $CUDA_VISIBLE_DEVICES\n"
    assert run(tmp_path, monkeypatch, lanes, gpus="0,1") == 0
    assert said(tmp_path, "second") == ["0"]


def test_all_end_with_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child = tmp_path / "child"
    lanes = f"long | 1 | echo begun; (echo $BASHPID > {child}; sleep 600) | cat\nlate | 1 | echo late\n"
    assert run(tmp_path, monkeypatch, lanes, gpus="0", limit=3.0) == 1
    out = capsys.readouterr().out
    assert "== long: its time was over\nbegun" in out and "== late: no time was left" in out
    status = Path(f"/proc/{int(child.read_text())}/stat")
    for _ in range(3000):
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] in "ZX":
            return
        time.sleep(0.1)
    raise AssertionError("what a lane started lives on")


@pytest.mark.parametrize("line", ["no bars", "name | two | command", "name | 1"])
def test_a_line_that_is_no_lane(line: str) -> None:
    with pytest.raises(ValueError, match="not `name | GPUs | command`"):
        gpu_lanes.read_lanes(line)


def test_a_lane_that_fits_no_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, monkeypatch, "wide | 3 | true", gpus="0,1") == 2
    assert "more GPUs than the 2 of this machine: wide" in capsys.readouterr().err
