"""The end of a process comes no later than it was first said to, whatever else is said behind that."""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
from types import SimpleNamespace

import pytest

from sglang.srt.entrypoints import exit_guard
from sglang.srt.entrypoints.exit_guard import ExitGuard
from sglang.srt.environ import Environment

DRAIN_S, END_LIMIT_S = 60.0, Environment.SGLANG_END_TIMEOUT.default


class Process:
    """A process with a guard, whose clock and signals are the test's. `end`: when its timer ends it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.end = float("inf")
        self._heard: queue.SimpleQueue[None] = queue.SimpleQueue()
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        monkeypatch.setattr(signal, "set_wakeup_fd", lambda *_, **__: -1)
        monkeypatch.setattr(exit_guard, "time", SimpleNamespace(monotonic=lambda: self.now), raising=False)
        monkeypatch.setattr(faulthandler, "dump_traceback_later", self._set_timer)
        self.guard = ExitGuard(lambda: self._heard.put(None))
        self.guard.drain_s = DRAIN_S

    def _set_timer(self, seconds: float, **_: object) -> None:
        assert seconds > 0, "faulthandler takes nothing else"
        self.end = self.now + seconds

    def signal(self, number: int = signal.SIGINT) -> None:
        os.write(self.guard._writing, bytes([number]))
        self._heard.get(timeout=300)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


def test_a_second_signal_ends_the_drain_and_further_ones_move_nothing(process: Process) -> None:
    process.signal()
    assert process.end == process.now + DRAIN_S + END_LIMIT_S
    process.now += 1
    process.signal(signal.SIGTERM)
    end = process.end
    assert end == process.now + END_LIMIT_S
    for _ in range(4):  # somebody who presses Ctrl-C every second
        process.now += 1
        process.signal()
    assert process.end == end


def test_the_end_has_the_time_that_the_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_END_TIMEOUT", "30")
    process = Process(monkeypatch)
    process.signal()
    assert process.end == process.now + DRAIN_S + 30


def test_steps_of_the_end_share_its_limit(process: Process) -> None:
    process.guard.end_within(END_LIMIT_S)
    end = process.end
    process.now += END_LIMIT_S - 1
    process.guard.end_within(END_LIMIT_S)
    assert process.end == end
    process.guard.end_within(0.5)
    assert process.end == process.now + 0.5
