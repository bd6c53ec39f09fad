"""What holds a window of GPU time together: parts that fail or come too late are said, and the rest goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import two_gpus


def test_a_part_that_fails_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    window = two_gpus.Window(tmp_path, 100.0)
    with window.part("answers"):
        raise RuntimeError("no answer")
    with window.part("load"):
        window.say("goes on")
    assert window.failures == ["answers: RuntimeError: no answer"]
    assert "goes on" in capsys.readouterr().out


def test_nothing_waits_behind_the_end(tmp_path: Path) -> None:
    window = two_gpus.Window(tmp_path, -1.0)
    with window.part("load"):
        subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=window.left(60.0), check=False)
    assert len(window.failures) == 1 and "TimeoutExpired" in window.failures[0]


@pytest.mark.parametrize("code", ["pass", "import time; time.sleep(60)"])
def test_a_process_that_never_gets_ready_is_killed(code: str, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    (tmp_path / "run.log").write_text("out of memory")
    run = two_gpus.StepTimes("run", two_gpus.Window(tmp_path, 100.0), process)
    with pytest.raises(RuntimeError, match="not ready: out of memory"):
        run.wait_until_ready(time.monotonic() + 0.5)
    assert process.returncode is not None


def test_rows_count_also_when_the_process_dies_behind_them(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"nccl": {}}')
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"], start_new_session=True)
    assert two_gpus.StepTimes("run", two_gpus.Window(tmp_path, 100.0), process).measure() == {"nccl": {}}
    assert (tmp_path / "run.turn").exists()


def test_texts_of_answers_leave_out_their_ids() -> None:
    first = two_gpus._text('[{"id": "1", "message": {"content": "a \\"b\\""}, "arguments": "{}"}]')
    assert first == two_gpus._text('[{"id": "2", "message": {"content": "a \\"b\\""}, "arguments": "{}"}]')
    assert first != two_gpus._text('[{"id": "1", "message": {"content": "c"}, "arguments": "{}"}]')
