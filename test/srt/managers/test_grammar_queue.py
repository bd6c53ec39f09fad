"""Requests with grammars on two ranks over the same messages: the leader verifies, both build, both admit together."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.constrained.compile_client import Check
from sglang.srt.constrained.compile_process import Verdict
from sglang.srt.constrained.grammar import Grammar, GrammarKey
from sglang.srt.constrained.grammar_manager import WAIT_LIMIT_S, GrammarManager
from sglang.srt.distributed import parallel_state
from sglang.srt.managers.scheduler.attention_groups import AttentionGroups
from sglang.srt.managers.scheduler.grammar_queue import GrammarQueue
from sglang.srt.managers.scheduler.leader import EndReq, GrammarVerified
from sglang.srt.managers.wire.io_struct import AbortReq, FinishReason
from srt.managers.fake_runner import Collector, FakeRunner, add, assert_clean, make_scheduler, request


class AnyGrammar:
    """Allows everything, and counts as compiled at once."""

    size_bytes = 1

    def fresh(self) -> AnyGrammar:
        return AnyGrammar()


class FakeVerifier:
    def __init__(self) -> None:
        self.checks: dict[str, Check] = {}
        self.cancelled: list[int] = []

    def submit(self, key: GrammarKey) -> Check:
        return self.checks.setdefault(key.source, Check(len(self.checks), Future()))

    def cancel(self, check: Check) -> None:
        self.cancelled.append(check.id)

    def close(self) -> None:
        pass


class ThreadlessManager(GrammarManager):
    """`build` finishes when `finish` is called, on one rank earlier than on the other."""

    def __init__(self, rank: Rank, verifier: FakeVerifier | None) -> None:
        super().__init__(rank, verifier, clock=lambda: rank.now)  # type: ignore[arg-type]

    def build(self, pending: Any, seconds: float) -> None:
        pending.build = self._grammars.setdefault(pending.digest, Future())

    def finish(self, error: Exception | None = None) -> None:
        for future in self._grammars.values():
            if not future.done():
                future.set_exception(error) if error else future.set_result(AnyGrammar())  # type: ignore[arg-type]


class Rank:
    def __init__(self, verifier: FakeVerifier | None = None) -> None:
        self.now = 0.0
        self.scheduler = make_scheduler(FakeRunner(512, 1, 128, 4, 64))
        self.grammars = ThreadlessManager(self, verifier)
        self.queue = GrammarQueue(self.scheduler, self.grammars)
        self.collector = Collector()

    def load(self) -> None: ...

    def compile(self, key: GrammarKey) -> Grammar:
        raise AssertionError

    def add(self, rid: str, **params: Any) -> None:
        add(self.scheduler, request(rid, [5, 6, 7], 3, **params))
        self.queue.add(self.scheduler.reqs[rid])


class Ranks:
    """A leader and a follower; `turn` is one turn of the loop without the step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.verifier = FakeVerifier()
        self.ranks = [Rank(self.verifier), Rank()]
        self._states: list[list[int]] = []
        monkeypatch.setattr(parallel_state, "all_reduce_min", self._least)
        self._pass = 0

    def _least(self, states: list[int]) -> list[int]:
        """First pass: note what each rank says; second pass: the least of it."""
        if self._pass == 0:
            self._states.append(list(states))
            raise _Noted
        return [min(column) for column in zip(*self._states, strict=True)]

    def turn(self) -> None:
        decisions = self.ranks[0].queue.decisions()
        for rank in self.ranks:
            for decision in decisions:
                if isinstance(decision, EndReq):
                    rank.scheduler.end_named(decision.rid, decision.reason)
                else:
                    rank.queue.build(decision)
        self._states, self._pass = [], 0
        for rank in self.ranks:
            with pytest.raises(_Noted):
                rank.queue.admit()
        self._pass = 1
        for rank in self.ranks:
            rank.queue.admit()
            rank.collector.take(rank.scheduler)

    def add(self, rid: str, **params: Any) -> None:
        for rank in self.ranks:
            rank.add(rid, **params)

    def queued(self) -> list[list[str]]:
        return [[req.rid for req in rank.scheduler.waiting] for rank in self.ranks]

    def ends(self, rid: str) -> list[FinishReason]:
        return [rank.collector.finish[rid] for rank in self.ranks]


class _Noted(Exception):
    pass


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_who_waits_for_a_grammar_counts_as_waiting(ranks: Ranks) -> None:
    ranks.add("a", regex="a")
    assert ranks.queued() == [[], []]
    assert [rank.scheduler.load().num_waiting for rank in ranks.ranks] == [1, 1]
    for rank in ranks.ranks:
        rank.scheduler.abort(AbortReq(["a"]))
        assert rank.scheduler.load().num_waiting == 0


def test_a_request_is_queued_when_every_rank_has_its_grammar(ranks: Ranks) -> None:
    ranks.add("plain")
    ranks.add("r", regex="a")
    ranks.turn()
    ranks.verifier.checks["a"].verdict.set_result(Verdict())
    ranks.turn()
    ranks.ranks[0].grammars.finish()
    ranks.turn()
    assert ranks.queued() == [["plain"], ["plain"]]
    ranks.ranks[1].grammars.finish()
    ranks.turn()
    assert ranks.queued() == [["plain", "r"], ["plain", "r"]]
    assert all(rank.scheduler.reqs["r"].grammar is not None for rank in ranks.ranks)


