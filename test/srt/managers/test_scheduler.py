"""The scheduler against a naive model: whatever the pool, the page size and the company, every request gets exactly the
tokens that it would get alone, and in the end nothing is held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang.srt.managers.scheduler import schedule_policy
from sglang.srt.managers.scheduler.leader import EndReq
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.queue_order import POLICIES
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.wire.io_struct import AbortReq
from sglang.srt.model_executor.step import StepInput
from sglang.srt.plan.decode_interval import MANY_REQUESTS, NEVER, IntervalRule
from sglang.srt.plan.pool_sizes import WindowSize
from srt.managers.fake_runner import (
    EOS,
    VOCAB,
    Collector,
    FakeRunner,
    LateResult,
    add,
    assert_clean,
    expected_output,
    make_scheduler,
    request,
    run_to_end,
)


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + i * i * 7 + i) % (VOCAB - 1) + 1 for i in range(length)]


@pytest.mark.parametrize(("page", "chunk"), [(1, 2), (16, 16), (16, 32)])
def test_decoding_requests_leave_prompts_their_part_of_every_chunk(page: int, chunk: int) -> None:
    """However small the chunks are: neither waits for the end of the other."""
    scheduler = make_scheduler(FakeRunner(2048, page, 1024, 4, chunk))
    collector = Collector()
    for rid in ("a", "b"):
        add(scheduler, request(rid, prompt(2, len(rid)), 600, stream=True, ignore_eos=True))
        run_until(scheduler, collector, lambda: "a" in collector.tokens)
    add(scheduler, request("c", prompt(100, 3), 5))
    before = len(collector.tokens["a"])
    run_until(scheduler, collector, lambda: "c" in collector.finish)
    assert "a" not in collector.finish and len(collector.tokens["a"]) > before + 5
    run_to_end(scheduler, collector)
    assert collector.tokens["a"] == expected_output(prompt(2, 1), 600, ignore_eos=True)
    assert collector.tokens["c"] == expected_output(prompt(100, 3), 5)
    assert_clean(scheduler)


def run_until(scheduler: Scheduler, collector: Collector, done: Callable[[], bool]) -> None:
    for _ in range(2000):
        if done():
            return
        scheduler.step()
        collector.take(scheduler)
    raise AssertionError("it did not come to that")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_batch_of_requests(page: int, overlap: bool) -> None:
    scheduler = make_scheduler(FakeRunner(2048, page, 256, 8, 64), disable_overlap_schedule=not overlap)
    collector = Collector()
    for i in range(20):
        add(scheduler, request(f"r{i}", prompt(5 + 7 * i, i), 3 + i))
    run_to_end(scheduler, collector)
    for i in range(20):
        assert collector.tokens[f"r{i}"] == expected_output(prompt(5 + 7 * i, i), 3 + i)
    assert_clean(scheduler)


def test_overlap_launches_before_reading() -> None:
    """With overlap the step after a prefill is launched before the prefill's token is known to the host."""
    scheduler = make_scheduler(FakeRunner(256, 1, 128, 4, 64))
    add(scheduler, request("a", prompt(5), 4, ignore_eos=True))
    scheduler.step()
    assert scheduler.runner.steps == ["extend"] and scheduler.reqs["a"].output_len == 0
    scheduler.step()
    assert scheduler.runner.steps == ["extend", "decode"] and scheduler.reqs["a"].output_len == 1


def test_a_request_that_ends_by_length_costs_no_extra_step() -> None:
    scheduler = make_scheduler(FakeRunner(256, 1, 128, 4, 64))
    add(scheduler, request("a", prompt(5), 4, ignore_eos=True))
    run_to_end(scheduler, Collector())
    assert scheduler.runner.steps == ["extend", "decode", "decode", "decode"]


def test_second_request_uses_the_cache() -> None:
    scheduler = make_scheduler(FakeRunner(512, 1, 256, 4, 128))
    collector = Collector()
    shared = prompt(100)
    add(scheduler, request("a", shared + [5], 4))
    run_to_end(scheduler, collector)
    add(scheduler, request("b", shared + [6], 4))
    b = scheduler.reqs["b"]
    run_to_end(scheduler, collector)
    assert b.hit_len == 100
    assert collector.tokens["b"] == expected_output(shared + [6], 4)


def test_equal_prompts_in_one_queue_are_computed_once() -> None:
    scheduler = make_scheduler(FakeRunner(2048, 1, 256, 8, 512))
    collector = Collector()
    for i in range(4):
        add(scheduler, request(f"r{i}", prompt(100), 8))
    reqs = [scheduler.reqs[f"r{i}"] for i in range(4)]
    run_to_end(scheduler, collector)
    assert [r.hit_len for r in reqs] == [0, 99, 99, 99]
    assert all(collector.tokens[f"r{i}"] == expected_output(prompt(100), 8) for i in range(4))


def test_chunked_prefill_takes_several_steps_and_changes_nothing() -> None:
    scheduler = make_scheduler(FakeRunner(1024, 1, 512, 4, 32))
    collector = Collector()
    add(scheduler, request("a", prompt(200), 5, ignore_eos=True))
    run_to_end(scheduler, collector)
    assert scheduler.runner.steps == ["extend"] * 7 + ["decode"] * 4
    assert collector.tokens["a"] == expected_output(prompt(200), 5, ignore_eos=True)


