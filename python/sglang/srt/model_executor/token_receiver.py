"""Receives sampled tokens in the pipeline stages before the last, which samples them.

Stages run steps one behind the other: with S stages, while the last is at step n, the first is at step n + S - 1. So a
stage receives the tokens of a step as late as possible: when one of its requests runs again, or S steps later. All
these stages receive at the same points between steps, so that no cycle of waits can form. With several attention groups
the tokens of all groups travel together, so when one group needs a step's tokens all groups receive them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.distributed.groups import Groups
from sglang.srt.layers.step_rows import StateRecord
from sglang.srt.model_executor.device_state import DeviceState
from sglang.srt.model_executor.group_output import AllGroupsTokens
from sglang.srt.model_executor.step import GroupSteps, LaunchedForward, StepInput, StepResult
from sglang.srt.utils.device_arrays import event_on, to_device, to_host


@dataclass(slots=True)
class LateResult(StepResult):
    """The result of a step whose tokens arrive only in `wait`."""

    receiver: TokenReceiver | None = None

    def wait(self) -> None:
        """Receives the tokens up to this step's and blocks until they are in host memory."""
        assert self.receiver is not None
        self.receiver.take_until(self)
        StepResult.wait(self)


@dataclass(frozen=True, slots=True)
class _Expected:
    step: StepInput
    all_groups: GroupSteps
    state_records: Sequence[StateRecord]
    results: list[LateResult]
    """Results of all groups."""

    def continues_into(self, later: GroupSteps) -> bool:
        """Returns whether a later step continues from tokens of this one."""
        steps = zip(self.all_groups.steps, self.all_groups.num_requests, later.steps, strict=True)
        return any(count and bool(np.isin(step.sampled_slots, other.slots).any()) for step, count, other in steps)


class TokenReceiver:
    """Receives the last stage's tokens for each of the R sampled requests of each of A groups, where R is the largest
    group's. Without draft tokens they are [A, R, 1] int64; with them [A, R, width + 1 + k - 1] int32: the sampled
    tokens, the accepted count, and the new draft tokens."""

    def __init__(self, groups: Groups, state: DeviceState) -> None:
        self.groups, self.state = groups, state
        self._expected: deque[_Expected] = deque()
        """The oldest first."""

    @torch.inference_mode()
    def expect(self, forward: LaunchedForward) -> list[LateResult]:
        """Registers a launched step and returns the (still empty) results of all groups."""
        step, all_groups = forward.step, _all_groups(forward.step)
        # Further steps are computed before this one's tokens come, in the same memory where they are graphs.
        records = [record.copy() for record in forward.output.batch.state_records or ()]
        results = [
            LateResult(torch.empty((count, of_group.width), dtype=torch.int64), None, receiver=self)
            for of_group, count in zip(all_groups.steps, all_groups.num_requests, strict=True)
        ]
        self._expected.append(_Expected(step, all_groups, records, results))
        return results

    def take_before(self, step: StepInput) -> None:
        """Receives the tokens that `step` continues from, before it is launched, and those that are S steps old."""
        later = _all_groups(step)
        needed = [i for i, late in enumerate(self._expected) if late.continues_into(later)]
        count = max([len(self._expected) - self.groups.pp_tokens.size + 1, *(i + 1 for i in needed)])
        for _ in range(count):
            self._take()

    def take_until(self, result: LateResult) -> None:
        """Receives tokens, the oldest step's first, until `result` has its own."""
        while any(result is expected for late in self._expected for expected in late.results):
            self._take()

    @torch.inference_mode()
    def _take(self) -> None:
        late = self._expected.popleft()
        counts, state = late.all_groups.num_requests, self.state
        if any(counts):
            num_speculative_tokens = state.tokens_per_step - 1
            columns = [late.all_groups.width, 1, num_speculative_tokens] if state.has_drafts else [1]
            dtype = torch.int32 if state.has_drafts else torch.int64
            rows = torch.empty((len(counts), max(counts), sum(columns)), dtype=dtype, device=state.device)
            self.groups.pp_tokens.from_last(rows)
            if count := counts[self.groups.dp.rank]:
                (self._take_draft_tokens if state.has_drafts else self._take_tokens)(
                    late, rows[self.groups.dp.rank, :count].split(columns, dim=1)
                )
            all_groups = AllGroupsTokens(*to_host(rows).split(columns, dim=2))
            for group, (step, result) in enumerate(zip(late.all_groups.steps, late.results, strict=True)):
                all_groups.file(result, group, step, num_speculative_tokens)
        for result in late.results:
            result.ready = event_on(state.device)

    def _take_tokens(self, late: _Expected, received: Sequence[torch.Tensor]) -> None:
        slots = to_device(late.step.sampled_slots, self.state.device)
        self.state.next_tokens[slots, 0] = received[0][:, 0].clamp(min=0)

    def _take_draft_tokens(self, late: _Expected, received: Sequence[torch.Tensor]) -> None:
        state = self.state
        tokens, counts, draft_tokens = received
        slots = to_device(late.step.sampled_slots, state.device)
        last = tokens.gather(1, counts.long() - 1).clamp(min=0)
        state.next_tokens[slots] = torch.cat((last, draft_tokens), dim=1).long()
        if late.step.prompts is None:
            state.lens[slots] += counts[:, 0]
        for record in late.state_records:
            record.commit(counts[:, 0])


def _all_groups(step: StepInput) -> GroupSteps:
    return GroupSteps.of([step]) if step.groups is None else step.groups
