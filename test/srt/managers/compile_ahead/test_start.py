"""A rank starts the process that compiles where it helps, and goes on without it whatever happens there."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("triton")

from sglang.srt.managers.compile_ahead import start
from sglang.srt.managers.compile_ahead.message import Report
from sglang.srt.managers.compile_ahead.start import CompileAhead, compile_ahead
from sglang.srt.plan.plan import Plan
from sglang.srt.server_args import ServerArgs
from srt.model_executor.test_rehearsal import TINY, planned

CPUS = frozenset(range(8))
PIPE = "__import__('multiprocessing.connection').connection.Connection(int(__import__('sys').argv[-1]))"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(start, "usable_cpus", lambda: CPUS)


@pytest.fixture(scope="module")
def job() -> tuple[ServerArgs, Plan]:
    return planned(TINY)


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code)


def reporting(**report: Any) -> tuple[str, ...]:
    return python(f"{PIPE}.send_bytes({msgspec.json.encode(Report(**report))!r})")


def started(job: tuple[ServerArgs, Plan], command: tuple[str, ...]) -> CompileAhead:
    compiling = compile_ahead(*job, 0, 1, command)
    assert compiling is not None
    return compiling


def test_it_says_what_was_compiled_and_an_equal_start_does_nothing(
    job: tuple[ServerArgs, Plan], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        compiling = started(job, reporting(compiled=61, known=2, seconds=9.04))
        compiling.wait()
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "Compiled 61 kernels in 9.0 s beside reading weights, found 2 in Triton's cache; waited"
    )
    compiling.done.touch()  # as the process does
    assert compile_ahead(*job, 0, 1) is None
    args, plan = job
    unlike = replace(args, port=1, random_seed=2, log_level="debug", base_gpu_id=1)
    assert compile_ahead(unlike, plan, 0, 1) is None
    started((replace(args, kv_cache_dtype="fp8_e5m2"), plan), reporting()).wait()


def test_what_did_not_compile_is_named(job: tuple[ServerArgs, Plan], caplog: pytest.LogCaptureFixture) -> None:
    started(job, reporting(compiled=1, failed=["a:b: no", "c:d: no"], problem="it ended")).wait()
    assert [record.getMessage() for record in caplog.records] == [
        "Not compiled ahead: a:b: no and 1 more",
        "Only some kernels were compiled ahead: it ended",
    ]


def test_where_nothing_is_started(job: tuple[ServerArgs, Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    args, plan = job
    assert compile_ahead(replace(args, disable_compile_ahead=True), plan, 0, 1) is None
    assert compile_ahead(args, replace(plan, device="cpu"), 0, 1) is None
    assert compile_ahead(args, plan, 1, 1) is None, "another rank of the machine does it"
    assert compile_ahead(args, plan, 0, len(CPUS) - 1) is None, "one CPU is left beside the ranks"
    monkeypatch.setenv("SGLANG_FORCE_ARCH", "rtx-5090")
    assert compile_ahead(args, plan, 0, 1) is None


def test_a_process_that_fails(job: tuple[ServerArgs, Plan], caplog: pytest.LogCaptureFixture) -> None:
    started(job, python("import sys; print('before', file=sys.stderr); sys.exit('no room')")).wait()
    assert caplog.messages == ["No kernels were compiled ahead: no room"]
    started(job, reporting()).wait()  # the next start tries again


def test_a_process_that_cannot_start(job: tuple[ServerArgs, Plan], caplog: pytest.LogCaptureFixture) -> None:
    assert compile_ahead(*job, 0, 1, ("/nonexistent",)) is None
    assert "No kernels are compiled ahead: FileNotFoundError" in caplog.text


def test_a_process_that_takes_too_long_is_ended_with_its_workers(
    job: tuple[ServerArgs, Plan], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = tmp_path / "worker"
    code = f"import os, time; pid = os.fork() or open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    compiling = started(job, python(code))
    while not (told.exists() and told.read_text()):
        time.sleep(0.01)
    compiling.wait(limit_s=0.01)
    assert "the start goes on" in caplog.text
    assert compiling.process.returncode == -9
    while _runs(int(told.read_text())):
        time.sleep(0.01)
    assert compile_ahead(*job, 0, 1) is None, "later starts do not wait for it"


def test_a_cache_that_cannot_be_written(
    job: tuple[ServerArgs, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert compile_ahead(*job, 0, 1) is None
    (message,) = caplog.messages
    assert message.startswith("No kernels are compiled ahead: NotADirectoryError")


def test_no_gpu_is_seen_by_the_process(job: tuple[ServerArgs, Plan]) -> None:
    code = f"import os; {PIPE}.send_bytes(os.environ['CUDA_VISIBLE_DEVICES'].encode() + b'nothing')"
    compiling = started(job, python(code))
    assert compiling.pipe.recv_bytes() == b"nothing"
    compiling.end()


def _runs(pid: int) -> bool:
    shown = subprocess.run(("ps", "-o", "stat=", "-p", str(pid)), capture_output=True, text=True).stdout.strip()
    return bool(shown) and not shown.startswith("Z") and os.path.exists(f"/proc/{pid}")
