"""Tokens in the stages before a pipeline's last one, which samples them.

The stages compute steps one behind the other: while the last one is at step n, the first one of S is at step n + S - 1.
So a stage takes the tokens of a step when it must, and not before: when one of the step's requests comes again, or at
S steps behind it. All these stages take them at the same points between their steps, so nobody waits in a circle.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.distributed.parallel_state import Group
from sglang.srt.model_executor.step import StepResult
from sglang.srt.utils.device_arrays import event_on, to_device, to_host


@dataclass(slots=True)
class LateResult(StepResult):
    """A step's tokens, of which nothing is there before `wait`."""

    tokens: LateTokens | None = None

    def wait(self) -> None:
        assert self.tokens is not None
        self.tokens.take_until(self)
        StepResult.wait(self)


class LateTokens:
    """`pp_tokens`: the ranks that the last stage's tokens go to; next_tokens [max_reqs + 1, k] int64 of this stage."""

    def __init__(self, pp_tokens: Group, next_tokens: torch.Tensor) -> None:
        self.pp_tokens, self.next_tokens = pp_tokens, next_tokens
        self._expected: deque[tuple[np.ndarray, LateResult]] = deque()
        """Request slots [R] of the sampled rows of each step, the oldest first."""

    def expect(self, slots: np.ndarray) -> LateResult:
        """The result of a step that is launched here, whose tokens for the request slots [R] come later."""
        result = LateResult(torch.empty((len(slots), 1), dtype=torch.int64), None, tokens=self)
        self._expected.append((slots, result))
        return result

    def take_before(self, slots: np.ndarray) -> None:
        """Before a step in which the request slots [B] bring what was sampled last."""
        needed = [i for i, (late, _) in enumerate(self._expected) if np.isin(late, slots).any()]
        count = max([len(self._expected) - self.pp_tokens.size + 1, *(i + 1 for i in needed)])
        for _ in range(count):
            self._take()

    def take_until(self, result: LateResult) -> None:
        while any(late is result for _, late in self._expected):
            self._take()

    @torch.inference_mode()
    def _take(self) -> None:
        slots, result = self._expected.popleft()
        if len(slots):
            tokens = torch.empty(len(slots), dtype=torch.int64, device=self.next_tokens.device)
            self.pp_tokens.from_last(tokens)
            self.next_tokens[to_device(slots, tokens.device), 0] = tokens.clamp(min=0)
            result.next_token_ids = to_host(tokens[:, None])
        result.ready = event_on(self.next_tokens.device)
