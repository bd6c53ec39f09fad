"""Who waits for what, with a verifier that answers when told to, and the real backend."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import Future

import pytest

from sglang.srt.constrained import grammar_manager
from sglang.srt.constrained.compile_client import Check
from sglang.srt.constrained.compile_process import Verdict
from sglang.srt.constrained.grammar import Grammar, GrammarKey
from sglang.srt.constrained.grammar_manager import WAIT_LIMIT_S, BuildState, GrammarManager, PendingGrammar
from sglang.srt.constrained.vocabulary import write_vocabulary
from sglang.srt.constrained.xgrammar_backend import XGrammarBackend
from srt.constrained.byte_tokenizer import EOS, TOKENIZER, VOCAB_SIZE


class FakeVerifier:
    def __init__(self) -> None:
        self.checks: list[tuple[GrammarKey, Check]] = []
        self.cancelled: list[int] = []

    def submit(self, key: GrammarKey) -> Check:
        check = Check(len(self.checks), Future())
        self.checks.append((key, check))
        return check

    def cancel(self, check: Check) -> None:
        self.cancelled.append(check.id)

    def close(self) -> None:
        pass

    def answer(self, verdict: Verdict) -> None:
        for _, check in self.checks:
            if not check.verdict.done():
                check.verdict.set_result(verdict)


class SlowBackend:
    """Compiles when told to."""

    def __init__(self, backend: XGrammarBackend) -> None:
        self.backend = backend
        self.go = threading.Event()
        self.compiled: list[GrammarKey] = []

    def load(self) -> None:
        self.backend.load()

    def compile(self, key: GrammarKey) -> Grammar:
        self.go.wait(300)
        self.compiled.append(key)
        return self.backend.compile(key)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> XGrammarBackend:
    vocabulary = tmp_path_factory.mktemp("grammar") / "vocabulary.json"
    write_vocabulary(vocabulary, TOKENIZER, VOCAB_SIZE, {EOS})
    return XGrammarBackend(vocabulary)


class Bench:
    """A leader's manager; `now` is its clock."""

    def __init__(self, backend: XGrammarBackend, max_cached: int = 4) -> None:
        self.now = 0.0
        self.verifier = FakeVerifier()
        self.backend = SlowBackend(backend)
        self.manager = GrammarManager(self.backend, self.verifier, max_cached, lambda: self.now)

    def request(self, pattern: str) -> PendingGrammar:
        return self.manager.request(GrammarKey("regex", pattern))

    def built(self, pattern: str, seconds: float = 0.0) -> PendingGrammar:
        pending = self.request(pattern)
        self.manager.build(pending, seconds)
        assert pending.build is not None
        pending.build.result(300)
        return pending


@pytest.fixture
def bench(backend: XGrammarBackend, request: pytest.FixtureRequest) -> Bench:
    bench = Bench(backend)
    request.addfinalizer(bench.backend.go.set)
    request.addfinalizer(bench.manager.shutdown)
    return bench


def test_requests_do_not_block_and_share_the_work(bench: Bench) -> None:
    first, second = bench.request("ab"), bench.request("ab")
    assert bench.manager.verdict(first) is None and len(bench.verifier.checks) == 1
    bench.verifier.answer(Verdict())
    assert bench.manager.verdict(first) == bench.manager.verdict(second) == Verdict()
    for pending in (first, second):
        bench.manager.build(pending, 0.0)
        assert bench.manager.state(pending) == BuildState.RUNNING
    bench.backend.go.set()
    assert first.build is second.build and first.build is not None
    first.build.result(300)
    assert bench.manager.state(second) == BuildState.READY and len(bench.backend.compiled) == 1


def test_errors_of_the_grammar_are_remembered_and_others_are_not(bench: Bench) -> None:
    for status_code, num_checks in ((400, 1), (503, 2), (500, 2)):
        bench.verifier.checks.clear()
        pattern = f"a{status_code}"
        bench.request(pattern)
        bench.verifier.answer(Verdict(error="no", status_code=status_code))
        bench.manager.keep_only([])
        bench.request(pattern)
        assert len(bench.verifier.checks) == num_checks


def test_the_leaders_clock_ends_the_wait(bench: Bench) -> None:
    verified, built = bench.request("a"), bench.request("b")
    bench.manager.build(built, 0.0)
    bench.now = WAIT_LIMIT_S + 1
    verdict = bench.manager.verdict(verified)
    assert verdict is not None and "not ready after 60 s" in verdict.error and verdict.status_code == 503
    assert bench.manager.state(built) == BuildState.FAILED and "not ready" in bench.manager.failure(built).error


