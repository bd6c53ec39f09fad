"""Requests that wait or run for too long end with a reason; every rank hears it as an abort message."""

from __future__ import annotations

import httpx
import pytest
from live_server import LiveServer

from sglang.srt.managers.scheduler import request_timeouts
from sglang.srt.managers.scheduler.request_timeouts import RequestTimeouts
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.wire.io_struct import AbortReq
from srt.managers.fake_runner import Collector, FakeRunner, add, assert_clean, make_scheduler, request, run_to_end


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(request_timeouts.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def two_running_one_waiting() -> Scheduler:
    scheduler = make_scheduler(FakeRunner(300, 1, 256, 2, 64))
    for i in range(3):
        add(scheduler, request(f"r{i}", [i + 1] * 10, 100, ignore_eos=True))
    scheduler.step()
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 1)
    return scheduler


def test_waiting(clock: Clock) -> None:
    scheduler, timeouts = two_running_one_waiting(), RequestTimeouts(5.0, -1.0)
    assert timeouts.overdue(scheduler) == []
    clock.now += 5.5
    (abort,) = timeouts.overdue(scheduler)
    assert abort == AbortReq(["r2"], message="Request waiting timeout reached.", status_code=503)
    scheduler.abort(abort)
    collector = Collector()
    run_to_end(scheduler, collector)
    assert {rid: finish.type for rid, finish in collector.finish.items()} == {
        "r0": "length",
        "r1": "length",
        "r2": "abort",
    }
    assert_clean(scheduler)


def test_running(clock: Clock) -> None:
    scheduler, timeouts = two_running_one_waiting(), RequestTimeouts(-1.0, 5.0)
    clock.now += 4.0
    assert timeouts.overdue(scheduler) == []
    clock.now += 1.5
    (abort,) = timeouts.overdue(scheduler)
    assert abort == AbortReq(["r0", "r1"], message="Request running timeout reached.", status_code=503)
    scheduler.abort(abort)
    scheduler.step()
    clock.now += 4.0
    assert timeouts.overdue(scheduler) == [], "r2 has waited for long, but runs only now"


def test_a_retracted_request_waits_anew(clock: Clock) -> None:
    scheduler, timeouts = two_running_one_waiting(), RequestTimeouts(5.0, -1.0)
    clock.now += 5.5
    scheduler.pause("retract")
    assert [abort.rids for abort in timeouts.overdue(scheduler)] == [["r2"]]


def test_no_limits(clock: Clock) -> None:
    scheduler = two_running_one_waiting()
    clock.now += 1e9
    assert not RequestTimeouts(-1.0, 0.0).enabled
    assert RequestTimeouts(-1.0, 0.0).overdue(scheduler) == []


@pytest.mark.parametrize("tp", ["1", "2"])
def test_in_a_server(monkeypatch: pytest.MonkeyPatch, tp: str) -> None:
    """Also while it is paused and nothing else wakes it, and with ranks that must agree."""
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "0.5")
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "1.0")
    server = LiveServer("--tp", tp)
    try:
        server.wait_up()
        with httpx.Client(base_url=server.url, timeout=300) as http:
            assert http.post("/pause_generation").status_code == 200
            waited = http.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 1}})
            assert waited.status_code == 503
            said = {"object": "error", "message": "Request waiting timeout reached.", "code": 503}
            assert waited.json().items() >= said.items()
            assert http.post("/continue_generation").status_code == 200
            params = {"max_new_tokens": 4000, "ignore_eos": True}
            ran = http.post("/generate", json={"text": "x", "sampling_params": params})
            assert ran.status_code == 503 and "running timeout" in ran.json()["message"]
            after = http.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 1}})
            assert after.status_code == 200
            assert http.get("/server_info").json()["internal_states"][0]["num_unfinished_reqs"] == 0
    finally:
        server.end()
