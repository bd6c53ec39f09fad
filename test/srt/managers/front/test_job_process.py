"""Processes of jobs end for good, whenever they are told to."""

from __future__ import annotations

import multiprocessing
import threading
from types import SimpleNamespace

import pytest

from sglang.srt.managers.front.job_process import JobProcess, end_all


class Process:
    """Takes the place of a process that takes its time to start, and cannot be killed before it has."""

    def __init__(self, name: str) -> None:
        self.name, self.pid, self.exitcode = name, None, 0
        self.begins, self.may_start = threading.Event(), threading.Event()
        self.is_alive = False

    def start(self) -> None:
        self.begins.set()
        assert self.may_start.wait(300)
        self.is_alive = True

    def kill(self) -> None:
        assert self.is_alive, "it has not started yet"
        self.is_alive = False

    def join(self, timeout: float) -> None:
        pass


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    processes: list[Process] = []

    def make(name: str, **_: object) -> Process:
        processes.append(Process(name))
        return processes[-1]

    monkeypatch.setattr(multiprocessing, "get_context", lambda _: SimpleNamespace(Process=make))
    return processes


def test_an_end_in_the_middle_of_a_start(made: list[Process]) -> None:
    job = JobProcess(print, (), "test")
    starting = threading.Thread(target=job.start)
    starting.start()
    while not made:
        pass
    assert made[0].begins.wait(300)
    ending = threading.Thread(target=end_all, args=([job],))
    ending.start()
    made[0].may_start.set()
    starting.join(300)
    ending.join(300)
    assert not made[0].is_alive
    job.start()
    assert len(made) == 1, "nothing starts behind the end"


def test_all_are_killed_before_any_is_waited_for(made: list[Process], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not die takes its time from no other, and the limit is one for all."""
    events: list[tuple[str, str]] = []
    monkeypatch.setattr(Process, "start", lambda self: None)
    monkeypatch.setattr(Process, "kill", lambda self: events.append(("kill", self.name)))
    monkeypatch.setattr(Process, "join", lambda self, timeout: events.append(("join", self.name)))
    jobs = [JobProcess(print, (), name) for name in "abc"]
    for job in jobs:
        job.start()
    end_all(jobs)
    assert events == [(what, name) for what in ("kill", "join") for name in "abc"]
    for job in jobs:
        job.start()
    assert len(made) == 3
