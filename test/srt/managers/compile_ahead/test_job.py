"""When the process that compiles does its job, and what it says to later starts."""

from __future__ import annotations

import fcntl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from sglang.srt.managers.compile_ahead import job as jobs
from sglang.srt.managers.compile_ahead.message import Report


@pytest.fixture
def job(tmp_path: Path) -> Any:
    return SimpleNamespace(done=tmp_path / "done")


def compiles(monkeypatch: pytest.MonkeyPatch, **report: Any) -> None:
    monkeypatch.setattr(jobs, "compiled", lambda job: Report(**report))


def test_an_equal_start_that_came_first_has_done_it(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles(monkeypatch, compiled=3)
    assert jobs.run(job).compiled == 3 and job.done.exists()
    assert jobs.run(job).compiled == 0


def test_the_next_start_tries_again_what_failed(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles(monkeypatch, compiled=3, failed=["a:b: no space"])
    assert jobs.run(job).failed and not job.done.exists()
    assert jobs.run(job).compiled == 3


def test_it_does_not_wait_for_others_without_end(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles(monkeypatch, compiled=3)
    monkeypatch.setattr(jobs, "TURN_S", 0.2)
    with job.done.with_name("lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert jobs.run(job).compiled == 3
