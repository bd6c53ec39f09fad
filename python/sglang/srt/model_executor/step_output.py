"""Behind the model in a step: which rows of logits are whose, their tokens, and what else goes to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang.srt.distributed.parallel_state import Group
from sglang.srt.layers.sampler import Sampler, SamplerOutput
from sglang.srt.layers.step_rows import StateRecord
from sglang.srt.model_executor.device_state import DeviceState
from sglang.srt.model_executor.step import LaunchedForward, StepInput, StepResult
from sglang.srt.sampling.logprobs import LogprobResult, prompt_logprobs
from sglang.srt.sampling.sampling_table import SamplingTable
from sglang.srt.utils.device_arrays import DeviceArrays, event_on, to_device, to_host


class StepOutput:
    """Samples the rows of a step and keeps the device's tables of next tokens and lengths."""

    def __init__(self, state: DeviceState, table: SamplingTable, sampler: Sampler, pp_tokens: Group) -> None:
        """pp_tokens: the ranks that the sampled tokens go to."""
        self.state, self.table, self.sampler, self.pp_tokens = state, table, sampler, pp_tokens
        self.model = state.model
        self.samples = state.model.description.last_stage

    def launched(
        self,
        step: StepInput,
        arrays: DeviceArrays,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        logits: torch.Tensor,
        state_records: Sequence[StateRecord] = (),
    ) -> LaunchedForward:
        """A step whose model is launched: `step_arrays` on the device, positions [T], hidden states [T, H] and logits
        of the rows that may be sampled, each of which may be longer by padding. Of a step without prompts hidden states
        are only there where they are kept."""
        wanted = self._hidden(step, hidden)
        if step.widths is not None:
            forward = self._verified(step, step.widths, arrays, positions, logits, wanted)
            forward.state_records = state_records
            return forward
        if step.prompts is None:
            slots, lens = (arrays[name][: len(step.slots)] for name in ("decode_slots", "decode_lens"))
            return LaunchedForward(step, logits[: len(slots)], slots, step.slots, lens, hidden=wanted)
        assert hidden is not None
        logits = logits[: len(step.prompts.sample_rows)]
        slots, lens = (arrays[name][: len(logits)] for name in ("sampled_slots", "sampled_lens"))
        if self.state.drafter is not None:
            count = step.num_decodes
            num_prompts = len(step.slots) - count
            self.state.settle_prompts(
                arrays["slots"][:num_prompts], arrays["seq_lens"][:num_prompts], arrays["decode_slots"][:count]
            )
            lens = self.state.lens[slots]
        return LaunchedForward(
            step,
            logits,
            slots,
            step.sampled_slots,
            lens,
            prompt_logprobs=self._prompt_logprobs(step, hidden),
            hidden=wanted,
        )

    def _verified(
        self,
        step: StepInput,
        host_widths: np.ndarray,
        arrays: DeviceArrays,
        positions: torch.Tensor,
        logits: torch.Tensor,
        hidden: torch.Tensor | None,
    ) -> LaunchedForward:
        """Rows of padding are sampled as the padding slot is: greedily, without penalties."""
        count, width = len(step.slots), self.state.tokens_per_step
        slots, widths = arrays["decode_slots"][:count], arrays["widths"][:count]
        row = np.arange(width)
        host_slots = np.where(row < host_widths[:, None], step.slots[:, None], 0).flatten()
        inside = torch.arange(width, device=slots.device) < widths[:, None]
        row_slots = torch.where(inside, slots[:, None], 0).flatten()
        rows = len(host_slots)
        return LaunchedForward(step, logits[:rows], row_slots, host_slots, positions[:rows] + 1, widths, hidden=hidden)

    def _prompt_logprobs(self, step: StepInput, hidden: torch.Tensor) -> LogprobResult | None:
        assert step.prompts is not None
        request = step.prompts.prompt_logprobs
        if request is None or not self.samples:
            return None
        packed = prompt_logprobs(hidden, self.model.logits, request, self.model.description.vocab_size)
        return LogprobResult(to_host(packed), request)

    def _hidden(self, step: StepInput, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """Final hidden states [N, H] fp32 of the tokens that want them."""
        if step.hidden_rows is None or not self.samples:
            return None
        assert hidden is not None, "the graph of this step does not keep them"
        return to_host(hidden[to_device(step.hidden_rows, self.state.device)].float())

    def sample(self, forward: LaunchedForward, vocab_mask: np.ndarray | None) -> StepResult:
        step, state = forward.step, self.state
        out = self._sampled(forward, vocab_mask)
        if len(out.next_token_ids):
            self.pp_tokens.from_last(out.next_token_ids)
        counts, tokens = None, out.next_token_ids[:, None]
        if forward.widths is not None:
            slots = forward.slots.view(len(step.slots), -1)[:, 0]
            accepted = state.settle_verified(slots, forward.widths, out.next_token_ids)
            for record in forward.state_records:
                record.commit(accepted)
            counts = to_host(accepted)
            tokens = out.next_token_ids.view(len(slots), -1)
        elif state.drafter is not None:
            state.settle_tokens(forward.slots, out.next_token_ids)
        tokens = to_host(tokens)
        logprobs = None
        if step.logprobs is not None:
            assert out.logprobs is not None
            logprobs = LogprobResult(to_host(out.logprobs), step.logprobs)
        ready = event_on(state.device)
        return StepResult(tokens, ready, counts, logprobs, forward.prompt_logprobs, forward.hidden)

    def _sampled(self, forward: LaunchedForward, vocab_mask: np.ndarray | None) -> SamplerOutput:
        """The logits of several ranks come together for what cannot be said of each rank's columns."""
        head = self.model.head
        assert head is not None, "the last stage has it"
        sampling = self.table.view(forward.host_slots, forward.slots)
        next_token = self.state.next_tokens[:, 0] if self.state.drafter is None else None
        plain = sampling.only_largest and vocab_mask is None and forward.step.logprobs is None
        if plain and head.is_shard(forward.logits):
            tokens = head.first_largest(forward.logits)
            if next_token is not None:
                next_token[forward.slots] = tokens.clamp(min=0)
            return SamplerOutput(tokens, None)
        mask = None if vocab_mask is None else to_device(vocab_mask, self.state.device)
        logits = head.whole(forward.logits)
        on_host = next_token is not None and self.pp_tokens.size == 1
        return self.sampler(logits, sampling, forward.positions, mask, forward.step.logprobs, next_token, on_host)