def test_mixed_chunk_decodes_while_it_prefills() -> None:
    scheduler = make_scheduler(FakeRunner(1024, 1, 512, 4, 32))
    collector = Collector()
    add(scheduler, request("a", prompt(10), 30, stream=True, ignore_eos=True))
    scheduler.step()
    add(scheduler, request("b", prompt(200, 2), 5))
    for _ in range(5):
        scheduler.step()
    assert scheduler.chunked and scheduler.reqs["a"].output_len >= 4
    run_to_end(scheduler, collector)
    assert collector.tokens["a"] == expected_output(prompt(10), 30, ignore_eos=True)
    assert collector.tokens["b"] == expected_output(prompt(200, 2), 5)
    assert_clean(scheduler)


@pytest.mark.parametrize(
    ("interval", "least", "steps"),
    [(0, 1, "pppppppp"), (2, 1, "pddpddpddpddpddpddpddp"), (2, 2, "pppppppp"), (9, 1, "p" + "d" * 9 + "p" + "d" * 9)],
)
def test_steps_without_prompts_between_those_with_prompts(interval: int, least: int, steps: str) -> None:
    """While enough requests decode: here one does, until its 20 tokens are there."""
    scheduler = make_scheduler(FakeRunner(1024, 1, 512, 4, 32), IntervalRule(interval, least))
    collector = Collector()
    add(scheduler, request("a", prompt(10), 21, stream=True, ignore_eos=True))
    scheduler.step()
    add(scheduler, request("b", prompt(200, 2), 2))
    run_to_end(scheduler, collector)
    assert "".join("d" if step == "decode" else "p" for step in scheduler.runner.steps).startswith(steps)
    assert collector.tokens["a"] == expected_output(prompt(10), 21, ignore_eos=True)
    assert collector.tokens["b"] == expected_output(prompt(200, 2), 2)


def test_prompts_come_together_where_many_requests_run() -> None:
    """A request's prompt waits for three steps while 128 run, and for none while 127 do."""
    for count, waits in ((127, False), (128, True)):
        scheduler = make_scheduler(FakeRunner(8192, 1, 64, 200, -1), MANY_REQUESTS)
        for i in range(count):
            add(scheduler, request(f"r{i}", prompt(3, i), 40, ignore_eos=True))
        scheduler.step()
        add(scheduler, request("late", prompt(5, 300), 2))
        for _ in range(4):
            scheduler.step()
        assert scheduler.runner.steps == (
            ["extend", *["decode"] * 3, "mixed"] if waits else ["extend", "mixed", *["decode"] * 3]
        )


def test_the_interval_ends_with_the_requests_that_decode() -> None:
    scheduler = make_scheduler(FakeRunner(1024, 1, 512, 4, 32), IntervalRule(100, 1))
    collector = Collector()
    add(scheduler, request("a", prompt(10), 3, ignore_eos=True))
    scheduler.step()
    add(scheduler, request("b", prompt(20, 2), 3, ignore_eos=True))
    run_to_end(scheduler, collector)
    assert scheduler.runner.steps == ["extend", "decode", "decode", "extend", "decode", "decode"]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page", [1, 16])
def test_logits_that_are_not_numbers_end_that_request_only(page: int, overlap: bool) -> None:
    """In prefill and in the middle of decoding; what the request has computed is not offered to others."""
    runner = FakeRunner(2048, page, 256, 8, 64)
    scheduler = make_scheduler(runner, disable_overlap_schedule=not overlap)
    collector = Collector()
    prompts = [prompt(40 + i, i) for i in range(6)]
    fails_at = {1: len(prompts[1]), 4: len(prompts[4]) + 9}
    runner.not_numbers = lambda tokens: any(
        len(tokens) == length and tokens[0] == prompts[i][0] for i, length in fails_at.items()
    )
    for i, ids in enumerate(prompts):
        add(scheduler, request(f"r{i}", ids, 20, stream=True, ignore_eos=True))
    run_to_end(scheduler, collector)
    for i, ids in enumerate(prompts):
        expected = expected_output(ids, 20, ignore_eos=True)
        if i in fails_at:
            finish = collector.finish[f"r{i}"]
            assert finish.type == "abort" and finish.status_code == 500 and "NaN" in (finish.message or "")
            expected = expected[: fails_at[i] - len(ids)]
            assert not scheduler.kv.tree.match_prefix(ids).length
        else:
            assert collector.finish[f"r{i}"].type == "length"
            assert scheduler.kv.tree.match_prefix(ids).length == len(ids) // page * page
        assert collector.tokens[f"r{i}"] == expected
    assert_clean(scheduler)


def test_a_prefix_that_failed_is_not_cached_beside_those_that_use_it() -> None:
    """A request that took the KV from the cache before the failure was known fails too, and takes the prefix along."""
    runner = FakeRunner(512, 1, 256, 4, 128)
    scheduler = make_scheduler(runner)
    collector = Collector()
    shared = prompt(100)
    runner.not_numbers = lambda tokens: len(tokens) >= 100
    add(scheduler, request("a", shared, 8))
    scheduler.step()
    add(scheduler, request("b", shared + [5], 8))
    scheduler.step()
    assert scheduler.reqs["b"].hit_len == 100
    run_to_end(scheduler, collector)
    assert {finish.status_code for finish in collector.finish.values()} == {500}
    assert scheduler.kv.tree.total_size() == 0
    assert_clean(scheduler)