def test_the_clock_of_another_rank_decides_nothing(backend: XGrammarBackend) -> None:
    slow, now = SlowBackend(backend), [0.0]
    follower = GrammarManager(slow, None, clock=lambda: now[0])
    pending = follower.request(GrammarKey("regex", "a"))
    follower.build(pending, 0.0)
    now[0] = 10 * WAIT_LIMIT_S
    assert pending.check is None and follower.state(pending) == BuildState.RUNNING
    slow.go.set()
    follower.shutdown()


def test_a_flush_drops_what_is_complete(bench: Bench) -> None:
    bench.backend.go.set()
    bench.built("ab")
    bench.verifier.answer(Verdict())
    waiting = bench.request("cd")
    bench.manager.flush()
    assert bench.manager.num_cached() == 0
    assert bench.request("cd").check is waiting.check and bench.request("ab").check is bench.verifier.checks[-1][1]
    assert len(bench.verifier.checks) == 3


def test_a_build_that_outlives_a_flush_is_not_kept(bench: Bench) -> None:
    """Whose request may have gone meanwhile; one that still waits gets it."""
    pending = bench.request("ab")
    bench.manager.build(pending, 0.0)
    bench.manager.flush()
    bench.backend.go.set()
    assert pending.build is not None
    pending.build.result(300)
    assert bench.manager.num_cached() == 0 and bench.manager.built(pending) is not None


def test_what_nobody_waits_for_is_cancelled(bench: Bench) -> None:
    kept, dropped = bench.request("a"), bench.request("b")
    bench.manager.keep_only([kept.digest])
    assert bench.verifier.cancelled == [1]
    bench.request("b")
    assert len(bench.verifier.checks) == 3, "a cancelled verification is not one that failed"
    running, waiting = bench.request("c"), bench.request("d")
    bench.manager.build(running, 0.0)
    bench.manager.build(waiting, 0.0)
    bench.manager.keep_only([])
    bench.backend.go.set()
    assert running.build is not None and running.build.result(300)
    assert waiting.build is not None and waiting.build.cancelled()
    assert GrammarKey("regex", "d") not in bench.backend.compiled
    assert dropped.build is None


def test_slow_grammars_wait_for_each_other_only(backend: XGrammarBackend, request: pytest.FixtureRequest) -> None:
    go = threading.Event()

    class Selective(SlowBackend):
        def compile(self, key: GrammarKey) -> Grammar:
            if key.source == "slow":
                go.wait(300)
            return self.backend.compile(key)

    manager = GrammarManager(Selective(backend))
    request.addfinalizer(manager.shutdown)
    slow, quick = (manager.request(GrammarKey("regex", pattern)) for pattern in ("slow", "quick"))
    manager.build(slow, 20.0)
    manager.build(quick, 0.1)
    assert quick.build is not None and quick.build.result(300)
    assert manager.state(slow) == BuildState.RUNNING
    go.set()


def test_what_compiles_fastest_goes_first(bench: Bench) -> None:
    """Hundreds of grammars that take longer are not in the way of one that takes milliseconds."""
    waiting = [bench.request(pattern) for pattern in ("first", "longer", "long", "fast")]
    for pending, seconds in zip(waiting, (0.9, 0.8, 0.7, 0.001), strict=True):
        bench.manager.build(pending, seconds)
        if pending.key.source == "first":  # the others find it running
            assert pending.build is not None
            while not pending.build.running():
                time.sleep(0.001)
    assert waiting[2].build is not None and waiting[2].build.cancel()
    bench.backend.go.set()
    for pending in (waiting[0], waiting[1], waiting[3]):
        assert pending.build is not None and pending.build.result(300)
    assert [key.source for key in bench.backend.compiled] == ["first", "fast", "longer"]


