"""Chooses how many draft tokens a step verifies: the number that gives most tokens per second, which may be none.

A step of R requests with w tokens each takes `step_ms[R, w]`, measured on this server. The draft token at place i is
accepted with probability a_i if those before it are, estimated from past steps. So the step is expected to give

    R (1 + a_1 + a_1 a_2 + ... + a_1 ... a_(w-1)) tokens in step_ms[R, w].

A drafter may give the confidence of its latest draft tokens. Then a_1 ... a_i of the next step is the estimate times
their confidence divided by its average, so that a drafter that is always too sure changes nothing.

This is plain arithmetic on the host: ranks with the same times and results make the same decisions.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, zip_longest
from operator import mul
from typing import TYPE_CHECKING

from sglang.srt.configs.speculative import AdaptiveSettings
from sglang.srt.plan.step_widths import StepWidths

if TYPE_CHECKING:
    from sglang.srt.plan.expert_slot_plan import ExpertSlotPlan

StepTimes = Mapping[tuple[int, int], float]
"""Measured times: (requests, tokens per request) -> milliseconds."""


def with_expert_copies(step_ms: StepTimes, slots: ExpertSlotPlan | None) -> StepTimes:
    """Returns the times with those of the copies of experts that lie in main memory: where times are measured the same
    experts are chosen again and again, and none is copied."""
    if slots is None:
        return step_ms
    return {
        (requests, width): ms + 1e3 * slots.copy_seconds(requests * width) for (requests, width), ms in step_ms.items()
    }


FIRST_RATE = 0.7
"""Assumed acceptance rate of the first draft token before any was verified."""
PRIOR_WEIGHT = 4.0
"""Number of verified draft tokens that the prior of a place weighs; the prior is the rate of the place before it."""
PROBE_STEPS = 4
CONFIDENCE_SHARE = 0.02
"""Weight of the latest step in the moving average of a drafter's confidence."""


class Confidences:
    """A drafter's confidence: of the latest step, and its moving average."""

    def __init__(self, num_places: int) -> None:
        self._usual = [0.0] * num_places
        self._latest = [0.0] * num_places
        self._steps = 0

    def observe(self, likely: Sequence[Sequence[float]]) -> None:
        """Records for each request the probability that each draft token is accepted if those before it are.

        >>> said = Confidences(2)
        >>> said.observe([[0.5, 0.5], [1.0, 1.0]])
        >>> said.factors()
        [1.0, 1.0]
        >>> said.observe([[1.0, 1.0]])
        >>> [round(factor, 2) for factor in said.factors()]
        [1.14, 1.23]
        """
        reached = [list(accumulate(row, mul)) for row in likely if all(map(math.isfinite, row))]
        if not reached:
            return
        self._latest = [sum(column) / len(reached) for column in zip(*reached, strict=True)]
        self._steps += 1
        share = max(CONFIDENCE_SHARE, 1 / self._steps)
        self._usual = [(1 - share) * usual + share * now for usual, now in zip(self._usual, self._latest, strict=True)]

    def factors(self) -> list[float]:
        """Returns for each place the confidence that all draft tokens up to it are accepted, relative to its
        average."""
        pairs = zip(self._latest, self._usual, strict=True)
        return [now / usual if usual > 0 else 1.0 for now, usual in pairs]


class AcceptanceRates:
    """Estimates a_1, a_2, ...: for each place how often its draft token was accepted when those before it were."""

    def __init__(self, num_places: int) -> None:
        self._tested = [0.0] * num_places
        self._right = [0.0] * num_places

    def observe(self, widths: Sequence[int], counts: Sequence[int]) -> None:
        """Counts the results of requests that brought `widths` tokens, of which `counts` were accepted, the last
        sampled token included.

        >>> rates = AcceptanceRates(3)
        >>> rates.observe([4], [2])  # the first draft token was right, the second was not, the third is unknown
        >>> rates.counts()
        [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)]
        """
        for (width, count), num_requests in Counter(zip(widths, counts, strict=True)).items():
            for place in range(min(count, width - 1)):
                self._tested[place] += num_requests
                self._right[place] += num_requests * (place < count - 1)

    def counts(self) -> list[tuple[float, float]]:
        """Returns (accepted, tested) for each place."""
        return list(zip(self._right, self._tested, strict=True))

    def decay(self, alpha: float) -> None:
        """Reduces the weight of all counts so far by the share `alpha`."""
        self._tested = [(1 - alpha) * count for count in self._tested]
        self._right = [(1 - alpha) * count for count in self._right]

    def rates(self) -> list[float]:
        """Returns a_1, a_2, ...; a place with few observations is drawn to the rate of the place before it."""
        rates, expected = [], FIRST_RATE
        for right, tested in self.counts():
            expected = (right + PRIOR_WEIGHT * expected) / (tested + PRIOR_WEIGHT)
            rates.append(expected)
        return rates

    def expected_tokens(self, widths: Sequence[int], factors: Sequence[float]) -> dict[int, float]:
        """Returns the expected tokens per request and step, for each width. factors: relative confidence that all draft
        tokens up to a place are accepted, 1 if unknown."""
        reached, likely, total, by_width = 1.0, 1.0, 1.0, [1.0]
        for rate, factor in zip_longest(self.rates(), factors, fillvalue=1.0):
            reached *= rate
            likely = min(likely, reached * factor)  # no later draft token is likelier than one before it
            total += likely
            by_width.append(total)
        return {width: by_width[width - 1] for width in widths}


class FixedDepth:
    """Gives each step its most draft tokens: as many as asked for, fewer with many requests."""

    confidence_cuts = 0

    def __init__(self, widths: StepWidths) -> None:
        self.next_width = widths.widest

    def observe(self, widths: Sequence[int], counts: Sequence[int]) -> None:
        pass

    def expect(self, likely: Sequence[Sequence[float]]) -> None:
        pass