def test_retraction_loses_nothing_and_repeats_nothing() -> None:
    scheduler = make_scheduler(FakeRunner(200, 1, 150, 8, 64), schedule_conservativeness=0.01)
    collector = Collector()
    for i in range(6):
        add(scheduler, request(f"r{i}", prompt(10, i), 80, stream=True, ignore_eos=True))
    run_to_end(scheduler, collector)
    assert scheduler.stats.num_retracted > 0, "the pool was meant to be too small"
    for i in range(6):
        assert collector.tokens[f"r{i}"] == expected_output(prompt(10, i), 80, ignore_eos=True)
    assert_clean(scheduler)


def test_samples_that_arrive_together_compute_their_prompt_once() -> None:
    scheduler = make_scheduler(FakeRunner(2048, 1, 256, 8, 512))
    collector = Collector()
    for i in range(4):
        add(scheduler, request(f"r{i}", prompt(100), 5, ignore_eos=True))
    samples = list(scheduler.reqs.values())
    run_to_end(scheduler, collector)
    assert sorted(req.hit_len for req in samples) == [0, 99, 99, 99]
    assert scheduler.runner.steps[2:] == ["decode"] * (len(scheduler.runner.steps) - 2)  # the others enter together
    assert_clean(scheduler)


@pytest.mark.parametrize(("page", "own", "prefills"), [(1, 20, 1), (1, 0, 1), (16, 20, 2), (16, 0, 2)])
def test_prompts_that_leave_each_other_no_state_enter_together(page: int, own: int, prefills: int) -> None:
    """Behind 100 tokens that all begin with is no state, so that nobody gains by waiting; but where prompts pause at
    their last whole page, equal ones go on from there."""
    runner = FakeRunner(8192, page, 512, 16, 1024, checkpoints=40)
    scheduler, collector = make_scheduler(runner), Collector()
    prompts = [prompt(100) + prompt(own, 3 + i) for i in range(8)]
    for i, ids in enumerate(prompts):
        add(scheduler, request(f"r{i}", ids, 2, ignore_eos=True))
    samples = list(scheduler.reqs.values())
    run_to_end(scheduler, collector)
    assert sum(step != "decode" for step in runner.steps) == prefills
    assert [req.hit_len for req in samples] == [0] + [96 if page == 16 and not own else 0] * 7
    assert all(collector.tokens[f"r{i}"] == expected_output(ids, 2, True) for i, ids in enumerate(prompts))
    assert_clean(scheduler)


@pytest.mark.parametrize(("shared", "together"), [(100, True), (130, False)])
def test_prompts_that_share_less_than_a_page_enter_together(shared: int, together: bool) -> None:
    scheduler = make_scheduler(FakeRunner(4096, 128, 512, 8, 1024))
    for i in range(3):
        add(scheduler, request(f"r{i}", prompt(shared) + prompt(40, 3 + i), 2, ignore_eos=True))
    scheduler.step()
    assert len(scheduler.running) == (3 if together else 1)
    run_to_end(scheduler, Collector())
    assert_clean(scheduler)


def test_abort_in_every_state() -> None:
    scheduler = make_scheduler(FakeRunner(300, 1, 256, 2, 32))
    collector = Collector()
    add(scheduler, request("decoding", prompt(5), 100, ignore_eos=True))
    scheduler.step()
    scheduler.step()
    add(scheduler, request("chunked", prompt(100, 2), 5))
    add(scheduler, request("waiting", prompt(50, 3), 5))
    scheduler.step()
    assert scheduler.chunked and len(scheduler.waiting) == 1
    for rid in ("waiting", "chunked", "decoding", "unknown"):
        scheduler.abort(AbortReq([rid]))
    run_to_end(scheduler, collector)
    assert {rid: f.type for rid, f in collector.finish.items()} == dict.fromkeys(
        ("waiting", "chunked", "decoding"), "abort"
    )
    got = collector.tokens["decoding"]
    assert got and got == expected_output(prompt(5), 100, ignore_eos=True)[: len(got)]
    assert_clean(scheduler)


def test_abort_all() -> None:
    scheduler = make_scheduler(FakeRunner(300, 1, 256, 2, 32))
    collector = Collector()
    for i in range(5):
        add(scheduler, request(f"r{i}", prompt(20, i), 50))
    scheduler.step()
    scheduler.abort(AbortReq(abort_all=True))
    run_to_end(scheduler, collector)
    assert len(collector.finish) == 5
    assert_clean(scheduler)


def test_one_abort_ends_many_with_its_reason() -> None:
    """Running, waiting, unknown and named twice; whoever was not named goes on."""
    scheduler = make_scheduler(FakeRunner(300, 1, 256, 2, 32))
    collector = Collector()
    for i in range(6):
        add(scheduler, request(f"r{i}", prompt(20, i), 5))
    scheduler.step()
    scheduler.abort(AbortReq(["r0", "r3", "r5", "r3", "nobody"], message="too late", status_code=503))
    assert len(scheduler.outbox) == 1
    run_to_end(scheduler, collector)
    for rid, finish in collector.finish.items():
        aborted = rid in ("r0", "r3", "r5")
        assert ((finish.type, finish.message, finish.status_code) == ("abort", "too late", 503)) == aborted
    assert len(collector.finish) == 6
    assert_clean(scheduler)


