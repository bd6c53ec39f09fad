"""The bounds of the session store."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.sessions import SessionStore, Turn


def turn(rid: str, length: int, parent: str | None = None) -> Turn:
    return Turn(rid, parent, np.zeros(length, np.int32), length)


def test_the_least_recently_used_session_goes_first() -> None:
    store = SessionStore(max_sessions=2)
    first, second = store.open(10, None), store.open(10, None)
    store.turn(first, None)
    store.open(10, "third")
    assert len(store) == 2 and store.turn(first, None) is None
    with pytest.raises(RequestError, match="no session"):
        store.turn(second, None)


def test_tokens_are_bounded_and_counted() -> None:
    store = SessionStore(max_tokens=100)
    for name in ("a", "b"):
        store.open(1000, name)
        store.begin(name, first := turn("r", 40))
        store.end(name, first, [])
    assert store.num_tokens == 80
    last = turn("s", 30, "r")
    store.begin("b", last)
    assert store.num_tokens == 70 and len(store) == 1
    store.end("b", last, [1] * 10)
    assert store.num_tokens == 80 and len(last.tokens) == 40
    assert store.drop("b", "r") == [] and store.num_tokens == 40
    store.end("b", last, [1] * 10)  # it is forgotten
    assert store.num_tokens == 40
    store.close("b")
    assert store.num_tokens == 0


def test_what_runs_is_named_when_it_is_dropped() -> None:
    store = SessionStore()
    store.open(1000, "a")
    for rid, parent in (("1", None), ("2", "1"), ("3", "2")):
        store.begin("a", turn(rid, 1, parent))
    assert store.drop("a", "1") == ["2", "3"]
    assert store.drop("a", None) == ["1"] and store.num_tokens == 0


def test_a_long_conversation_is_dropped_whole() -> None:
    store = SessionStore()
    store.open(1000, "a")
    for number in range(3000):
        store.begin("a", turn(str(number), 1, str(number - 1) if number else None))
    assert len(store.drop("a", "0")) == 2999 and store.num_tokens == 1


@pytest.mark.parametrize("bounds", [{"max_turns": 4}, {"max_tokens": 40}])
def test_one_session_does_not_grow_without_end(bounds: dict[str, int]) -> None:
    store = SessionStore(**bounds)
    store.open(1000, "a")
    for number in range(4):
        store.begin("a", turn(str(number), 10))
    with pytest.raises(RequestError, match="replace"):
        store.begin("a", turn("4", 10))
    with pytest.raises(RequestError, match="no request"):
        store.turn("a", "4")
    store.drop("a", "none")
    assert store.num_tokens == 40
    store.drop("a", None)
    store.begin("a", turn("4", 10))
    store.close("a")
    assert store.num_tokens == 0


@pytest.mark.parametrize("bounds", [{"max_turns": 3}, {"max_tokens": 30}])
def test_a_refused_turn_closes_no_other_session(bounds: dict[str, int]) -> None:
    store = SessionStore(**bounds)
    for name in ("a", "b"):
        store.open(1000, name)
        ended = turn("0", 10)
        store.begin(name, ended)
        store.end(name, ended, [])
    store.begin("a", turn("1", 10))
    if "max_tokens" in bounds:
        with pytest.raises(RequestError, match="replace"):
            store.begin("b", turn("1", 21))
    assert len(store) == 2 and store.num_tokens == 30
    with pytest.raises(RequestError, match="whose requests run") as refused:
        store.begin("b", turn("1", 10))  # no session can be closed for it
    assert refused.value.status_code == 503
    assert len(store) == 2 and store.num_tokens == 30
    store.begin("b", turn("1", 10), replaces=True)
    assert store.num_tokens == 30


def test_a_session_whose_request_runs_stays_open() -> None:
    store = SessionStore(max_sessions=2)
    running = turn("r", 3)
    for name in ("runs", "idle"):
        store.open(10, name)
    store.begin("runs", running)
    store.turn("idle", None)
    store.open(10, "new")
    assert len(store) == 2 and store.turn("runs", "r") is running
    store.begin("new", turn("r", 3))
    with pytest.raises(RequestError, match="requests of all of them run") as refused:
        store.open(10, "one too many")
    assert refused.value.status_code == 503 and len(store) == 2
    store.end("runs", running, [1])
    store.open(10, "fits")
    with pytest.raises(RequestError, match="no session"):
        store.turn("runs", None)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_idle_session_is_closed() -> None:
    """Its time begins anew with each request and with its end; a request that runs keeps it."""
    clock = Clock()
    store = SessionStore(clock=clock)
    store.open(10, "a", timeout=5)
    store.open(10, "forever")
    clock.now = 4
    running = turn("r", 3)
    store.begin("a", running)
    clock.now = 100
    assert store.turn("a", None) is None and len(store) == 2
    store.end("a", running, [1])
    clock.now = 104
    assert store.turn("a", "r") is running
    clock.now = 110
    with pytest.raises(RequestError, match="no session"):
        store.turn("a", "r")
    assert len(store) == 1 and store.num_tokens == 0


def test_a_streaming_session_keeps_its_last_request_only() -> None:
    store = SessionStore()
    store.open(1000, "a", streaming=True)
    assert store.last_turn("a") is None
    for rid in "123":
        running = turn(rid, 10)
        store.begin("a", running)
        with pytest.raises(RequestError, match="has not ended"):
            store.last_turn("a")
        store.end("a", running, [1])
        assert store.last_turn("a") is running and store.num_tokens == 11
    aborted = turn("4", 20)
    store.begin("a", aborted)
    store.forget("a", "4")
    assert store.last_turn("a") is running and store.num_tokens == 11


def test_a_request_looks_at_no_turns_but_those_that_it_replaces() -> None:
    store = SessionStore()
    store.open(1000, "a")
    for number in range(50):
        store.begin("a", turn(f"root {number}", 1))
        store.begin("a", turn(f"child {number}", 1, f"root {number}"))

    class Opaque(dict[str, Turn]):
        def values(self) -> Any:
            raise AssertionError("all turns")

        __iter__ = items = values

    session = store._sessions["a"]
    session.turns = Opaque(session.turns)
    assert store.begin("a", turn("other child", 1, "root 7"), replaces=True) == ["child 7"]
    assert store.drop("a", "root 7") == ["other child"] and store.num_tokens == 99
    assert store.begin("a", turn("child 8", 1, "root 8"), replaces=True) == ["child 8"], "the same name again"
    assert session.branch("root 8") == ["child 8"] and session.branch("child 8") == []