def test_requests_for_a_known_grammar_do_not_read_the_whole_cache(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.backend.go.set()
    bench.built("a")
    passes = list[int]()
    shrink = GrammarManager._shrink
    monkeypatch.setattr(GrammarManager, "_shrink", lambda manager: (passes.append(1), shrink(manager))[1])
    for _ in range(100):
        bench.built("a")
    assert len(passes) <= 1  # the first may find that the build has ended


def test_the_cache_is_bounded_in_number_and_size(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.backend.go.set()
    for i in range(10):
        bench.built(f"a{i}")
    assert bench.manager.num_cached() == 4
    monkeypatch.setattr(grammar_manager, "MAX_CACHED_BYTES", 1)
    bench.built("b")
    bench.built("c")
    assert bench.manager.num_cached() == 1
    bench.built("c")
    assert bench.backend.compiled.count(GrammarKey("regex", "c")) == 1


def test_memory_of_grammars_in_use_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.backend.go.set()
    pending = bench.built("a")
    assert pending.build is not None
    in_use = pending.build.result().fresh()
    assert bench.manager._live.total == in_use.size_bytes > 0
    monkeypatch.setattr(grammar_manager, "MAX_LIVE_BYTES", 1)
    new, again = bench.request("b"), bench.request("a")
    bench.verifier.answer(Verdict())
    verdict = bench.manager.verdict(new)
    assert verdict is not None and verdict.status_code == 503 and "fill their memory" in verdict.error
    assert bench.manager.verdict(again) == Verdict()
    pending.build = again.build = None
    bench.manager._grammars.clear()
    gc.collect()
    assert bench.manager._live.total == in_use.size_bytes
    del in_use
    gc.collect()
    assert bench.manager._live.total == 0 and bench.manager.verdict(new) == Verdict()


def test_verifications_under_way_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_manager, "MAX_UNDER_WAY", 2)
    pending = [bench.request(pattern) for pattern in ("a", "b", "c")]

    assert [bench.manager.verdict(p) for p in pending[:2]] == [None, None]
    refused = bench.manager.verdict(pending[2])
    assert refused is not None and refused.status_code == 503 and len(bench.verifier.checks) == 2


def test_without_a_backend_requests_fail_politely() -> None:
    manager = GrammarManager(None)
    verdict = manager.verdict(manager.request(GrammarKey("regex", "a")))
    assert verdict is not None and "--grammar-backend none" in verdict.error
    manager.shutdown()


def test_a_build_that_fails_is_tried_again(bench: Bench) -> None:
    bench.backend.go.set()
    pending = bench.request("(")
    bench.manager.build(pending, 0.0)
    assert pending.build is not None and pending.build.exception(10) is not None
    assert bench.manager.state(pending) == BuildState.FAILED
    assert bench.manager.failure(pending).status_code == 500 and bench.manager.num_cached() == 0


def test_the_second_waiter_of_a_failed_build_leaves_the_next_build(bench: Bench) -> None:
    bench.backend.go.set()
    first, second = bench.request("("), bench.request("(")
    for pending in (first, second):
        bench.manager.build(pending, 0.0)
    assert first.build is second.build and first.build is not None and first.build.exception(10) is not None
    bench.manager.failure(first)
    third = bench.request("(")
    bench.manager.build(third, 0.0)
    bench.manager.failure(second)
    fourth = bench.request("(")
    bench.manager.build(fourth, 0.0)
    assert third.build is fourth.build is not first.build


def test_a_verification_under_way_is_not_forgotten(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_manager, "MAX_VERDICTS", 2)
    waits = bench.request("a")
    for pattern in ("b", "c", "d"):
        bench.request(pattern)
        _, check = bench.verifier.checks[-1]
        check.verdict.set_result(Verdict())
    shared = bench.request("a")
    assert shared.check is waits.check and len(bench.verifier.checks) == 4
    bench.manager.keep_only([])
    assert bench.verifier.cancelled == [0]


def test_a_verdict_that_comes_while_news_are_read_is_news(bench: Bench) -> None:
    """Whenever it comes, the next call or this one tells of it."""
    pending = bench.request("a")
    assert bench.manager.has_new_verdicts(pending) and not bench.manager.has_new_verdicts(pending)

    class Late(threading.Event):
        """The verdict comes just after the look."""

        def is_set(self) -> bool:
            was_set = super().is_set()
            bench.verifier.answer(Verdict())
            return was_set

    bench.manager._news = Late()
    assert not bench.manager.has_new_verdicts(pending)
    assert bench.manager.has_new_verdicts(pending) and bench.manager.verdict(pending) == Verdict()


class LoadCounter(SlowBackend):
    """Knows which thread loaded it."""

    loaded = ""

    def load(self) -> None:
        self.loaded = threading.current_thread().name
        super().load()


@pytest.mark.parametrize("error", ["", "Grammars are not available: no tokenizer."])
def test_warm_up_compiles_something_in_both_processes(
    backend: XGrammarBackend, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for it, what is not wanted by a request is not cancelled, and nothing of it stays."""
    verifier, counting = FakeVerifier(), LoadCounter(backend)
    manager = GrammarManager(counting, verifier)
    manager.warm_up()
    manager.keep_only([])
    ((key, check),) = verifier.checks
    assert not verifier.cancelled and not counting.compiled
    counting.go.set()
    with caplog.at_level("WARNING"):
        verifier.answer(Verdict(check.id, error))
    manager.shutdown()
    manager._quick.shutdown(wait=True)
    assert counting.compiled == ([] if error else [key]) and (error in caplog.text)
    assert error or counting.loaded.startswith("grammar")
    assert manager.num_cached() == 0


def test_warm_up_after_the_end_does_nothing(backend: XGrammarBackend) -> None:
    """The verdict comes when the server has ended; nor is there anything to do where there are no grammars."""
    verifier, slow = FakeVerifier(), SlowBackend(backend)
    manager = GrammarManager(slow, verifier)
    manager.warm_up()
    manager.shutdown()
    verifier.answer(Verdict())
    assert not slow.compiled
    GrammarManager(None).warm_up()
    GrammarManager(slow, None).warm_up()
