"""Parts of a server end at the same time: the limits of those that hang do not add up."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.environ import Environment
from sglang.srt.managers import launch
from sglang.srt.managers.front import request_trace
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.managers.launch import EngineHandle
from sglang.srt.managers.reap import REAP_LIMIT_S, close_together

PATIENCE_S = 300.0
END_LIMIT_S = Environment.SGLANG_END_TIMEOUT.default


class Meeting:
    """Every part waits until all of them end."""

    def __init__(self, count: int) -> None:
        self._barrier, self.came = threading.Barrier(count), list[str]()

    def part(self, name: str) -> Any:
        def end(*_: object, **__: object) -> None:
            self._barrier.wait(PATIENCE_S)
            self.came.append(name)

        return end


def handle_of(meeting: Meeting, names: list[str]) -> EngineHandle:
    handle = EngineHandle.__new__(EngineHandle)
    handle._closed, handle._disconnect = False, lambda: None
    handle._ports = [SimpleNamespace(remove=lambda: None)]  # type: ignore[list-item]
    handle._replicas = [SimpleNamespace(tell_end=lambda limit: None, end=meeting.part(name)) for name in names]  # type: ignore[misc]
    return handle


def manager_of(meeting: Meeting) -> TokenizerManager:
    manager = TokenizerManager.__new__(TokenizerManager)
    manager._endings_retry = manager._transfers = None
    manager._has_helpers = True
    manager.replicas, manager.text = [], SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    manager.media = SimpleNamespace(close=meeting.part("media"))  # type: ignore[assignment]
    manager._tracer = SimpleNamespace(close=meeting.part("spans"))  # type: ignore[assignment]
    return manager


def test_replicas() -> None:
    meeting = Meeting(3)
    handle_of(meeting, ["DP0", "DP1", "DP2"]).shutdown(1.0)
    assert sorted(meeting.came) == ["DP0", "DP1", "DP2"]


def test_a_server() -> None:
    meeting, exits = Meeting(5), list[float]()
    server = http_server.Server.__new__(http_server.Server)
    server._launched = threading.Event()
    server._launched.set()
    server._handles = [handle_of(meeting, ["DP0", "DP1"])]
    server._handles[0].manager = manager_of(meeting)
    server.state = SimpleNamespace(close=meeting.part("templates"))  # type: ignore[assignment]
    server.guard = SimpleNamespace(take_signals=lambda: None, end_within=exits.append, limit_s=END_LIMIT_S)  # type: ignore[assignment]
    server._http = SimpleNamespace(serve=lambda sockets: asyncio.sleep(0))  # type: ignore[assignment]
    server.listener = None  # type: ignore[assignment]
    server._live = lambda: asyncio.sleep(0, 0)  # type: ignore[method-assign]
    assert asyncio.run(server.run()) == 0
    assert sorted(meeting.came) == ["DP0", "DP1", "media", "spans", "templates"] and exits == [END_LIMIT_S]


def test_an_engine_in_a_program_of_its_own() -> None:
    meeting, engine = Meeting(4), Engine.__new__(Engine)
    engine._closed, engine._loop = False, asyncio.new_event_loop()
    engine._thread = threading.Thread(target=engine._loop.run_forever)
    engine._thread.start()
    engine._handle, engine._manager = handle_of(meeting, ["DP0"]), manager_of(meeting)
    engine._manager.mark_unhealthy = lambda message: None  # type: ignore[method-assign]
    engine._state = SimpleNamespace(close=meeting.part("templates"))  # type: ignore[assignment]
    engine.shutdown()
    assert sorted(meeting.came) == ["DP0", "media", "spans", "templates"]


def test_the_limits_fit_that_of_the_process() -> None:
    longest = max(http_server.PROCESSES_END_S + REAP_LIMIT_S, request_trace.CLOSE_LIMIT_S)
    assert http_server.CLOSE_LIMIT_S + longest < END_LIMIT_S
    assert launch.END_S + REAP_LIMIT_S < END_LIMIT_S


def test_a_part_that_fails_keeps_no_other_from_ending(caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()

    def fail() -> None:
        raise OSError("no pipe")

    close_together([fail, ended.set])
    assert ended.is_set() and "no pipe" in caplog.text


def test_parts_end_also_where_no_thread_starts_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `atexit` from Python 3.12 on."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ended: list[int] = []
    close_together([lambda: ended.append(1), lambda: ended.append(2)])
    assert ended == [1, 2]