def test_a_refusal_ends_the_request_on_every_rank(ranks: Ranks) -> None:
    ranks.add("r", regex="a")
    ranks.verifier.checks["a"].verdict.set_result(Verdict(error="no", status_code=503))
    ranks.turn()
    assert [(end.message, end.status_code) for end in ranks.ends("r")] == [("no", 503)] * 2
    for rank in ranks.ranks:
        assert_clean(rank.scheduler)


def test_only_the_leaders_clock_counts(ranks: Ranks) -> None:
    ranks.add("verified", regex="a")
    ranks.add("built", regex="b")
    ranks.verifier.checks["b"].verdict.set_result(Verdict())
    ranks.ranks[1].now = 10 * WAIT_LIMIT_S
    ranks.turn()
    assert all(set(rank.scheduler.reqs) == {"verified", "built"} for rank in ranks.ranks)
    ranks.ranks[0].now = WAIT_LIMIT_S + 1
    ranks.turn()
    for rid in ("verified", "built"):
        assert all(end.type == "abort" for end in ranks.ends(rid))
        assert "not ready after 60 s" in (ranks.ends(rid)[0].message or "")


def test_requests_for_one_grammar_are_asked_about_once(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each in every step of the build; who has waited too long ends alone."""
    for number in range(10):
        ranks.ranks[0].now = float(number)
        ranks.add(f"r{number}", regex="a")
    ranks.verifier.checks["a"].verdict.set_result(Verdict())
    ranks.turn()
    asked = list[int]()
    state = GrammarManager.state
    monkeypatch.setattr(GrammarManager, "state", lambda *args: (asked.append(1), state(*args))[1])
    ranks.turn()
    assert len(asked) == 2 * 2, "each rank is asked twice in a turn of this test"
    for rank in ranks.ranks:
        rank.scheduler.abort(AbortReq(["r1"]))
    ranks.ranks[0].now = WAIT_LIMIT_S + 2.5
    ranks.turn()
    waiting = [f"r{number}" for number in range(3, 10)]
    assert all(list(rank.scheduler.compiling) == waiting for rank in ranks.ranks)
    assert "not ready after 60 s" in (ranks.ends("r2")[1].message or "")
    for rank in ranks.ranks:
        rank.grammars.finish()
    ranks.turn()
    assert ranks.queued() == [waiting, waiting]


def test_a_build_that_fails_anywhere_ends_the_request_everywhere(ranks: Ranks) -> None:
    ranks.add("r", regex="a")
    ranks.verifier.checks["a"].verdict.set_result(Verdict())
    ranks.turn()
    ranks.ranks[0].grammars.finish()
    ranks.ranks[1].grammars.finish(MemoryError("too much"))
    ranks.turn()
    assert [end.status_code for end in ranks.ends("r")] == [500, 500]


def test_an_abort_cancels_what_nobody_else_waits_for(ranks: Ranks) -> None:
    for rid, pattern in (("a1", "a"), ("a2", "a"), ("b", "b")):
        ranks.add(rid, regex=pattern)
    ranks.turn()
    for rid in ("a1", "b"):
        for rank in ranks.ranks:
            rank.scheduler.abort(AbortReq(rid))
    ranks.add("c", regex="c")
    ranks.turn()
    assert ranks.verifier.cancelled == [ranks.verifier.checks["b"].id]


def test_two_grammars_in_one_request(ranks: Ranks) -> None:
    ranks.add("r", regex="a", ebnf="b")
    ranks.turn()
    assert [end.status_code for end in ranks.ends("r")] == [400, 400]


class _Held:
    """Schedulers of attention groups whose dicts of held requests count whole passes over them."""

    def __init__(self, deadlines: list[float]) -> None:
        self.passes = 0
        self.groups: Any = object.__new__(AttentionGroups)
        self.groups.schedulers = [make_scheduler(FakeRunner(64, 1, 64, 4, 64)) for _ in deadlines]
        held = self

        class Counted(dict[str, Any]):
            def items(self) -> Any:
                held.passes += 1
                return super().items()

        for group, (scheduler, deadline) in enumerate(zip(self.groups.schedulers, deadlines, strict=True)):
            scheduler.compiling = Counted()
            for number in range(3):
                rid = f"{group}-{number}"
                pending = SimpleNamespace(deadline=deadline + number, build=None, digest=b"")
                req = SimpleNamespace(rid=rid)
                scheduler.compiling[rid] = (req, pending)
                scheduler.reqs[rid] = req


def test_a_message_about_one_grammar_passes_over_none_of_the_others() -> None:
    held, built = _Held([5.0, 3.0]), list[float]()
    grammars: Any = SimpleNamespace(build=lambda pending, seconds: built.append(pending.deadline))
    queue = GrammarQueue(held.groups, grammars)
    for rid in ("0-0", "1-2", "gone"):
        queue.build(GrammarVerified(rid, 0.1))
    assert built == [5.0, 5.0] and held.passes == 0


def test_the_grammar_with_the_earliest_deadline_of_all_groups_counts() -> None:
    held, asked = _Held([5.0, 3.0]), list[float]()
    grammars: Any = SimpleNamespace(has_new_verdicts=lambda oldest: asked.append(oldest.deadline))
    assert GrammarQueue(held.groups, grammars).decisions() == []
    assert asked == [3.0] and held.passes == 0
    for scheduler in held.groups.schedulers:
        scheduler.compiling.clear()
    assert GrammarQueue(held.groups, grammars).decisions() == [] and asked == [3.0]
