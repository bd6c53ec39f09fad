"""Limit on the thinking tokens of a reasoning model: when it is reached, only the mark that ends them is allowed."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from sglang.srt.sampling.thinking_budget import ThinkingBudget


class Thoughts:
    """Tracks whether one output is within its thoughts, and how long they are. It depends on tokens alone, so all ranks
    agree."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._num_tokens = 0
        self._begun = budget.inside
        self._last: deque[int] = deque(maxlen=max(len(budget.begin), len(budget.end)))
        self.over = False

    def __copy__(self) -> Thoughts:
        """Returns a copy that goes on independently."""
        other = Thoughts(self._budget)
        other._num_tokens, other._begun, other.over = self._num_tokens, self._begun, self.over
        other._last.extend(self._last)
        return other

    def push(self, token: int) -> None:
        """Takes the next token of the output."""
        if self.over:
            return
        self._last.append(token)
        if not self._begun:
            self._begun = self._spelled(self._budget.begin) == len(self._budget.begin)
            if self._begun:
                self._last.clear()
        elif self._ends_with(token):
            self.over = True
        else:
            self._num_tokens += 1

    def may_end_within(self, num_tokens: int) -> bool:
        """Returns whether the token after `num_tokens` unknown ones may have to be part of the end mark."""
        return not self.over and self._num_tokens + num_tokens >= self._budget.tokens

    def restrict(self, row: npt.NDArray[np.int32]) -> None:
        """Restricts row [ceil(vocab / 32)], in which bit v % 32 of word v // 32 allows token v. Once the budget is used
        up, only the next token of the end mark stays allowed; if the grammar forbids that token, the row is
        unchanged."""
        if self.over or not self._begun or self._num_tokens < self._budget.tokens:
            return
        word, bit = divmod(self._budget.end[self._spelled(self._budget.end)], 32)
        mask = np.array(1 << bit, np.uint32).view(np.int32)
        if row[word] & mask:
            row[:] = 0
            row[word] = mask

    def _spelled(self, mark: list[int]) -> int:
        """Returns the number of leading tokens of `mark` that the output ends with."""
        last = list(self._last)
        return next(n for n in range(min(len(mark), len(last)), -1, -1) if last[len(last) - n :] == mark[:n])

    def _ends_with(self, token: int) -> bool:
        """Returns whether the thoughts end with `token`. The last token of a mark of three or more may differ from the
        mark's, as it may include the following line break."""
        end = self._budget.end
        if len(end) < 3:
            return self._spelled(end) == len(end)
        return list(self._last)[-len(end) : -1] == end[:-1]