def test_refusals_have_a_status() -> None:
    scheduler = make_scheduler(FakeRunner(300, 1, 64, 2, 32), max_queued_requests=1)
    collector = Collector()
    add(scheduler, request("long", prompt(64), 5))
    add(scheduler, request("first", prompt(10), 5))
    add(scheduler, request("second", prompt(10), 5))
    collector.take(scheduler)
    assert collector.finish["long"].status_code == 400 and "64" in (collector.finish["long"].message or "")
    assert collector.finish["second"].status_code == 503
    run_to_end(scheduler, collector)
    assert collector.finish["first"].type in ("stop", "length")
    assert_clean(scheduler)


def test_prompt_only() -> None:
    scheduler = make_scheduler(FakeRunner(300, 1, 64, 2, 32))
    collector = Collector()
    add(scheduler, request("a", prompt(10), 0))
    run_to_end(scheduler, collector)
    assert collector.tokens["a"] == [] and collector.finish["a"].type == "length"
    assert_clean(scheduler)


def test_output_stops_at_the_context_length() -> None:
    scheduler = make_scheduler(FakeRunner(300, 1, 64, 2, 32))
    collector = Collector()
    add(scheduler, request("a", prompt(60), 100, ignore_eos=True))
    run_to_end(scheduler, collector)
    assert len(collector.tokens["a"]) == 4 and collector.finish["a"].type == "length"


def test_stop_token_wins_over_length() -> None:
    expected = expected_output(prompt(6), 5, ignore_eos=True)
    scheduler = make_scheduler(FakeRunner(300, 1, 64, 2, 32))
    collector = Collector()
    add(scheduler, request("a", prompt(6), 5, ignore_eos=True, stop_token_ids=[expected[4]]))
    run_to_end(scheduler, collector)
    assert collector.finish["a"].type == "stop" and collector.finish["a"].matched == expected[4]


class Spelling:
    """A text decoder whose tokens all spell the same, and of which one is special."""

    def __init__(self, text: str, special_id: int = -1) -> None:
        self.text, self.special_id = text, special_id

    def stream(self, skip_special_tokens: bool) -> Spelling:
        return self

    def special_text(self, token_id: int) -> str | None:
        return "<special>" if token_id == self.special_id else None

    def push(self, ids: Sequence[int]) -> str:
        return "".join("<special>" if i == self.special_id else self.text for i in ids)

    def finish(self) -> str:
        return ""


def test_a_stop_regex_that_takes_too_long_ends_its_request_only() -> None:
    scheduler = make_scheduler(FakeRunner(512, 1, 128, 4, 64))
    scheduler.stop_checker = StopChecker(Spelling("a" * 60 + "b"))
    collector = Collector()
    add(scheduler, request("bad", prompt(6), 5, stop_regex=["(a|aa)+$"]))
    add(scheduler, request("good", prompt(7), 5, stop_regex=["c"], ignore_eos=True))
    run_to_end(scheduler, collector)
    assert collector.finish["bad"].type == "abort" and "takes too long" in (collector.finish["bad"].message or "")
    assert collector.finish["good"].type == "length"
    assert_clean(scheduler)


def test_a_pattern_that_cannot_be_compiled_ends_its_request_only() -> None:
    scheduler = make_scheduler(FakeRunner(512, 1, 128, 4, 64))
    scheduler.stop_checker = StopChecker(Spelling("a"))
    collector = Collector()
    add(scheduler, request("bad", prompt(6), 5, stop_regex=["("]))
    run_to_end(scheduler, collector)
    assert (collector.finish["bad"].type, collector.finish["bad"].status_code) == ("abort", 400)
    assert_clean(scheduler)


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_string_may_be_a_special_token(skip: bool) -> None:
    expected = expected_output(prompt(6), 9, ignore_eos=True)
    at = next(i for i in range(2, 9) if expected[i] not in expected[:i])
    scheduler = make_scheduler(FakeRunner(512, 1, 128, 4, 64))
    scheduler.stop_checker = StopChecker(Spelling("a", expected[at]))
    collector = Collector()
    add(scheduler, request("r", prompt(6), 9, stop=["a<special>"], ignore_eos=True, skip_special_tokens=skip))
    run_to_end(scheduler, collector)
    assert collector.finish["r"].matched == "a<special>" and collector.tokens["r"] == expected[: at + 1]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_what_the_leader_decides_ends_every_rank_at_the_same_token(overlap: bool, stream: bool) -> None:
    """Two ranks over the same messages; only the first looks at text, and its clock is its own."""
    decisions: list[EndReq] = []
    ranks = [make_scheduler(FakeRunner(512, 1, 128, 4, 64), disable_overlap_schedule=not overlap) for _ in range(2)]
    ranks[0].stop_checker = StopChecker(Spelling("ab"), decisions.append)
    collectors = [Collector(), Collector()]
    for scheduler in ranks:
        add(scheduler, request("stops", prompt(6), 40, stop_regex=["(ab){4}"], ignore_eos=True, stream=stream))
        add(scheduler, request("runs", prompt(7), 20, ignore_eos=True, stream=stream))
        add(scheduler, request("both", prompt(8), 3, stop_regex=["(ab){3}"], ignore_eos=True, stream=stream))
    for _ in range(60):
        told, decisions[:] = list(decisions), []
        for scheduler, collector in zip(ranks, collectors, strict=True):
            for decision in told:
                scheduler.end_named(decision.rid, decision.reason)
            scheduler.step()
            collector.take(scheduler)
        assert ranks[0].runner.steps == ranks[1].runner.steps
        assert ranks[0].check_memory() == ranks[1].check_memory()
    assert all(scheduler.idle for scheduler in ranks)
    assert collectors[0].tokens == collectors[1].tokens
    assert collectors[0].tokens["stops"] == expected_output(prompt(6), 4, ignore_eos=True)
    assert collectors[0].finish["stops"].matched == "(ab){4}"
    assert collectors[0].finish["both"].matched == "(ab){3}"
    assert collectors[0].tokens["runs"] == expected_output(prompt(7), 20, ignore_eos=True)
    for scheduler in ranks:
        assert_clean(scheduler)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("at", [4, 5, 6])
