"""A step's output after the model: the request of each row of logits, the sampled tokens, and other results for the
host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from sglang.srt.distributed.groups import Group
from sglang.srt.layers.embedding import RowShare
from sglang.srt.layers.sampler import Sampler, SamplerOutput
from sglang.srt.model_executor.device_state import DeviceState, shape_of
from sglang.srt.model_executor.draft_runner import DraftRunner
from sglang.srt.model_executor.group_output import GroupOutput
from sglang.srt.model_executor.step import AcceptResult, LaunchedForward, ModelOutput, StepInput, StepResult
from sglang.srt.sampling.logprobs import LogprobResult, prompt_logprobs
from sglang.srt.sampling.sampling_table import Column, SamplingBatch, SamplingTable
from sglang.srt.utils.device_arrays import DeviceArrays, event_on, to_device, to_host


class StepOutput:
    """Samples the rows of a step and updates the device's tables of next tokens and lengths."""

    def __init__(
        self,
        state: DeviceState,
        table: SamplingTable,
        sampler: Sampler,
        pp_tokens: Group,
        drafts: DraftRunner | None,
        group_output: GroupOutput | None,
    ) -> None:
        """pp_tokens: the pipeline ranks that receive the sampled tokens. group_output: samples with several attention
        groups."""
        self.state, self.table, self.sampler, self.pp_tokens = state, table, sampler, pp_tokens
        self.drafts, self.group_output = drafts, group_output
        self.model = state.model
        self.samples = state.model.description.last_stage

    def launched(self, step: StepInput, output: ModelOutput) -> LaunchedForward:
        """Returns the launched step with the request slots of its rows of logits."""
        arrays = output.arrays
        if self.group_output is not None:
            return self._launch_own_group(step, output, self.group_output)
        hidden = self._hidden(step, output.hidden)
        if step.prompts is None:
            logits = output.logits[: len(step.slots) * step.width]
            slots, host_slots = self._rows(step, arrays["decode_slots"][: len(step.slots)], arrays)
            positions = output.batch.positions[: len(slots)] + 1
            return LaunchedForward(step, logits, slots, host_slots, positions, output, hidden=hidden)
        assert output.hidden is not None
        if self.state.has_drafts:
            self.state.count_prompts(arrays, step.num_decodes)
        logits = output.logits[: len(step.prompts.sample_rows)]
        slots, last_rows = (arrays[name][: len(logits)] for name in ("sampled_slots", "last_rows"))
        return LaunchedForward(
            step,
            logits,
            slots,
            step.sampled_slots,
            output.batch.positions[last_rows] + 1,
            output,
            self._prompt_logprobs(step, output),
            hidden,
        )

    def _launch_own_group(self, step: StepInput, output: ModelOutput, group_output: GroupOutput) -> LaunchedForward:
        """Returns the launched step with the rows of this rank's group."""
        assert step.groups is not None
        logits, arrays = group_output.own_logits(output.logits, step.groups), output.arrays
        count = len(logits)
        if step.prompts is None:
            slots, host_slots = self._rows(step, arrays["decode_slots"][: len(step.slots)], arrays)
            positions = output.batch.positions[:count] + 1
            return LaunchedForward(step, logits, slots[:count], host_slots[:count], positions, output)
        if self.state.has_drafts:
            self.state.count_prompts(arrays, step.num_decodes)
        slots, last_rows = (arrays[name][:count] for name in ("sampled_slots", "last_rows"))
        positions = output.batch.positions[last_rows] + 1
        return LaunchedForward(step, logits, slots, step.sampled_slots[:count], positions, output)

    def _rows(self, step: StepInput, slots: torch.Tensor, arrays: DeviceArrays) -> tuple[torch.Tensor, np.ndarray]:
        """Returns the request slot of each row of logits of a step without prompts, on the device and on the host. Rows
        beyond a request's width are padding and sampled as the padding slot: greedily, without penalties."""
        if step.width == 1:
            return slots, step.slots
        assert step.widths is not None
        host_slots = np.where(np.arange(step.width) < step.widths[:, None], step.slots[:, None], 0).flatten()
        inside = torch.arange(step.width, device=slots.device) < arrays["widths"][: len(slots), None]
        return torch.where(inside, slots[:, None], 0).flatten(), host_slots

    def _prompt_logprobs(self, step: StepInput, output: ModelOutput) -> LogprobResult | None:
        assert step.prompts is not None and output.hidden is not None
        request = step.prompts.prompt_logprobs
        if request is None or not self.samples:
            return None

        def project(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return self.model.logits(hidden, self.model.slots_of_rows(output.batch, rows))

        packed = prompt_logprobs(output.hidden, project, request, self.model.description.vocab_size)
        return LogprobResult(packed, request)

    def _hidden(self, step: StepInput, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the final hidden states [N, H] fp32 of the tokens that want them."""
        if step.hidden_rows is None or not self.samples:
            return None
        assert hidden is not None, "the graph of this step does not keep them"
        return to_host(hidden[to_device(step.hidden_rows, self.state.device)].float())

    def sample(self, forward: LaunchedForward, vocab_mask: np.ndarray | None) -> StepResult:
        """Samples a step, accepts draft tokens if there are any, and starts the copies to the host. vocab_mask: as in
        `ModelRunner.sample`."""
        step = forward.step
        out = self._sampled(forward, vocab_mask)
        tokens = out.next_token_ids
        accepted = None
        if self.drafts is not None:
            accepted = self._accept(forward, tokens)
            tokens = tokens.view(-1, step.width)
            if self.pp_tokens.size > 1 and len(tokens):
                columns = (tokens.int(), accepted.counts[:, None], accepted.draft_tokens.int())
                self.pp_tokens.from_last(torch.cat(columns, dim=1))
        elif len(tokens):
            self.pp_tokens.from_last(tokens)
        logprobs = None
        if step.logprobs is not None:
            assert out.logprobs is not None
            logprobs = LogprobResult(to_host(out.logprobs), step.logprobs)
        result = StepResult(
            to_host(tokens.view(-1, step.width)), None, None, logprobs, forward.prompt_logprobs, forward.hidden
        )
        if accepted is not None:
            result.counts = to_host(accepted.counts) if step.widths is not None else None
            result.draft_tokens = to_host(accepted.draft_tokens) if step.reads_draft_tokens else None
            result.confidence = None if accepted.confidence is None else to_host(accepted.confidence)
        result.ready = event_on(self.state.device)
        return result

    def sample_groups(self, forward: LaunchedForward, vocab_mask: np.ndarray | None) -> list[StepResult]:
        """Returns the results of all attention groups. With draft tokens each group samples and drafts by itself,
        because its ranks share the vocabulary and the draft. vocab_mask: of this group's rows."""
        group_output, steps = self.group_output, forward.step.groups
        assert group_output is not None and steps is not None
        if self.drafts is None:
            return group_output.sample(forward, vocab_mask)
        # With stages nothing is chosen by it, because the time of a step is not known there.
        says_confidence = self.drafts.says_confidence and self.pp_tokens.size == 1
        if steps.idle[group_output.groups.dp.rank]:
            none = SamplerOutput(forward.slots.new_empty(0), None)
            return group_output.gather_verified(forward, none, None, says_confidence)
        asked = replace(forward, step=group_output.own_request(forward.step))
        out = self._sampled(asked, vocab_mask)
        accepted = self._accept(forward, out.next_token_ids)
        return group_output.gather_verified(forward, out, accepted, says_confidence)

    def _accept(self, forward: LaunchedForward, tokens: torch.Tensor) -> AcceptResult:
        step, output = forward.step, forward.output
        assert self.drafts is not None
        if output.accept is not None:
            accepted = output.accept(tokens)
        else:
            accepted = self.drafts.accept(shape_of(step), output, tokens)
        count = len(step.sampled_slots)
        confidence = None if accepted.confidence is None else accepted.confidence[:count]
        accepted = AcceptResult(accepted.counts[:count], accepted.draft_tokens[:count], confidence)
        if step.width > 1 and self.table.has_penalties(step.slots):
            self._count_accepted(forward, tokens.view(count, -1), accepted.counts)
        return accepted

    def _count_accepted(self, forward: LaunchedForward, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Counts the accepted of tokens [D, width] for the penalties of later steps."""
        stands = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
        rows = self.table.table[forward.slots.view(tokens.shape)[:, :1], Column.PENALTY_ROW].long()
        self.table.penalties.add_tokens(torch.where(stands, rows, 0).flatten(), tokens.clamp(min=0).flatten())

    def _sampled(self, forward: LaunchedForward, vocab_mask: np.ndarray | None) -> SamplerOutput:
        """Samples from complete or sharded logits: with sharded ones ranks exchange each row's largest, or each samples
        complete rows of a share."""
        if self.model.description.pooling is not None:  # nothing is generated
            return SamplerOutput(torch.zeros_like(forward.slots), None)
        head = self.model.head
        assert head is not None, "the last stage has it"
        sampling = self.table.view(forward.host_slots, forward.slots)
        step = forward.step
        next_token = None if self.state.has_drafts else self.state.next_tokens[:, 0]
        plain = sampling.only_largest and vocab_mask is None and step.logprobs is None
        if plain and head.is_shard(forward.logits):
            tokens = head.first_largest(forward.logits)
            if next_token is not None:
                next_token[forward.slots] = tokens.clamp(min=0)
            return SamplerOutput(tokens, None)
        draft_tokens = None
        if step.width > 1:
            slots = forward.output.arrays["decode_slots"][: len(step.slots)]
            draft_tokens = self.state.next_tokens[slots, 1 : step.width]
        if head.is_shard(forward.logits):
            share = head.whole_share(forward.logits, step.width)
            return self._sampled_by_rows(forward, share, sampling, vocab_mask, draft_tokens, next_token)
        mask = None if vocab_mask is None else to_device(vocab_mask, self.state.device)
        on_host = next_token is not None and self.pp_tokens.size == 1
        return self.sampler(
            forward.logits, sampling, forward.positions, mask, step.logprobs, next_token, on_host, draft_tokens
        )

    def _sampled_by_rows(
        self,
        forward: LaunchedForward,
        share: RowShare,
        sampling: SamplingBatch,
        vocab_mask: np.ndarray | None,
        draft_tokens: torch.Tensor | None,
        next_token: torch.Tensor | None,
    ) -> SamplerOutput:
        """Samples a share of the rows on each rank and gathers tokens and log probabilities; a row's draw does not
        depend on others."""
        rows, width, asked = share.rows, forward.step.width, forward.step.logprobs
        tokens, packed = forward.slots.new_empty(0), None
        if rows.start < rows.stop:
            mask = None if vocab_mask is None else to_device(vocab_mask[rows], self.state.device)
            drafted = None if draft_tokens is None else draft_tokens[rows.start // width : rows.stop // width]
            positions = forward.positions[rows]
            part = sampling.part(rows)
            of_rows = None if asked is None else asked.part(range(rows.start, rows.stop))
            out = self.sampler(share.logits, part, positions, mask, of_rows, draft_tokens=drafted, counts=False)
            tokens, packed = out.next_token_ids, out.logprobs
        tokens = share.gather(tokens)
        if draft_tokens is None:
            sampling.count(tokens)
        if next_token is not None:
            next_token[forward.slots] = tokens.clamp(min=0)
        if asked is None:
            return SamplerOutput(tokens, None)
        if packed is None:
            packed = asked.no_rows(self.model.description.vocab_size, tokens.device)
        return SamplerOutput(tokens, share.gather(packed))
