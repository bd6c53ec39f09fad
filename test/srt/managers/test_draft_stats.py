"""Counts of drafting in replies, on the metrics page, in the log."""

from __future__ import annotations

import logging
import random

import pytest

from sglang.srt.managers.front.draft_details import draft_details, draft_meta_info
from sglang.srt.managers.front.metrics import Metrics
from sglang.srt.managers.scheduler.draft_stats import WATCHED_STEPS, DraftStats
from sglang.srt.managers.scheduler.scheduler_stats import Load, StatsLogger
from sglang.srt.managers.wire.io_struct import DraftCounts


def test_counts_of_a_request() -> None:
    """Against sums over the steps, of widths that change."""
    rng, counts, steps = random.Random(0), DraftCounts(), []
    for _ in range(200):
        width = rng.choice([1, 2, 4, 6])
        steps.append((width, rng.randint(1, width)))
        counts.add(*steps[-1])
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


def test_the_histogram_comes_with_the_end() -> None:
    counts = DraftCounts()
    counts.add(width=3, count=2)
    early, last = counts.copy(with_histogram=False), counts.copy(with_histogram=True)
    counts.add(width=3, count=3)
    assert "spec_correct_drafts_histogram" not in draft_details(early)
    assert draft_details(last)["spec_correct_drafts_histogram"] == [0, 1]
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