class AdaptiveDepth:
    """Chooses the width of each step: tokens per request, the last sampled one included; 1: no draft tokens."""

    def __init__(
        self,
        settings: AdaptiveSettings,
        num_draft_tokens: int,
        step_ms: StepTimes,
        allowed: StepWidths | None = None,
    ) -> None:
        """step_ms: times for several numbers of requests, equal on every rank; empty if nothing was measured, and then
        every step brings `num_draft_tokens`. allowed: limits these widths for many requests; None: nothing does."""
        self._allowed = allowed or StepWidths((num_draft_tokens,))
        steps = settings.candidate_steps or tuple(range(1, num_draft_tokens))
        asked = (1, *(step + 1 for step in steps if step < num_draft_tokens))
        measured = {width for _, width in step_ms}
        self.widths = tuple(sorted(width for width in asked if width in measured)) or (num_draft_tokens,)
        self._settings = settings
        self._times = {
            width: sorted((requests, ms) for (requests, at), ms in step_ms.items() if at == width)
            for width in self.widths
        }
        self._acceptance = AcceptanceRates(num_draft_tokens - 1)
        self._confidences = Confidences(num_draft_tokens - 1)
        self._factors: list[float] = []
        """What the drafter said of its last draft tokens; empty: nothing, since the last choice."""
        self.confidence_cuts = 0
        """Number of choices of fewer draft tokens than without what the drafter said."""
        self._width = 0
        """Last choice; 0: there is none."""
        self._load = 0
        self._steps = 0
        """Number of steps since the last choice."""
        self._verified = 0
        """Number of steps of this interval that brought draft tokens."""
        self._without = 0
        """Number of steps since there were draft tokens."""
        self._probe = 0
        """Number of steps of a probe that are left."""

    @property
    def rates(self) -> list[float]:
        """Returns the estimated acceptance rate of each place, given that all before it were accepted."""
        return self._acceptance.rates()

    def observe(self, widths: Sequence[int], counts: Sequence[int]) -> None:
        """Counts a step's result: for each request the tokens it brought (`widths`) and those accepted (`counts`)."""
        if max(widths, default=1) == 1:
            return
        self._acceptance.observe(widths, counts)
        self._verified += 1
        if self._verified == self._settings.update_interval:
            self._acceptance.decay(self._settings.ema_alpha)
            self._verified = 0

    def expect(self, likely: Sequence[Sequence[float]]) -> None:
        """Records the confidence of the draft tokens made after a step, which the next choice uses."""
        self._confidences.observe(likely)
        self._factors = self._confidences.factors()

    def next_width(self, num_requests: int) -> int:
        """Returns the width of the step that is launched now with `num_requests` requests."""
        widths = self._widths_of(num_requests)
        if len(widths) == 1:
            self._factors = []
            return widths[0]
        self._steps += 1
        load = self._measured_load(num_requests)
        due = self._steps >= self._settings.update_interval or bool(self._factors)
        if self._width not in widths or load != self._load or due:
            chosen = self._choice(num_requests, self._factors)
            self.confidence_cuts += bool(self._factors) and chosen < self._choice(num_requests)
            self._width, self._load, self._steps = chosen, load, 0
        self._factors = []
        return self._probed(num_requests)

    def _widths_of(self, num_requests: int) -> tuple[int, ...]:
        """Returns the widths among which a step of `num_requests` requests has the choice."""
        widest = self._allowed.widest(num_requests)
        return tuple(width for width in self.widths if width <= widest) or (widest,)

    def _probed(self, num_requests: int) -> int:
        """Returns the chosen width; if that is 1, now and then a wider one as a probe, because acceptance changes with
        the text."""
        if self._width > 1:
            self._without = self._probe = 0
            return self._width
        self._without += 1
        if self._without >= self._settings.probe_interval:
            self._without, self._probe = 0, PROBE_STEPS
        if not self._probe:
            return 1
        self._probe -= 1
        speeds = self._speeds(num_requests)
        return max((width for width in speeds if width > 1), key=lambda width: (speeds[width], -width))

    def _choice(self, num_requests: int, factors: Sequence[float] = ()) -> int:
        """Returns the fastest width; keeps the current one unless another is faster by a margin. factors: as in
        `AcceptanceRates.expected_tokens`."""
        speeds = self._speeds(num_requests, factors)
        best = max(speeds, key=lambda width: (speeds[width], -width))
        if self._width in speeds and speeds[best] <= speeds[self._width] * (1 + self._settings.hysteresis):
            return self._width
        return best

    def _speeds(self, num_requests: int, factors: Sequence[float] = ()) -> dict[int, float]:
        """Returns the expected tokens per request and millisecond, for each width that is allowed."""
        widths = self._widths_of(num_requests)
        expected = self._acceptance.expected_tokens(widths, factors)
        return {width: expected[width] / self._step_ms(num_requests, width) for width in widths}

    def _step_ms(self, num_requests: int, width: int) -> float:
        """Returns the time of the next larger measured number of requests, to which a step is padded. Beyond the
        largest, times grow in proportion to the requests."""
        times = self._times[width]
        index = bisect_left(times, (num_requests, 0.0))
        if index < len(times):
            return times[index][1]
        requests, ms = times[-1]
        return ms * num_requests / requests

    def _measured_load(self, num_requests: int) -> int:
        """Returns an index of the load; loads with the same index have the same times, up to a factor common to all
        widths."""
        times = self._times[self.widths[0]]  # which has the most numbers of requests
        return bisect_left(times, (num_requests, 0.0))


Depth = AdaptiveDepth | FixedDepth
"""Chooses the widths of all steps of a server with drafts."""
