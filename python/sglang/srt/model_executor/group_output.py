"""Sampling of a step of several attention groups with requests of their own: every rank samples rows of its group and
receives the tokens of all groups, because it runs all groups' schedulers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from sglang.srt.distributed.groups import Groups
from sglang.srt.layers.sampler import Sampler, SamplerOutput
from sglang.srt.model_executor.device_state import DeviceState
from sglang.srt.model_executor.step import AcceptResult, GroupSteps, LaunchedForward, StepInput, StepResult
from sglang.srt.sampling.logprobs import LogprobRequest, LogprobResult, prompt_logprobs
from sglang.srt.sampling.sampling_table import SamplingTable
from sglang.srt.utils.device_arrays import event_on, to_device, to_host

Gather = Callable[[torch.Tensor], torch.Tensor]
"""Collective: gathers [n, ...] of the rows that this rank samples into [A, rows of a group, ...] on all ranks."""


@dataclass(frozen=True, slots=True)
class OwnRows:
    """The rows of its group that a rank samples: their slice, their complete logits [n, V], and the collective that
    gathers what the ranks computed from them."""

    rows: slice
    logits: torch.Tensor
    gather: Gather


@dataclass(frozen=True, slots=True)
class AllGroupsTokens:
    """The sampled tokens of all groups, in host memory once the step is over: `tokens` [A, R, k], `counts` [A, R, 1]
    int32 and `draft_tokens` [A, R, k - 1] as in `StepResult`. If the drafter gives confidences, `draft_tokens` has k -
    1 more columns with these, fp32 stored as int32."""

    tokens: torch.Tensor
    counts: torch.Tensor | None = None
    draft_tokens: torch.Tensor | None = None

    def file(self, result: StepResult, group: int, step: StepInput, num_speculative_tokens: int) -> None:
        """Stores a group's part in its `result`, whose `next_token_ids` has the group's number of rows."""
        count = len(result.next_token_ids)
        result.next_token_ids = self.tokens[group, :count, : step.width]
        if self.counts is None or self.draft_tokens is None:
            return
        draft_tokens, sure = self.draft_tokens[group, :count].split(
            (num_speculative_tokens, self.draft_tokens.shape[2] - num_speculative_tokens), dim=1
        )
        result.counts = self.counts[group, :count, 0] if step.widths is not None else None
        result.draft_tokens = draft_tokens if step.reads_draft_tokens else None
        result.confidence = sure.view(torch.float32) if sure.shape[1] else None


class GroupOutput:
    """Samples the rows of a step and updates this group's table of next tokens. Its methods are collective."""

    def __init__(self, state: DeviceState, table: SamplingTable, sampler: Sampler, groups: Groups) -> None:
        self.state, self.table, self.sampler, self.groups = state, table, sampler, groups
        self.model = state.model

    def own_logits(self, logits: torch.Tensor, steps: GroupSteps) -> torch.Tensor:
        """Returns this group's rows [R, C] of a step's logits (`CausalLM.step_logits`)."""
        count = steps.num_sampled[self.groups.dp.rank]
        if self.model.vocab_is_in_group or self.model.head is None:
            return logits[:count]
        first = self.groups.dp.rank * (len(logits) // self.groups.dp.size)
        return logits[first : first + count]

    def sample(self, forward: LaunchedForward, vocab_mask: np.ndarray | None) -> list[StepResult]:
        """Samples a step and returns the results of all groups. vocab_mask: bitmask of this group's rows."""
        steps = forward.step.groups
        assert steps is not None
        tokens, packed = self._sampled(forward, steps, vocab_mask)
        self._send(tokens, steps)
        return self._results(forward, steps, AllGroupsTokens(to_host(tokens[..., None])), packed)

    def gather_verified(
        self, forward: LaunchedForward, out: SamplerOutput, accepted: AcceptResult | None, says_confidence: bool
    ) -> list[StepResult]:
        """Returns the results of all groups after verification, for which each group has sampled (`out`) and accepted
        its own rows; `accepted` is None for a group without work. says_confidence: the drafter gives confidences."""
        steps, group, dp = forward.step.groups, self.groups.dp.rank, self.groups.dp
        assert steps is not None
        count, maximum = steps.num_requests[group], max(*steps.num_requests, 1)
        tokens = out.next_token_ids.view(count, steps.steps[group].width)
        columns = [F.pad(tokens, (0, steps.width - tokens.shape[1])).int()]
        draft_tokens = self.state.tokens_per_step - 1
        if accepted is None:
            columns.append(tokens.new_zeros((0, 1 + draft_tokens * (1 + says_confidence)), dtype=torch.int32))
        else:
            columns += [accepted.counts[:, None], accepted.draft_tokens.int()]
            if says_confidence:
                sure = accepted.confidence
                sure = (
                    accepted.draft_tokens.new_zeros((count, draft_tokens), dtype=torch.float32)
                    if sure is None
                    else sure
                )
                columns.append(sure.float().view(torch.int32))
        gathered = dp.all_gather(_padded(torch.cat(columns, dim=1), maximum), dim=0).view(dp.size, maximum, -1)
        self._send(gathered, steps)
        rows = to_host(gathered)
        all_groups = AllGroupsTokens(*rows.split((steps.width, 1, rows.shape[2] - steps.width - 1), dim=2))
        packed = None
        if steps.logprobs is not None:
            each = max(*steps.num_sampled, 1)
            mine = out.logprobs
            if mine is None:
                mine = steps.logprobs.no_rows(self.model.description.vocab_size, tokens.device)
            packed = dp.all_gather(_padded(mine, each), dim=0).view(dp.size, each, -1)
        return self._results(forward, steps, all_groups, packed)

    def _send(self, all_groups: torch.Tensor, steps: GroupSteps) -> None:
        """Sends the sampled rows [A, R, ...] of all groups to earlier pipeline stages, if there are any."""
        maximum = max(steps.num_requests)
        if maximum and self.groups.pp_tokens.size > 1:
            self.groups.pp_tokens.from_last(all_groups[:, :maximum].contiguous())

    def own_request(self, step: StepInput) -> StepInput:
        """Returns the step with the log probabilities asked of any group, so that all groups' results have the same
        width."""
        steps = step.groups
        assert steps is not None
        asked, group = steps.logprobs, self.groups.dp.rank
        if asked is None:
            return step
        count, first = steps.num_requests[group], sum(steps.num_requests[:group])
        row_requests = first + np.repeat(np.arange(count, dtype=np.int64), step.width)
        return replace(step, logprobs=LogprobRequest(asked.top_nums, asked.token_ids, row_requests))

    def _results(
        self, forward: LaunchedForward, steps: GroupSteps, all_groups: AllGroupsTokens, packed: torch.Tensor | None
    ) -> list[StepResult]:
        """Returns the results of all groups. packed [A, rows, W]: log probabilities of the sampled rows, if any group
        asks."""
        prompts = [self._prompt_logprobs(forward, group, step) for group, step in enumerate(steps.steps)]
        hidden = [self._hidden(forward, group, step.hidden_rows) for group, step in enumerate(steps.steps)]
        asked = steps.logprobs
        packed = None if packed is None else to_host(packed)
        ready, results = event_on(self.state.device), []
        for group, (step, rows) in enumerate(zip(steps.steps, steps.num_sampled, strict=True)):
            logprobs = None
            if step.logprobs is not None:
                assert packed is not None and asked is not None
                logprobs = LogprobResult(packed[group, :rows], step.logprobs, asked.num_ids)
            tokens = all_groups.tokens[group, : steps.num_requests[group]]
            result = StepResult(tokens, ready, None, logprobs, prompts[group], hidden[group])
            all_groups.file(result, group, step, self.state.tokens_per_step - 1)
            results.append(result)
        return results

    def _sampled(
        self, forward: LaunchedForward, steps: GroupSteps, vocab_mask: np.ndarray | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the tokens [A, rows] of all groups, and their packed log probabilities [A, rows, W] if any group
        asks."""
        head, logits, group = self.model.head, forward.output.logits, self.groups.dp.rank
        assert head is not None, "the last stage has it"
        count = steps.num_sampled[group]
        if not self.model.vocab_is_in_group and head.is_shard(logits) and steps.only_largest:
            tokens = head.first_largest(logits).view(self.groups.dp.size, -1)
            self._enter(forward, tokens[group, :count])
            return tokens, None
        mine, sampling = self._own_rows(logits, steps), self.table.view(forward.host_slots, forward.slots)
        rows, asked = mine.rows, steps.logprobs
        first = sum(steps.num_sampled[:group])
        request = None if asked is None else asked.part(range(first + rows.start, first + rows.stop))
        tokens = forward.slots.new_empty(0)
        packed = None
        if rows.start < rows.stop:
            mask = None if vocab_mask is None else to_device(vocab_mask[rows], self.state.device)
            part, positions = sampling.part(rows), forward.positions[rows]
            out = self.sampler(mine.logits, part, positions, mask, request, counts=False)
            tokens, packed = out.next_token_ids, out.logprobs
        all_groups = mine.gather(tokens)
        sampling.count(all_groups[group, :count])
        self._enter(forward, all_groups[group, :count])
        if asked is None:
            return all_groups, None
        if packed is None:
            packed = asked.no_rows(self.model.description.vocab_size, tokens.device)
        return all_groups, mine.gather(packed)

    def _enter(self, forward: LaunchedForward, tokens: torch.Tensor) -> None:
        self.state.next_tokens[forward.slots, 0] = tokens.clamp(min=0)

    def _own_rows(self, logits: torch.Tensor, steps: GroupSteps) -> OwnRows:
        head, dp = self.model.head, self.groups.dp
        assert head is not None
        count, of_group = steps.num_sampled[dp.rank], self.model.vocab_is_in_group
        each = steps.padded_sampled(self.groups.attention.size) if of_group else len(logits) // dp.size

        def gather(x: torch.Tensor) -> torch.Tensor:
            return dp.all_gather(_padded(x, each), dim=0).view(dp.size, each, *x.shape[1:])

        if not head.is_shard(logits) or (of_group and not count):
            return OwnRows(slice(0, count), self.own_logits(logits, steps), gather)
        share = head.whole_share(logits[:count] if of_group else logits, 1)
        if of_group:
            return OwnRows(share.rows, share.logits, lambda x: gather(share.gather(x)))
        # The rows of a group are a multiple of its ranks, so that each gets rows of its own group.
        first = dp.rank * each
        begin, end = (min(row - first, count) for row in (share.rows.start, share.rows.stop))
        rows = slice(begin, end)
        return OwnRows(rows, share.logits[: end - begin], lambda x: share.gather(x).view(dp.size, each, *x.shape[1:]))

    def _prompt_logprobs(self, forward: LaunchedForward, group: int, step: StepInput) -> LogprobResult | None:
        """Returns the prompt log probabilities of a group, which every rank computes from hidden states that the group
        sends."""
        request = None if step.prompts is None else step.prompts.prompt_logprobs
        if request is None:
            return None
        assert request.rows is not None
        hidden = self._rows_of(forward, group, request.rows)
        moved = LogprobRequest(
            request.top_nums, request.token_ids, request.row_requests, np.arange(len(hidden)), request.targets
        )
        packed = prompt_logprobs(
            hidden, lambda chosen, rows: self.model.logits(chosen), moved, self.model.description.vocab_size
        )
        return LogprobResult(packed, request)

    def _hidden(self, forward: LaunchedForward, group: int, rows: np.ndarray | None) -> torch.Tensor | None:
        return None if rows is None else to_host(self._rows_of(forward, group, rows).float())

    def _rows_of(self, forward: LaunchedForward, group: int, rows: np.ndarray) -> torch.Tensor:
        """Returns the final hidden states [N, H] of the tokens `rows` of a group on all ranks."""
        if group == self.groups.dp.rank:
            hidden = forward.output.hidden
            assert hidden is not None, "the graph of this step does not keep them"
            chosen = hidden[to_device(rows, self.state.device)]
        else:
            size = (len(rows), self.model.description.hidden_size)
            chosen = torch.empty(size, dtype=self.model.dtype, device=self.state.device)
        return self.groups.dp.broadcast(chosen, group)


def _padded(x: torch.Tensor, count: int) -> torch.Tensor:
    return F.pad(x, (*(0, 0) * (x.dim() - 1), 0, count - len(x)))
