"""Work after the sampling of a step: accepting its tokens, and making the draft tokens that the next step verifies."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from sglang.srt.drafts.drafter import Drafter, DraftStep, simulated_counts
from sglang.srt.environ import envs
from sglang.srt.layers.sampler import Sampler
from sglang.srt.model_executor.device_state import DeviceState, StepShape
from sglang.srt.model_executor.step import AcceptResult, ModelOutput
from sglang.srt.sampling.sampling_table import SamplingTable


class DraftRunner:
    """Accepts tokens, runs the drafter, and updates the device state's `lens` and `next_tokens` after each step. All
    launches have fixed addresses and sizes, so they can be captured for a shape."""

    def __init__(self, state: DeviceState, drafter: Drafter, table: SamplingTable, sampler: Sampler) -> None:
        self.state, self.drafter, self.table, self.sampler = state, drafter, table, sampler
        self._simulated_length = envs.SGLANG_SIMULATE_ACC_LEN

    @property
    def says_confidence(self) -> bool:
        """Returns whether the drafter gives the confidence of its draft tokens."""
        return getattr(getattr(self.drafter, "model", None), "confidence", None) is not None

    def accept(
        self, shape: StepShape, output: ModelOutput, tokens: torch.Tensor, in_graph: bool = False
    ) -> AcceptResult:
        """Accepts the sampled tokens int64 [R], or [D * width] in a step without prompts, and returns the result with
        new draft tokens. Padding behind them belongs to request slot 0. Recurrent states that the step left unchanged
        are advanced by the accepted tokens."""
        if shape.has_prompts:
            step, counts = self._prompts(shape, output, tokens, in_graph)
            # A chunk of a prompt samples nothing, and kernels cannot be launched over no rows.
            num_speculative_tokens = self.drafter.num_tokens - 1 if len(tokens) else 0
        else:
            step, counts = self._decodes(shape, output, tokens, in_graph)
            num_speculative_tokens = shape.width - 1
            for record in output.batch.state_records or ():
                record.commit(counts)
        state = self.state
        draft_tokens = self.drafter.propose(step, num_speculative_tokens)
        missing = state.tokens_per_step - 1 - draft_tokens.shape[1]
        draft_tokens = F.pad(draft_tokens, (0, missing)) if missing else draft_tokens
        state.next_tokens[step.slots] = torch.cat((step.tokens[:, None], draft_tokens), dim=1)
        state.next_tokens[:1].zero_()
        return AcceptResult(counts, draft_tokens, step.confidence)

    def _decodes(
        self, shape: StepShape, output: ModelOutput, tokens: torch.Tensor, in_graph: bool
    ) -> tuple[DraftStep, torch.Tensor]:
        """Accepts tokens of decoding requests with `width` rows each."""
        state, arrays = self.state, output.arrays
        slots, widths = arrays["decode_slots"][: shape.num_decodes], arrays["widths"][: shape.num_decodes]
        forced = None
        if self._simulated_length:
            forced = simulated_counts(self._simulated_length, state.lens[slots], widths)
        rows = tokens.view(shape.num_decodes, shape.width)
        accepted = state.ops.accept_drafts(rows, slots, widths, state.next_tokens, state.lens, forced)
        step = self._step(
            output,
            next_ids=accepted.next_ids,
            last_rows=accepted.last_rows,
            slots=slots,
            lens=accepted.lens,
            tokens=accepted.tokens,
            ends=arrays["ends"][: shape.num_decodes],
            in_graph=in_graph,
        )
        return step, accepted.counts

    def _prompts(
        self, shape: StepShape, output: ModelOutput, tokens: torch.Tensor, in_graph: bool
    ) -> tuple[DraftStep, torch.Tensor]:
        """Accepts the tokens of a step with prompts, in which decoding requests bring one token each."""
        state, arrays, tokens = self.state, output.arrays, tokens.clamp(min=0)
        count = len(tokens)
        slots, last_rows = arrays["sampled_slots"][:count], arrays["last_rows"][:count]
        next_ids = torch.cat((arrays["next_ids"][: shape.num_tokens], tokens[:1]))
        next_ids[torch.where(slots > 0, last_rows, shape.num_tokens)] = tokens
        step = self._step(
            output,
            next_ids=next_ids[: shape.num_tokens],
            last_rows=last_rows,
            slots=slots,
            lens=state.lens[slots],
            tokens=tokens,
            ends=arrays["ends"][:count],
            in_graph=in_graph,
        )
        return step, torch.ones(count, dtype=torch.int32, device=tokens.device)

    def _step(
        self,
        output: ModelOutput,
        *,
        next_ids: torch.Tensor,
        last_rows: torch.Tensor,
        slots: torch.Tensor,
        lens: torch.Tensor,
        tokens: torch.Tensor,
        ends: torch.Tensor,
        in_graph: bool,
    ) -> DraftStep:
        assert output.hidden is not None, "drafts read hidden states"
        build = partial(self.state.draft_batch, in_graph=in_graph)
        build_block = partial(self.state.block_batch, in_graph=in_graph)
        build_queries = partial(self.state.query_batch, in_graph=in_graph)
        batch = output.batch
        build_lagging = partial(self.state.lagging_batch, batch, in_graph=in_graph)
        return DraftStep(
            batch, next_ids, output.hidden, batch.aux_hidden_states, last_rows, slots, lens, tokens, ends,
            self._draw, build, build_block, build_queries, build_lagging,
        )  # fmt: skip

    def _draw(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # What a request has no token for is no number in a row of padding: token 0 instead.
        return self.sampler.draw(logits, self.table, slots, positions).clamp(min=0)
