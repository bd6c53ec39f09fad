"""The choice of depth: by arithmetic on given times and results, against a search over all widths."""

from __future__ import annotations

import math
import random

import pytest

from sglang.srt.configs.speculative import AdaptiveSettings
from sglang.srt.drafts.depth import PROBE_STEPS, AcceptanceRates, AdaptiveDepth, Confidences, FixedDepth
from sglang.srt.plan.step_widths import StepWidths

LOADS = (1, 2, 4, 8, 16, 32, 64)


def times(row_ms: float, fixed_ms: float = 10.0, most: int = 8) -> dict[tuple[int, int], float]:
    """Of steps that take `fixed_ms` and `row_ms` a token."""
    return {(load, width): fixed_ms + row_ms * load * width for load in LOADS for width in range(1, most + 1)}


def drawn(rng: random.Random, width: int, rate: float) -> int:
    """Tokens of a request that stand where each draft token is right in a share `rate` of cases."""
    count = 1
    while count < width and rng.random() < rate:
        count += 1
    return count


def run(depth: AdaptiveDepth, num_requests: int, rate: float, steps: int, seed: int = 0) -> list[int]:
    rng, widths = random.Random(seed), []
    for _ in range(steps):
        width = depth.next_width(num_requests)
        widths.append(width)
        depth.observe([width] * num_requests, [drawn(rng, width, rate) for _ in range(num_requests)])
    return widths


