"""Statistics of draft tokens over all requests: since the start, and in the log's last interval."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang.srt.configs.speculative import NGRAM

logger = logging.getLogger(__name__)

WATCHED_STEPS = 1000
LOW_LENGTH = 1.2
"""Accept length below which drafting costs more than it saves."""
NGRAM_CAUSES = (
    "outputs repeat little of what stands before them. NGRAM pays where they do, as when an agent edits files;"
    " otherwise take NEXTN or EAGLE3 where there are such drafts, or remove --speculative-algorithm"
)
MODEL_CAUSES = (
    "the usual causes are a draft that was trained for another model, a draft in fewer bits than it was trained for"
    " (--speculative-draft-model-quantization unquant), another chat template than that of its training, or prompts"
    " beyond the context that it was trained on; without a remedy, remove --speculative-algorithm"
)


@dataclass(slots=True)
class DraftTotals:
    """Totals over requests in steps that verified draft tokens of them."""

    requests: int = 0
    proposed: int = 0
    correct: int = 0

    @property
    def accept_length(self) -> float:
        """Returns the tokens per request and step, including the one after the accepted draft tokens; 0: nothing was
        verified."""
        return 1 + self.correct / self.requests if self.requests else 0.0

    @property
    def accept_rate(self) -> float:
        """Returns the share of draft tokens that were accepted."""
        return self.correct / self.proposed if self.proposed else 0.0

    def add(self, requests: int, proposed: int, correct: int) -> None:
        self.requests += requests
        self.proposed += proposed
        self.correct += correct


class DraftStats:
    """Counts the results of verify steps, and warns if few draft tokens are accepted for long."""

    def __init__(self, algorithm: str | None) -> None:
        """algorithm: --speculative-algorithm; None: no drafting."""
        self.algorithm = algorithm
        self.since_start = DraftTotals()
        self.last_interval = DraftTotals()
        self.num_steps = 0
        """Steps that verified draft tokens, since the start."""
        self.confidence_cuts = 0
        """Steps for which a confidence head chose fewer draft tokens, since the start."""
        self.width = 0
        """Tokens of each request in the last step, the last sampled one included."""
        self._interval = DraftTotals()
        self._watched = DraftTotals()
        self._watched_steps = 0

    def verified(self, widths: npt.ArrayLike, counts: npt.ArrayLike) -> None:
        """Counts a step: for each request, the tokens that the step brought (`widths`) and the sampled tokens that were
        accepted."""
        brought, accepted = np.asarray(widths), np.asarray(counts)
        self.width = int(brought.max(initial=1))
        if self.width == 1:
            return
        drafted = brought > 1
        num_drafted = int(drafted.sum())
        proposed, correct = int(brought[drafted].sum()) - num_drafted, int(accepted[drafted].sum()) - num_drafted
        self.num_steps += 1
        for totals in (self.since_start, self._interval, self._watched):
            totals.add(num_drafted, proposed, correct)
        self._watched_steps += 1
        if self._watched_steps == WATCHED_STEPS:
            self._warn_if_useless()

    def close_interval(self) -> None:
        """Ends the interval: its totals become `last_interval`, and a new one begins."""
        self.last_interval, self._interval = self._interval, DraftTotals()

    @property
    def recent(self) -> DraftTotals:
        """Returns the totals of the last interval with draft tokens, or of the current one."""
        return self.last_interval if self.last_interval.requests else self._interval

    @property
    def log_text(self) -> str:
        """Returns a part of the decode log line; empty without drafting."""
        if self.algorithm is None:
            return ""
        recent = self._interval
        return f"accept len: {recent.accept_length:.2f}, accept rate: {recent.accept_rate:.2f}, "

    def _warn_if_useless(self) -> None:
        watched, self._watched, self._watched_steps = self._watched, DraftTotals(), 0
        if watched.accept_length >= LOW_LENGTH:
            return
        causes = NGRAM_CAUSES if self.algorithm == NGRAM else MODEL_CAUSES
        logger.warning(
            "Drafts are nearly never right: %.2f tokens a request and step over %d steps, %.0f%% of the draft tokens. "
            "Answers are right all the same, but slower than without drafts: %s.",
            watched.accept_length, WATCHED_STEPS, 100 * watched.accept_rate, causes,
        )  # fmt: skip
