"""Traces that cannot be written, and traces that nobody stops, leave the server as it was."""

from __future__ import annotations

import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.managers.scheduler import profiler
from sglang.srt.managers.scheduler.profiler import Profiler
from sglang.srt.managers.scheduler.scheduler_process import SchedulerProcess
from sglang.srt.managers.wire.io_struct import ControlReply, ControlReq


class Trace:
    """Replaces torch's profiler, and fails where the test says so."""

    failing = ""

    def __init__(self) -> None:
        self.recording = False

    def start(self) -> None:
        self._fail("start")
        self.recording = True

    def stop(self) -> None:
        self._fail("stop")
        assert self.recording, "stopped twice"
        self.recording = False

    def export_chrome_trace(self, path: str) -> None:
        assert not self.recording
        with gzip.open(path, "wt") as file:
            file.write("{")
            self._fail("export")
            file.write("}")

    def _fail(self, where: str) -> None:
        if self.failing == where:
            raise OSError(28, "No space left on device") if where == "export" else RuntimeError("no profiler")


@pytest.fixture(autouse=True)
def trace(monkeypatch: pytest.MonkeyPatch) -> type[Trace]:
    monkeypatch.setattr(torch.profiler, "profile", Trace)
    monkeypatch.setattr(Trace, "failing", "")
    return Trace


def calls(directory: Path, *kinds: str) -> list[ControlReply]:
    """Returns the answers of a scheduler process to control calls."""
    process: Any = SchedulerProcess.__new__(SchedulerProcess)
    process.profiler, process.outbox = Profiler(directory, 0), SimpleNamespace(send=lambda reply: replies.append(reply))
    process.scheduler = SimpleNamespace(sync=lambda: None, outbox=[], idle=True)
    replies: list[ControlReply] = []
    for number, kind in enumerate(kinds):
        process.dispatch(ControlReq(str(number), kind, {}))
    return replies


def test_a_directory_that_cannot_be_made_is_an_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    start, stop = calls(tmp_path / "file" / "traces", "start_profile", "stop_profile")
    assert not start.ok and "was not started" in start.message and "Not a directory" in start.message
    assert not stop.ok and "call /start_profile first" in stop.message


@pytest.mark.parametrize("failing", ["stop", "export"])
def test_a_trace_that_cannot_be_written_is_an_answer(
    failing: str, tmp_path: Path, trace: type[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "failing", failing)
    answers = calls(tmp_path, "start_profile", "stop_profile", "start_profile")
    assert [answer.ok for answer in answers] == [True, False, True], "another trace may follow"
    assert ("No space left" if failing == "export" else "no profiler") in answers[1].message
    assert str(tmp_path) in answers[1].message
    assert not list(tmp_path.iterdir()), "no part of a file remains"


def test_a_profiler_that_does_not_start_is_an_answer(
    tmp_path: Path, trace: type[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "failing", "start")
    assert [answer.ok for answer in calls(tmp_path, "start_profile", "stop_profile")] == [False, False]


def test_a_trace_that_nobody_stops_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "MAX_STEPS", 3)
    made = Profiler(tmp_path, 0)
    made.start()
    recording: list[bool] = []
    for _ in range(5):
        made.count_step()
        assert made._trace is not None
        recording.append(made._trace.recording)  # type: ignore[attr-defined]
    assert recording == [True, True, False, False, False]
    with gzip.open(made.stop(), "rt") as written:
        assert written.read() == "{}"
