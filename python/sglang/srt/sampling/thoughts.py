"""A limit on the thoughts of a reasoning model: when they reach it, only the token that ends them is allowed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang.srt.sampling.thinking_budget import ThinkingBudget


class Thoughts:
    """Where one output stands. Tokens alone decide, so that all ranks decide alike."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._num_tokens = 0
        self._begun = budget.inside
        self.over = False

    def push(self, token: int) -> None:
        if self.over:
            return
        if token == self._budget.end:
            self.over = True
        elif self._begun:
            self._num_tokens += 1
        else:
            self._begun = token == self._budget.begin

    def may_end_within(self, num_tokens: int) -> bool:
        """Whether the token after `num_tokens` unknown ones may have to be the end."""
        return not self.over and self._num_tokens + num_tokens >= self._budget.tokens

    def restrict(self, row: npt.NDArray[np.int32]) -> None:
        """row [ceil(vocab / 32)]: bit v % 32 of word v // 32 allows token v. Leaves the end only, once the budget is
        used up; but what a grammar forbids stays forbidden."""
        if self.over or not self._begun or self._num_tokens < self._budget.tokens:
            return
        word, bit = divmod(self._budget.end, 32)
        mask = np.array(1 << bit, np.uint32).view(np.int32)
        if row[word] & mask:
            row[:] = 0
            row[word] = mask
