"""Counts of drafting in replies, on the metrics page, in the log."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest

from sglang.srt.managers.front.draft_details import draft_counts, draft_details, draft_meta_info
from sglang.srt.managers.front.metrics import Metrics
from sglang.srt.managers.scheduler.counters import Counters
from sglang.srt.managers.scheduler.draft_stats import WATCHED_STEPS, DraftStats
from sglang.srt.managers.scheduler.scheduler_stats import Load, StatsLogger
from sglang.srt.managers.wire.io_struct import DraftCounts
from srt.managers.drafting_runner import DraftingRunner
from srt.managers.fake_runner import add, make_scheduler, request


def test_counts_of_a_request() -> None:
    """Against sums over the steps, of widths that change. It changes its slot now and then, where others were."""
    rng, counters, steps, counts, slot = random.Random(0), Counters(3, 6), [], DraftCounts(), 1
    for number in range(200):
        width = rng.choice([1, 2, 4, 6])
        steps.append((width, rng.randint(1, width)))
        if number % 50 == 0:
            counts, slot = counters.drafts_of(slot), rng.choice([1, 2, 3])
            counters.begin(slot, counts)
        others = [other for other in (1, 2, 3) if other != slot]
        widths, accepted = np.array([width, 6, 1], np.int32), np.array([steps[-1][1], 3, 1], np.int32)
        counters.verified(np.array([slot, *others]), widths, accepted)
    counts = counters.drafts_of(slot)
    drafted = [(width, count) for width, count in steps if width > 1]
    details = draft_details(counts)
    assert details["spec_verify_ct"] == len(drafted)
    assert details["spec_num_proposed_drafts"] == sum(width - 1 for width, _ in drafted)
    assert details["spec_num_correct_drafts"] == sum(count - 1 for _, count in drafted)
    assert details["spec_accept_length"] == pytest.approx(sum(count for _, count in drafted) / len(drafted))
    histogram = details["spec_correct_drafts_histogram"]
    assert histogram == [sum(count == i + 1 for _, count in drafted) for i in range(6)]
    info = draft_meta_info(counts)
    assert info["spec_accept_histogram"] == histogram
    assert info["spec_accept_token_num"] == details["spec_num_correct_drafts"]
    assert info["spec_draft_token_num"] == details["spec_num_proposed_drafts"]


@pytest.mark.parametrize("interval", [1, 3])
def test_a_stream_brings_counts_and_the_histogram_comes_with_the_end(interval: int) -> None:
    """Also where the request loses its slot in between; a message has one array for all its requests."""
    runner = DraftingRunner(8192, 1, 512, 8, 256, tokens_per_step=4, error_rate=0.5, lookahead_slots=3)
    scheduler, seen = make_scheduler(runner, disable_overlap_schedule=True, stream_interval=interval), dict[str, Any]()
    for number in range(3):
        add(scheduler, request(f"r{number}", [number + 5] * 3, 40, ignore_eos=True, stream=number > 0))
    ends = {}
    while scheduler.reqs:
        if len(seen) == 2 and not scheduler.stats.num_retracted:
            scheduler.pause("retract")
            scheduler.paused, scheduler.stats.num_retracted = False, 1
        scheduler.step()
        for message in scheduler.outbox:
            for rid, meta, finish, counts in zip(
                message.rids, message.meta, message.finish, draft_counts(message) or message.rids, strict=True
            ):  # type: ignore[arg-type]
                if finish is not None:
                    ends[rid] = meta.drafts
                elif isinstance(counts, DraftCounts):
                    assert counts.steps >= seen.get(rid, counts).steps and not counts.histogram
                    seen[rid] = counts
        scheduler.outbox.clear()
    assert set(seen) == {"r1", "r2"} and set(ends) == {"r0", "r1", "r2"}
    for rid, counts in ends.items():
        assert 0 < counts.correct < counts.proposed and sum(counts.histogram) == counts.steps
        assert sum(correct * steps for correct, steps in enumerate(counts.histogram)) == counts.correct
        assert rid == "r0" or counts.steps >= seen[rid].steps > 0
    assert draft_details(DraftCounts())["spec_accept_length"] == 0.0


def test_gauges_are_of_the_last_interval(caplog: pytest.LogCaptureFixture) -> None:
    stats = StatsLogger(2, lambda: Load(1, 0, 10, 100), "NGRAM")
    with caplog.at_level(logging.INFO):
        for counts in ([4, 4], [4, 4], [1, 1], [1, 1], [2, 4]):
            stats.decode_launched(2, in_graph=False)
            stats.drafts.verified([4, 4], counts)
    lines = [text for text in caplog.messages if text.startswith("Decode batch")]
    assert "token usage: 0.10, accept len: 4.00, accept rate: 1.00, cuda graph: False" in lines[0]
    assert "accept len: 2.50, accept rate: 0.50" in lines[1]
    stats.drafts.confidence_cuts = 3
    snapshot = stats.snapshot()
    assert (snapshot.spec_accept_length, snapshot.spec_accept_rate) == (2.5, 0.5)
    assert (snapshot.spec_num_steps, snapshot.spec_num_draft_tokens, snapshot.spec_verify_calls) == (3, 4, 5)
    assert stats.drafts.since_start.accept_length == pytest.approx(26 / 10)
    metrics = Metrics("m")
    metrics.stats = [snapshot]
    page = metrics.render().decode()
    assert 'sglang:spec_accept_length{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 2.5' in page
    assert 'sglang:spec_verify_calls_total{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 5.0' in page
    assert 'sglang:spec_confidence_cuts_total{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 3.0' in page


def test_no_word_of_drafts_without_them(caplog: pytest.LogCaptureFixture) -> None:
    stats = StatsLogger(1, lambda: Load(1, 0, 10, 100))
    with caplog.at_level(logging.INFO):
        stats.decode_launched(2, in_graph=False)
    assert "accept" not in caplog.text and stats.snapshot().spec_accept_length == 0


@pytest.mark.parametrize(
    ("algorithm", "cause"), [("NGRAM", "repeat little"), ("EAGLE", "unquant"), ("EAGLE3", "trained for another model")]
)
def test_drafts_that_are_never_right_are_a_warning(
    algorithm: str, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    stats = DraftStats(algorithm)
    for _ in range(WATCHED_STEPS):
        stats.verified([4, 1], [1, 1])
        stats.verified([1, 1], [1, 1])  # without draft tokens, which does not count
    (said,) = caplog.messages
    assert said.startswith("Drafts are nearly never right: 1.00 tokens a request and step") and cause in said
    for _ in range(WATCHED_STEPS):
        stats.verified([4], [2])
    assert len(caplog.messages) == 1
