"""Files that run in forked processes: what they write and how they end is told, and none outlives who asked for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import interpreter_processes
import pytest
from interpreter_processes import HERE, run_pytest
from pairs import some


def run(folder: Path, body: str) -> tuple[int, str]:
    return run_pytest(arguments(folder, body))


def arguments(folder: Path, body: str) -> list[str]:
    path = folder / "test_it.py"
    path.write_text(f"import os, pathlib, signal, sys, time\n\ndef test_it():\n    {body}\n")
    return [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:schemathesis",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        str(path),
    ]


def gone(pid: int) -> bool:
    """Soon. What has ended and was not waited for counts as gone."""
    for _ in range(6000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_each_has_the_environment_and_the_folder_of_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = interpreter_processes._server()
    for value in ("first", "second"):
        (tmp_path / value).mkdir()
        monkeypatch.chdir(tmp_path / value)
        monkeypatch.setenv("OF_THE_CALL", value)
        body = f"""assert (os.environ["OF_THE_CALL"], os.getcwd()) == ({value!r}, {os.getcwd()!r})
    import interpreter; assert interpreter.INTERPRETED and os.getppid() == {server.pid}
    assert not hasattr(interpreter, "seen"); interpreter.seen = True"""
        status, output = run(tmp_path, body)
        assert status == 0 and "1 passed" in output, output


def test_what_a_failure_writes_is_shown(tmp_path: Path) -> None:
    status, output = run(tmp_path, 'os.write(2, b"to the descriptor\\n"); print("to the stream"); assert 1 == 2')
    assert status == 1
    for text in ("to the descriptor", "to the stream", "assert 1 == 2", "1 failed"):
        assert text in output, output


def test_one_that_is_killed_fails_and_the_next_runs(tmp_path: Path) -> None:
    server = interpreter_processes._server()
    assert run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")[0] == -signal.SIGKILL
    status, output = run(tmp_path, "os.abort()")
    assert status == -signal.SIGABRT and "in test_it" in output, output
    assert run(tmp_path, "pass")[0] == 0
    assert interpreter_processes._server() is server


def test_a_time_limit_ends_one_that_hangs(tmp_path: Path) -> None:
    """As pytest-timeout does: a signal's handler raises."""

    def limit(number: int, frame: FrameType | None) -> None:
        if not pid.exists() or not pid.read_text():
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        else:
            raise TimeoutError

    pid = tmp_path / "pid"
    server = interpreter_processes._server()
    # That of pytest-timeout is put back, since it is this test's own limit.
    before, timer = signal.signal(signal.SIGALRM, limit), signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(TimeoutError):
            run(tmp_path, f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(100)")
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
    assert server.returncode == -signal.SIGKILL and gone(int(pid.read_text()))
    assert run(tmp_path, "pass")[0] == 0


@pytest.mark.parametrize("number", some((signal.SIGKILL, signal.SIGINT), {signal.SIGKILL}), ids=lambda it: it.name)
def test_all_end_with_the_process_that_asked(number: signal.Signals, tmp_path: Path) -> None:
    """One that is killed, as xdist's workers may be; and Ctrl-C, which every process of the terminal gets."""
    pids = tmp_path / "pids"
    body = f'pathlib.Path({str(pids)!r}).write_text(f"{{os.getppid()}} {{os.getpid()}}."); time.sleep(100)'
    program = f"import sys; sys.path.insert(0, {str(HERE)!r}); import interpreter_processes as processes\n"
    program += f"processes.run_pytest({arguments(tmp_path, body)!r})"
    asking = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        while not pids.exists() or not pids.read_text().endswith("."):
            assert asking.poll() is None
            time.sleep(0.05)
    finally:
        if number == signal.SIGKILL:
            asking.kill()
        else:
            os.killpg(asking.pid, number)
    assert asking.wait(300) == -number
    server, child = map(int, pids.read_text().removesuffix(".").split())
    assert gone(server) and gone(child)