def test_what_the_leader_decides_of_the_last_tokens(stages: int, at: int) -> None:
    """Those of one request that are in several stages at once, when there is nothing more to launch."""
    decisions: list[EndReq] = []
    scheduler, collector = make_scheduler(FakeRunner(512, 1, 128, 4, 64), pp_size=stages), Collector()
    scheduler.stop_checker = StopChecker(Spelling("ab"), decisions.append)
    stop = "ab" * at
    add(scheduler, request("stops", prompt(6), 6, stop=[stop], ignore_eos=True))
    while not scheduler.idle:
        told, decisions[:] = list(decisions), []
        for decision in told:
            scheduler.end_named(decision.rid, decision.reason)
        scheduler.step()
        collector.take(scheduler)
    assert collector.tokens["stops"] == expected_output(prompt(6), at, ignore_eos=True)
    assert collector.finish["stops"].matched == stop
    assert_clean(scheduler)


def test_tokens_behind_what_the_leader_decided_do_not_count() -> None:
    """A flush, which is refused, reads back all steps on their way: three tokens of one request in three stages."""
    decisions: list[EndReq] = []
    scheduler, collector = make_scheduler(FakeRunner(512, 1, 128, 4, 64), pp_size=3), Collector()
    scheduler.stop_checker = StopChecker(Spelling("ab"), decisions.append)
    add(scheduler, request("stops", prompt(6), 40, stop=["ab" * 5], ignore_eos=True))
    req = scheduler.reqs["stops"]
    while req.output_len < 4:
        scheduler.step()
    assert not scheduler.flush_cache() and req.output_len == 7
    for decision in decisions:
        scheduler.end_named(decision.rid, decision.reason)
    assert [message.meta[0].completion_tokens for message in scheduler.outbox] == [5]
    run_to_end(scheduler, collector)
    assert collector.tokens["stops"] == expected_output(prompt(6), 5, ignore_eos=True)
    assert collector.finish["stops"].matched == "ab" * 5 and len(decisions) == 1
    assert_clean(scheduler)


@pytest.mark.parametrize(("stuck", "status_code"), [(True, 400), (False, 500)])
def test_a_token_that_the_grammar_does_not_take(stuck: bool, status_code: int) -> None:
    """A grammar with no way on is the client's; a token that the mask should have excluded is our error."""
    grammar = SimpleNamespace(
        accept=lambda token: False, is_stuck=lambda: stuck, fresh=lambda: grammar, fill_mask=lambda row: None
    )
    scheduler = make_scheduler(FakeRunner(512, 1, 128, 4, 64))
    collector = Collector()
    add(scheduler, request("r", prompt(6), 5))
    scheduler.reqs["r"].grammar = grammar  # type: ignore[assignment]
    run_to_end(scheduler, collector)
    assert (collector.finish["r"].type, collector.finish["r"].status_code) == ("abort", status_code)
    assert_clean(scheduler)


def test_a_grammar_waits_for_tokens_behind_the_forward_pass() -> None:
    """Launched first, then the step before is read back, then its token is in the grammar before the mask is filled."""
    events: list[str] = []

    class Result(LateResult):
        def wait(self) -> None:
            events.append("wait")

    class Runner(FakeRunner):
        def forward(self, step: StepInput) -> LateResult:
            events.append("forward")
            result = super().forward(step)
            return Result(result.next_token_ids)

        def sample(self, forward: LateResult, vocab_mask: np.ndarray | None = None) -> LateResult:
            events.append("sample with mask" if vocab_mask is not None else "sample")
            return forward

    grammar = SimpleNamespace(
        accept=lambda token: events.append("accept") or True, fill_mask=lambda row: events.append("fill"),
        is_terminated=lambda: False, allowance=SimpleNamespace(exhausted=False),
    )  # fmt: skip
    scheduler = make_scheduler(Runner(512, 1, 128, 4, 64))
    add(scheduler, request("r", prompt(6), 3, ignore_eos=True))
    scheduler.reqs["r"].grammar = grammar  # type: ignore[assignment]
    run_to_end(scheduler, Collector())
    step = ["forward", "wait", "accept", "fill", "sample with mask"]
    assert events == ["forward", "fill", "sample with mask", *step, *step, "wait", "accept"]


def test_pause_stops_and_resume_goes_on() -> None:
    scheduler = make_scheduler(FakeRunner(300, 1, 64, 2, 32))
    collector = Collector()
    add(scheduler, request("a", prompt(6), 20, ignore_eos=True))
    scheduler.step()
    scheduler.paused = True
    run_to_end(scheduler, collector)
    assert "a" not in collector.finish
    scheduler.paused = False
    run_to_end(scheduler, collector)
    assert collector.tokens["a"] == expected_output(prompt(6), 20, ignore_eos=True)


