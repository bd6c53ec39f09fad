"""What the workers compile is what a launch in another process looks for in Triton's cache."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.runtime.cache import FileCacheManager

from sglang.srt.kernels.noted_launches import NotLaunched, noted_launches
from sglang.srt.layers.triton_ops import pdl
from sglang.srt.managers.compile_ahead import start
from sglang.srt.managers.compile_ahead.message import Job, Report
from sglang.srt.managers.compile_ahead.workers import Form, Workers
from srt.managers.compile_ahead import launches
from srt.model_executor.test_rehearsal import TINY, planned


@pytest.fixture
def forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Form]]:
    """Those of `launches.launch_two`, as a new process launches them; the cache is empty."""
    before = pdl.options()
    pdl.enable(False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    noted: list[Form] = []

    def note(fn: Any, compile: dict[str, Any]) -> NotLaunched:
        noted.append(Form.of(fn, compile))
        return NotLaunched()

    with noted_launches(launches.ARCH, note):
        launches.launch_two()
    assert len(noted) == 2
    yield noted
    pdl.enable("launch_pdl" in before)


def compiled(forms: list[Form]) -> Report:
    workers = Workers(launches.ARCH, 2)
    for form in forms:
        workers.compile(form)
    return workers.report()


def launched(folder: str) -> list[tuple[str, bool]]:
    """The kernels that another process launches, and whether it found each in the cache."""
    command = [sys.executable, "-W", "ignore", launches.__file__, folder]
    found: list[tuple[str, bool]] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


def test_launches_find_what_was_compiled(forms: list[Form]) -> None:
    assert compiled(forms) == Report(compiled=2)
    found = launched("-")
    assert len(found) == 2 and all(hit for _, hit in found), found
    assert compiled(forms) == Report(known=2)


def test_a_worker_that_dies_ends_the_compilation_and_nothing_else(forms: list[Form]) -> None:
    deadly = forms[0]._replace(kernel="srt.managers.compile_ahead.deadly:kernel")
    report = compiled([deadly, *forms])
    assert any("deadly" in failure for failure in report.failed), report
    assert len(report.failed) + report.compiled == 3


def test_a_kernel_that_does_not_compile_is_named(forms: list[Form]) -> None:
    broken = forms[0]._replace(options=forms[0].options | {"num_warps": 3})
    report = compiled([broken, forms[1]])
    assert report.compiled == 1
    (failure,) = report.failed
    assert failure.startswith(forms[0].kernel)


def test_a_full_disk(forms: list[Form], monkeypatch: pytest.MonkeyPatch) -> None:
    def put(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FileCacheManager, "put", put)
    report = compiled(forms)
    assert report.compiled == 0
    assert len(report.failed) == 2 and "No space left" in report.failed[0]


def test_a_job_keeps_the_plan(tmp_path: Path) -> None:
    args, plan = planned(TINY)
    here, there = Pipe()
    here.send(Job(args, plan, 0, frozenset({1}), 2, tmp_path / "done"))
    job: Job = there.recv()
    assert (job.args, job.plan, job.cpus, job.processes) == (args, plan, {1}, 2)
    assert all(job.plan.choices[op].spec is choice.spec for op, choice in plan.choices.items())


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_a_whole_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The process compiles all that a start of the embedded model launches: 50 kernels, two minutes of a core."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(start, "usable_cpus", lambda: frozenset(range(3)))
    args, plan = planned(TINY)
    compiling = start.compile_ahead(args, plan, 0, 1)
    assert compiling is not None
    with caplog.at_level(logging.INFO):
        compiling.wait(1000)
    (message,) = caplog.messages
    found = launched(str(TINY))
    assert len(found) > 30 and message.startswith(f"Compiled {len(found)} kernels in ")
    assert not [name for name, hit in found if not hit]