def fastest(step_ms: dict[tuple[int, int], float], load: int, rate: float) -> dict[int, float]:
    """Width -> tokens a millisecond, by the formula."""
    widths = {width for _, width in step_ms}
    return {width: sum(rate**i for i in range(width)) / step_ms[load, width] for width in widths}


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("row_ms", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("load", [1, 8, 64])
def test_the_choice_is_nearly_the_fastest(load: int, row_ms: float, rate: float) -> None:
    step_ms = times(row_ms)
    depth = AdaptiveDepth(AdaptiveSettings(), 8, step_ms)
    run(depth, load, rate, 600)
    speeds = fastest(step_ms, load, rate)
    chosen = run(depth, load, rate, 200, seed=1)
    mean = sum(speeds[width] for width in chosen) / len(chosen)
    assert mean >= 0.93 * max(speeds.values())
    assert mean >= 0.97 * speeds[1]  # drafting must not cost more than this


def test_no_draft_tokens_under_load_and_many_when_it_is_over() -> None:
    depth = AdaptiveDepth(AdaptiveSettings(), 4, times(1.0, most=4))
    run(depth, 1, 0.6, 100)
    assert depth.next_width(1) > 1
    assert depth.next_width(64) == 1
    assert depth.next_width(1) > 1


def test_probes_find_that_draft_tokens_pay_again() -> None:
    settings = AdaptiveSettings(probe_interval=20)
    depth = AdaptiveDepth(settings, 4, times(0.3, most=4))
    assert run(depth, 16, 0.02, 200)[-1] == 1
    quiet = run(depth, 16, 0.02, 240)
    probes = sum(width > 1 for width in quiet)
    assert PROBE_STEPS <= probes <= (240 // 20 + 1) * PROBE_STEPS
    assert run(depth, 16, 0.99, 300)[-1] > 1


def test_small_gains_do_not_change_the_width() -> None:
    step_ms = {(1, 1): 10.0, (1, 2): 20.0}
    depth = AdaptiveDepth(AdaptiveSettings(hysteresis=0.05), 2, step_ms)
    assert run(depth, 1, 1.0, 400)[0] == 1  # expected 1.7 tokens in twice the time
    calm = AdaptiveDepth(AdaptiveSettings(hysteresis=0.5), 2, {(1, 1): 10.0, (1, 2): 15.0})
    first = calm.next_width(1)
    assert {calm.next_width(1) for _ in range(50)} == {first}


def test_ranks_agree() -> None:
    ranks = [AdaptiveDepth(AdaptiveSettings(probe_interval=10), 6, times(0.2)) for _ in range(2)]
    rng = random.Random(5)
    for _ in range(500):
        load = rng.choice([1, 3, 20, 200])
        first, second = (depth.next_width(load) for depth in ranks)
        assert first == second
        counts = [drawn(rng, first, 0.5) for _ in range(load)]
        for depth in ranks:
            depth.observe([first] * load, counts)
    assert ranks[0].rates == ranks[1].rates


def test_candidates() -> None:
    step_ms = times(0.0, most=6)
    assert AdaptiveDepth(AdaptiveSettings(candidate_steps=(1, 3, 9)), 6, step_ms).widths == (1, 2, 4)
    assert AdaptiveDepth(AdaptiveSettings(), 6, step_ms).widths == (1, 2, 3, 4, 5, 6)
    assert AdaptiveDepth(AdaptiveSettings(), 6, {(1, 1): 1.0, (1, 6): 1.0}).widths == (1, 6)
    without = AdaptiveDepth(AdaptiveSettings(), 6, {})
    assert without.next_width(1) == without.next_width(100) == 6


def test_steps_are_padded_to_measured_sizes() -> None:
    """Between two measured loads the larger one counts, whose times are the other way round here."""
    step_ms = {(1, 1): 10.0, (1, 4): 10.0, (8, 1): 10.0, (8, 4): 100.0}
    depth = AdaptiveDepth(AdaptiveSettings(), 4, step_ms)
    assert [depth.next_width(load) for load in (1, 2, 8, 1, 50)] == [4, 1, 1, 4, 1]


def test_rates_of_places_that_were_not_reached_follow_the_one_before() -> None:
    acceptance = AcceptanceRates(4)
    for _ in range(100):
        acceptance.observe([3], [2])
    first, second, third, fourth = acceptance.rates()
    assert first > 0.95 and second < 0.1
    assert third == fourth == second
    for _ in range(100):
        acceptance.decay(0.1)
    assert acceptance.rates() == pytest.approx([0.7] * 4, abs=0.01)


def test_requests_of_different_widths() -> None:
    depth = AdaptiveDepth(AdaptiveSettings(), 3, times(0.0))
    depth.observe([1, 3, 2], [1, 1, 2])
    assert depth._acceptance.counts() == [(1.0, 2.0), (0.0, 0.0)]
    depth.observe([1, 1], [1, 1])
    assert depth._acceptance.counts() == [(1.0, 2.0), (0.0, 0.0)]


EASY, HARD = 0.95, 0.1
"""Rates of steps whose draft tokens are nearly always, and hardly ever right."""


def said_and_drawn(depth: AdaptiveDepth, said: dict[float, float] | None, steps: int) -> tuple[float, set[int]]:
    """Runs of easy and hard steps in turn, of which the drafter says what `said` has; None: nothing. Returns tokens a
    millisecond, and the widths."""
    rng, step_ms, tokens, ms = random.Random(5), times(1.0), 0, 0.0
    widths = set()
    for step in range(steps):
        rate = EASY if step // 8 % 2 else HARD
        if said is not None:
            depth.expect([[said[rate]] * 7] * 2)
        width = depth.next_width(2)
        counts = [drawn(rng, width, rate) for _ in range(2)]
        depth.observe([width] * 2, counts)
        tokens, ms = tokens + sum(counts), ms + step_ms[2, width]
        widths.add(width)
    return tokens / ms, widths


def test_a_drafter_that_knows_its_draft_tokens_cuts_steps_short() -> None:
    plain, _ = said_and_drawn(AdaptiveDepth(AdaptiveSettings(), 8, times(1.0)), None, 1600)
    said, widths = said_and_drawn(AdaptiveDepth(AdaptiveSettings(), 8, times(1.0)), {EASY: 0.9, HARD: 0.2}, 1600)
    assert said > 1.1 * plain and max(widths) == 8 and min(widths) <= 2


def test_cuts_by_the_confidence_of_a_drafter_are_counted() -> None:
    """Of 1,600 steps half are hard: nearly all of these are cut, and none where the drafter says nothing."""
    depth = AdaptiveDepth(AdaptiveSettings(), 8, times(1.0))
    said_and_drawn(depth, None, 100)
    assert depth.confidence_cuts == 0
    said_and_drawn(depth, {EASY: 0.9, HARD: 0.2}, 1600)
    assert 600 < depth.confidence_cuts <= 800


def test_a_drafter_that_always_says_the_same_changes_nothing() -> None:
    for value in (0.01, 0.5, 1.0):
        depth = AdaptiveDepth(AdaptiveSettings(update_interval=1), 8, times(1.0))
        plain = AdaptiveDepth(AdaptiveSettings(update_interval=1), 8, times(1.0))
        rng = random.Random(2)
        for _ in range(300):
            depth.expect([[value] * 7] * 4)
            width = depth.next_width(4)
            assert width == plain.next_width(4) and not depth.confidence_cuts
            counts = [drawn(rng, width, 0.6) for _ in range(4)]
            for each in (depth, plain):
                each.observe([width] * 4, counts)


def test_nothing_said_of_no_request() -> None:
    depth = AdaptiveDepth(AdaptiveSettings(), 4, times(1.0, most=4))
    depth.expect([])
    assert depth.next_width(1) in depth.widths


def test_many_requests_bring_no_more_rows_than_planned() -> None:
    """Also where draft tokens cost no time, and beyond the numbers of requests that were measured."""
    allowed = StepWidths((1, 2, 4, 8), True).limited(600, (1, 2, 4, 8, 16, 32, 64))
    step_ms = {(load, width): ms for (load, width), ms in times(0.0).items() if width in allowed.of(load)}
    for depth in (AdaptiveDepth(AdaptiveSettings(), 8, step_ms, allowed), FixedDepth(allowed)):
        for load, width in ((1, 8), (64, 8), (80, 4), (200, 2), (500, 1), (80, 4), (3, 8), (600, 1)):
            if isinstance(depth, FixedDepth):
                assert depth.next_width(load) == width
                continue
            widths = run(depth, load, 0.97, 100)
            assert max(widths) == width and load * width <= 600


def test_widths_without_times_are_limited_too() -> None:
    allowed = StepWidths((1, 2, 4)).limited(600, ())
    depth = AdaptiveDepth(AdaptiveSettings(), 4, {}, allowed)
    assert [depth.next_width(load) for load in (1, 150, 151, 301, 600)] == [4, 4, 2, 1, 1]


def test_a_row_of_nan_is_no_confidence() -> None:
    """It belongs to a request that ends with an error; others go on."""
    said = Confidences(2)
    said.observe([[0.5, 0.5]])
    said.observe([[math.nan, 0.5], [0.5, 0.5]])
    said.observe([[math.nan, math.nan]])
    said.observe([[1.0, 1.0]])
    assert all(factor > 1 for factor in said.factors())