def test_flush_needs_rest() -> None:
    scheduler = make_scheduler(FakeRunner(300, 1, 64, 2, 32))
    add(scheduler, request("a", prompt(6), 3))
    scheduler.step()
    assert not scheduler.flush_cache()
    run_to_end(scheduler, Collector())
    assert scheduler.flush_cache() and scheduler.check_memory()["free"] == 300


def test_longest_prefix_first() -> None:
    scheduler = make_scheduler(FakeRunner(1024, 1, 256, 1, 256), schedule_policy="lpm")
    collector = Collector()
    add(scheduler, request("warm", prompt(100), 2))
    run_to_end(scheduler, collector)
    add(scheduler, request("cold", prompt(100, 9), 2))
    add(scheduler, request("hit", prompt(100) + [3], 2))
    scheduler.step()
    assert scheduler.reqs["hit"].slot and not scheduler.reqs["cold"].slot


def start_order(scheduler: Scheduler) -> list[str]:
    order: list[str] = []
    place = scheduler.choice._place
    scheduler.choice._place = lambda req, node: (order.append(req.rid), place(req, node))[1]  # type: ignore[method-assign]
    return order


@pytest.mark.parametrize(("options", "expected"), [
    ({}, "abc"), ({"enable_priority_scheduling": True}, "bca"),
    ({"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, "acb"),
])  # fmt: skip
def test_priorities_order_the_queue(options: dict[str, bool], expected: str) -> None:
    scheduler = make_scheduler(FakeRunner(512, 1, 128, 1, 64), disable_priority_preemption=True, **options)
    order = start_order(scheduler)
    for i, (rid, priority) in enumerate((("a", 0), ("b", 9), ("c", 5))):
        msg = request(rid, prompt(6, i), 3)
        msg.priority = priority
        add(scheduler, msg)
    run_to_end(scheduler, Collector())
    assert "".join(order) == expected


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(("priority", "threshold", "preempts"), [(11, 10, True), (10, 10, False), (1, 0, True)])
@pytest.mark.parametrize("rows", [1, 8], ids=["no row", "no memory"])
def test_an_important_request_takes_the_place_of_another(
    rows: int, priority: int, threshold: int, preempts: bool, page: int
) -> None:
    """For want of a row or of memory; the other goes on later, with the tokens that it would have got."""
    scheduler = make_scheduler(
        FakeRunner(13 * 16, page, 180, rows, 64), enable_priority_scheduling=True,
        priority_scheduling_preemption_threshold=threshold,
    )  # fmt: skip
    order, collector = start_order(scheduler), Collector()
    add(scheduler, request("low", prompt(60), 40, ignore_eos=True))
    for _ in range(5):
        scheduler.step()
        collector.take(scheduler)
    msg = request("high", prompt(120, 2), 5, ignore_eos=True)
    msg.priority = priority
    add(scheduler, msg)
    run_to_end(scheduler, collector)
    assert order == (["low", "high", "low"] if preempts else ["low", "high"])
    assert collector.tokens["low"] == expected_output(prompt(60), 40, ignore_eos=True)
    assert collector.tokens["high"] == expected_output(prompt(120, 2), 5, ignore_eos=True)
    assert_clean(scheduler)


@pytest.mark.parametrize("policy", ["fcfs", "lof", "lpm"])
def test_room_is_made_for_the_one_that_enters_first(policy: str) -> None:
    """Of two that are equally important. That the other one would fit helps neither."""
    scheduler = make_scheduler(FakeRunner(140, 1, 128, 4, 256), enable_priority_scheduling=True, schedule_policy=policy)
    collector = Collector()
    add(scheduler, request("cached", prompt(40, 7), 1))
    run_to_end(scheduler, collector)
    add(scheduler, request("low", prompt(10), 80, ignore_eos=True))
    scheduler.step()
    for rid, ids, length in (("small", prompt(5, 3), 5), ("large", prompt(42, 7), 70)):
        msg = request(rid, ids, length, ignore_eos=True)
        msg.priority = 100
        add(scheduler, msg)
    run_to_end(scheduler, collector)
    assert list(collector.finish) == ["cached", "small", "large", "low"]
    assert_clean(scheduler)


@pytest.mark.parametrize(("policy", "victim"), [(None, "long"), ("priority", "long"), ("length", "short")])
def test_who_goes_back_when_memory_runs_out(policy: str | None, victim: str) -> None:
    scheduler = make_scheduler(
        FakeRunner(120, 1, 119, 8, 64), enable_priority_scheduling=True, retraction_policy=policy,
        schedule_conservativeness=0.01,
    )  # fmt: skip
    add(scheduler, request("long", prompt(10), 80, ignore_eos=True))
    for _ in range(5):
        scheduler.step()
    important = request("short", prompt(10, 2), 80, ignore_eos=True)
    important.priority = 5
    add(scheduler, important)
    reqs = dict(scheduler.reqs)
    for _ in range(100):
        scheduler.step()
        if scheduler.stats.num_retracted:
            break
    assert [rid for rid, req in reqs.items() if req.num_retractions] == [victim]
    run_to_end(scheduler, Collector())
    assert_clean(scheduler)


workload = st.lists(
    st.tuples(
        st.integers(0, 3),  # which shared prefix
        st.integers(1, 90),  # length
        st.integers(0, 60),  # max_new_tokens
        st.integers(0, 12),  # steps before the next event
        st.sampled_from(["run", "run", "run", "abort"]),
        st.booleans(),  # ignore_eos
    ),
    min_size=1,
    max_size=14,
)


def window_tokens(pool: int, page: int, window: int, chunk: int, share: float) -> int:
    """Of a window table: from what one request needs to as many as there are of all tokens."""
    step = chunk if chunk > 0 else 160
    least = min(pool, (-(-window // page) + -(-step // page) + 2) * page)
    return int(least + share * (pool - least)) // page * page


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=workload,
    page=st.sampled_from([1, 4, 16]),
    pool_pages=st.integers(12, 60),
    chunk=st.sampled_from([-1, 16, 48]),
    max_reqs=st.integers(1, 6),
    policy=st.sampled_from(sorted(POLICIES)),
    radix=st.booleans(),
    steps_in_flight=st.integers(0, 3),
    conservativeness=st.sampled_from([0.01, 1.0]),
    windows=st.lists(st.sampled_from([1, 2, 7, 16, 40]), max_size=2, unique=True),
    window_share=st.sampled_from([0.0, 0.5, 1.0]),
    checkpoints=st.sampled_from([None, 0, 1, 3, 20]),
    interval=st.sampled_from([NEVER, IntervalRule(1, 1), IntervalRule(3, 2)]),
)
def test_any_workload(
    events: list, page: int, pool_pages: int, chunk: int, max_reqs: int, policy: str, radix: bool,
    steps_in_flight: int, conservativeness: float, windows: list[int], window_share: float, checkpoints: int | None,
    interval: IntervalRule,
) -> None:  # fmt: skip
    pool = pool_pages * page if page > 1 else pool_pages * 4
    sizes = tuple(WindowSize(window, window_tokens(pool, page, window, chunk, window_share)) for window in windows)
    runner = FakeRunner(pool, page, 160, max_reqs, chunk, windows=sizes, checkpoints=checkpoints)
    scheduler = make_scheduler(
        runner, schedule_policy=policy, disable_radix_cache=not radix, disable_overlap_schedule=not steps_in_flight,
        pp_size=max(1, steps_in_flight), schedule_conservativeness=conservativeness,
        interval=interval,
    )  # fmt: skip
    collector = Collector()
    wanted: dict[str, tuple[list[int], int, bool]] = {}
    for i, (family, length, max_new, steps, kind, ignore_eos) in enumerate(events):
        ids = prompt(length, family)
        add(scheduler, request(f"r{i}", ids, max_new, stream=i % 2 == 0, ignore_eos=ignore_eos))
        wanted[f"r{i}"] = (ids, max_new, ignore_eos)
        for _ in range(steps):
            scheduler.step()
            scheduler.kv.check(scheduler.reqs.values())
            collector.take(scheduler)
        if kind == "abort":
            scheduler.abort(AbortReq([f"r{i // 2}"]))
    run_to_end(scheduler, collector)
    assert set(collector.finish) == set(wanted)
    capacity = min(160, scheduler.kv.size - 2 * page)
    for rid, (ids, max_new, ignore_eos) in wanted.items():
        got, finish = collector.tokens[rid], collector.finish[rid]
        full = expected_output(ids, max(0, min(max_new, capacity - len(ids))), ignore_eos)
        if finish.type == "abort":
            assert got == full[: len(got)]
        else:
            assert got == full
            assert (finish.type == "stop") == (bool(full) and full[-1] == EOS and not ignore_eos)
    assert_clean(scheduler)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_a_second_turn_goes_on_from_the_state_of_the_first(page: int, overlap: bool) -> None:
    """With larger pages from the last whole one, which the first turn's answer filled."""
    scheduler = make_scheduler(FakeRunner(2048, page, 512, 4, 32, checkpoints=4), disable_overlap_schedule=not overlap)
    collector = Collector()
    conversation = prompt(70)
    for turn in range(3):
        rid = f"turn{turn}"
        add(scheduler, request(rid, conversation, 29, ignore_eos=True))
        req = scheduler.reqs[rid]
        run_to_end(scheduler, collector)
        assert collector.tokens[rid] == expected_output(conversation, 29, ignore_eos=True)
        # The state is that after the last token that was computed: the one sampled last was not.
        assert req.hit_len == (0 if turn == 0 else (len(conversation) - 4) // page * page)
        conversation = conversation + collector.tokens[rid] + prompt(3, turn)
    assert_clean(scheduler)


def test_what_requests_keep_while_they_decode_leaves_half_of_the_checkpoints() -> None:
    """A prefix that all of them share stays, however many pages they fill."""
    scheduler = make_scheduler(FakeRunner(4096, 4, 512, 8, 64, checkpoints=4))
    collector = Collector()
    shared = prompt(64)
    add(scheduler, request("shared", shared + [1], 1))
    run_to_end(scheduler, collector)
    for i in range(6):
        add(scheduler, request(f"r{i}", [*shared, 2, 3 + i], 60, ignore_eos=True))
    held = 0
    while not scheduler.idle:
        scheduler.step()
        collector.take(scheduler)
        held = max(held, scheduler.check_memory()["checkpoints"]["held"])
        scheduler.kv.check(scheduler.reqs.values())
    assert held == 2
    add(scheduler, request("last", [*shared, 90], 1))
    req = scheduler.reqs["last"]
    run_to_end(scheduler, collector)
    assert req.hit_len == 64
    assert_clean(scheduler)


@pytest.mark.parametrize(("checkpoints", "expected"), [(20, [0, 64, 0, 70, 71]), (1, [0, 0, 0, 0, 0])])
def test_a_match_ends_where_there_is_a_state(checkpoints: int, expected: list[int]) -> None:
    """Those are at the ends of chunks, of prompts and of what was computed; the least recently used give way."""
    scheduler = make_scheduler(FakeRunner(2048, 1, 512, 4, 32, checkpoints=checkpoints))
    collector = Collector()
    hits = []
    first = expected_output(prompt(70), 2, ignore_eos=True)
    prompts = [prompt(70), prompt(66) + [5], prompt(30) + [5], prompt(70) + [first[0] + 1], prompt(70) + first]
    for i, ids in enumerate(prompts):
        add(scheduler, request(f"r{i}", ids, 2, ignore_eos=True))
        req = scheduler.reqs[f"r{i}"]
        run_to_end(scheduler, collector)
        hits.append(req.hit_len)
        assert collector.tokens[f"r{i}"] == expected_output(ids, 2, ignore_eos=True)
    assert hits == expected
    assert_clean(scheduler)


def test_a_prompt_beyond_the_step_limit_does_not_wait_for_an_empty_server() -> None:
    scheduler = make_scheduler(FakeRunner(1024, 1, 512, 4, -1, max_prefill=64))
    collector = Collector()
    add(scheduler, request("running", prompt(10), 200, ignore_eos=True))
    scheduler.step()
    add(scheduler, request("long", prompt(100, 2), 3))
    scheduler.step()
    assert scheduler.reqs["long"].slot
    run_to_end(scheduler, collector)
    assert collector.tokens["long"] == expected_output(prompt(100, 2), 3)
    assert_clean(scheduler)


def test_requests_for_prompt_log_probabilities_enter_together() -> None:
    """They compute their whole prompt whatever is cached, so that none gains by waiting for another."""
    scheduler = make_scheduler(FakeRunner(2048, 1, 256, 8, 1024))
    for i in range(4):
        msg = request(f"r{i}", prompt(100), 2)
        msg.return_logprob, msg.logprob_start_len = True, 0
        add(scheduler, msg)
    scheduler.step()
    assert len(scheduler.running) == 4


def test_equal_prompts_of_different_namespaces_enter_together() -> None:
    scheduler = make_scheduler(FakeRunner(2048, 1, 256, 8, 1024))
    for namespace in (None, "a", "b"):
        msg = request(f"r{namespace}", prompt(100), 2)
        msg.cache_namespace = namespace
        add(scheduler, msg)
    scheduler.step()
    assert len(scheduler.running) == 3


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight"])
def test_a_waiting_prompt_is_compared_with_the_tree_once(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(FakeRunner(8192, 1, 2048, 2, 2048), schedule_policy=policy)
    collector = Collector()
    add(scheduler, request("first", prompt(1500), 4))
    run_to_end(scheduler, collector)
    compared = 0
    common_length = scheduler.kv.tree._common_length

    def count(key: np.ndarray, tokens: np.ndarray) -> int:
        nonlocal compared
        compared += min(len(key), len(tokens))
        return common_length(key, tokens)

    monkeypatch.setattr(scheduler.kv.tree, "_common_length", count)
    for i in range(2):  # all request slots
        add(scheduler, request(f"busy{i}", prompt(5, i + 9), 100, ignore_eos=True))
    scheduler.step()
    add(scheduler, request("long", prompt(1501), 4))
    for _ in range(50):
        list(scheduler.choice.queue())
        scheduler.step()
    long = scheduler.reqs["long"]
    run_to_end(scheduler, collector)
    assert long.hit_len == 1500 and 1500 <= compared < 1500 + 200
    assert collector.tokens["long"] == expected_output(prompt(1501), 4)


@pytest.mark.parametrize("page", [1, 16])
def test_log_probabilities_of_a_prompt_take_several_steps(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no step, and no message, has millions of them while others wait for tokens."""
    monkeypatch.setattr(schedule_policy, "MAX_PROMPT_LOGPROBS", 1000)
    runner = FakeRunner(4096, page, 2048, 8, 512)
    scheduler, collector = make_scheduler(runner), Collector()
    computed: list[int] = []
    forward = runner.forward

    def counted(step: StepInput) -> LateResult:
        asked = None if step.prompts is None else step.prompts.prompt_logprobs
        computed.append(0 if asked is None else len(asked.rows) * (1 + asked.num_top))
        return forward(step)

    runner.forward = counted  # type: ignore[method-assign]
    add(scheduler, request("other", [5, 6, 7], 40, ignore_eos=True))
    for rid, start in (("all", 0), ("end", 250)):
        msg = request(rid, list(range(300)), 0)
        msg.return_logprob, msg.logprob_start_len, msg.top_logprobs_num = True, start, 9
        add(scheduler, msg)
    run_to_end(scheduler, collector)
    assert max(computed) <= 1000 and sum(computed) == (299 + 50) * 10 and sum(map(bool, computed)) >= 4
    assert collector.tokens == {"other": expected_output([5, 6, 7], 40, True), "all": [], "end": []}
    assert_clean(scheduler)
