"""Tokens in the stages before a pipeline's last one, which samples them.

The stages compute steps one behind the other: while the last one is at step n, the first one of S is at step n + S - 1.
So a stage takes the tokens of a step when it must, and not before: when one of the step's requests comes again, or at
S steps behind it. All these stages take them at the same points between their steps, so nobody waits in a circle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.distributed.parallel_state import Group
from sglang.srt.layers.step_rows import StateRecord
from sglang.srt.model_executor.device_state import DeviceState
from sglang.srt.model_executor.step import LaunchedForward, StepInput, StepResult
from sglang.srt.utils.device_arrays import event_on, to_device, to_host


@dataclass(slots=True)
class LateResult(StepResult):
    """A step's tokens, of which nothing is there before `wait`."""

    receiver: TokenReceiver | None = None

    def wait(self) -> None:
        assert self.receiver is not None
        self.receiver.take_until(self)
        StepResult.wait(self)


@dataclass(frozen=True, slots=True)
class _Expected:
    step: StepInput
    state_records: Sequence[StateRecord]
    result: LateResult


class TokenReceiver:
    """Receives for each of R sampled requests the sampled token, or with guesses the `width` sampled tokens of a step,
    the k - 1 guesses behind it, and how many of the sampled tokens stand."""

    def __init__(self, pp_tokens: Group, state: DeviceState) -> None:
        """pp_tokens: the ranks that the last stage's tokens go to."""
        self.pp_tokens, self.state = pp_tokens, state
        self._expected: deque[_Expected] = deque()
        """The oldest first."""

    @torch.inference_mode()
    def expect(self, forward: LaunchedForward) -> LateResult:
        """The result of a step that is launched here."""
        step = forward.step
        empty = torch.empty((len(step.sampled_slots), step.width), dtype=torch.int64)
        # Further steps are computed before this one's tokens come, in the same memory where they are graphs.
        records = [record.copy() for record in forward.output.batch.state_records or ()]
        result = LateResult(empty, None, receiver=self)
        self._expected.append(_Expected(step, records, result))
        return result

    def take_before(self, slots: np.ndarray) -> None:
        """Takes over received tokens before a step in which the request slots [B] bring what was sampled last."""
        needed = [i for i, late in enumerate(self._expected) if np.isin(late.step.sampled_slots, slots).any()]
        count = max([len(self._expected) - self.pp_tokens.size + 1, *(i + 1 for i in needed)])
        for _ in range(count):
            self._take()

    def take_until(self, result: LateResult) -> None:
        while any(late.result is result for late in self._expected):
            self._take()

    @torch.inference_mode()
    def _take(self) -> None:
        late = self._expected.popleft()
        slots = late.step.sampled_slots
        if len(slots):
            (self._take_guesses if self.state.guesses else self._take_tokens)(late, slots)
        late.result.ready = event_on(self.state.device)

    def _take_tokens(self, late: _Expected, slots: np.ndarray) -> None:
        tokens = torch.empty(len(slots), dtype=torch.int64, device=self.state.device)
        self.pp_tokens.from_last(tokens)
        self.state.next_tokens[to_device(slots, tokens.device), 0] = tokens.clamp(min=0)
        late.result.next_token_ids = to_host(tokens[:, None])

    def _take_guesses(self, late: _Expected, slots: np.ndarray) -> None:
        state, step = self.state, late.step
        columns = [step.width, state.tokens_per_step - 1, 1]
        received = torch.empty((len(slots), sum(columns)), dtype=torch.int64, device=state.device)
        self.pp_tokens.from_last(received)
        tokens, guesses, counts = received.split(columns, dim=1)
        sent = to_device(slots, received.device)
        state.next_tokens[sent] = torch.cat((tokens.gather(1, counts - 1).clamp(min=0), guesses), dim=1)
        if step.prompts is None:
            state.lens[sent] += counts[:, 0].to(torch.int32)
            late.result.counts = to_host(counts[:, 0].to(torch.int32))
        for record in late.state_records:
            record.commit(counts[:, 0].to(torch.int32))
        late.result.next_token_ids = to_host(tokens.contiguous())
        if step.reads_guesses:
            late.result.guesses = to_host(guesses.contiguous())
