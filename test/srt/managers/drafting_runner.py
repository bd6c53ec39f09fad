"""`FakeRunner` whose steps verify draft tokens: it keeps lengths and next tokens as a device does, and the host gets to
know them with the results only."""

from __future__ import annotations

import numpy as np
import torch

from sglang.srt.model_executor.step import StepInput
from sglang.srt.sampling.sampling_params import NO_TOKEN
from srt.managers.fake_runner import VOCAB, FakeRunner, LateResult, next_token


class DraftingRunner(FakeRunner):
    """Brings up to `tokens_per_step` tokens of a request to a step; a draft token is wrong with the chance
    `error_rate`."""

    def __init__(self, *sizes: int, tokens_per_step: int, error_rate: float = 0.0, lookahead_slots: int = 0) -> None:
        """lookahead_slots: positions behind a sampled token that must have a cache slot, as a draft's layers need
        them."""
        super().__init__(*sizes)
        self.tokens_per_step, self.lookahead_slots = tokens_per_step, lookahead_slots
        self.error_rate = error_rate
        self.random = np.random.default_rng(0)
        num_slots = len(self.table)
        self.lens = np.zeros(num_slots, np.int64)
        self.next_tokens = np.zeros((num_slots, tokens_per_step), np.int64)
        self.num_accepted = 0

    def forward(self, step: StepInput) -> LateResult:
        if step.table_update is not None:
            self.table.reshape(-1)[step.table_update.index] = step.table_update.value
        if step.prompts is None:
            return self._verify(step)
        return self._extend(step)

    def _verify(self, step: StepInput) -> LateResult:
        assert step.widths is not None
        self.steps.append("verify")
        tokens = np.full((len(step.slots), self.tokens_per_step), 12345, np.int64)  # not for the host to read
        counts = np.ones(len(step.slots), np.int64)
        written: list[int] = []
        for i, (slot, width) in enumerate(zip(step.slots.tolist(), step.widths.tolist(), strict=True)):
            assert 1 <= width <= self.tokens_per_step
            assert self.lens[slot] + width <= step.seq_lens[i], "the host's bound is too low"
            written += self._write(slot, self.next_tokens[slot, :width])
            for j in range(width):
                tokens[i, j] = self._next(slot, self.lens[slot] + j + 1)
            while counts[i] < width and tokens[i, counts[i] - 1] == self.next_tokens[slot, counts[i]]:
                counts[i] += 1
            self.lens[slot] += counts[i]
            self._draft_block(slot, tokens[i, counts[i] - 1], step.reserved_lens[i])
        assert len(set(written)) == len(written), "one cache slot for two tokens"
        self.num_accepted += int(counts.sum())
        return LateResult(torch.from_numpy(tokens), torch.from_numpy(counts))

    def _extend(self, step: StepInput) -> LateResult:
        prompts = step.prompts
        assert prompts is not None
        count = step.num_decodes
        self.steps.append("mixed" if count else "extend")
        first = 0
        for slot, prefix, length in zip(
            step.slots[count:].tolist(), prompts.prefix_lens.tolist(), prompts.extend_lens.tolist(), strict=True
        ):
            self.lens[slot] = prefix
            self._write(slot, prompts.input_ids[first : first + length])
            self.lens[slot] += length
            first += length
        for slot in step.slots[:count].tolist():
            self._write(slot, self.next_tokens[slot, :1])
            self.lens[slot] += 1
        tokens = []
        for slot, row in zip(step.sampled_slots.tolist(), prompts.sample_rows.tolist(), strict=True):
            tokens.append(self._next(slot, self.lens[slot]))
            self._draft_block(slot, tokens[-1], step.reserved_lens[row])
        return LateResult(torch.tensor(tokens, dtype=torch.int64)[:, None])

    def _write(self, slot: int, tokens: np.ndarray) -> list[int]:
        locs = self.table[slot, self.lens[slot] : self.lens[slot] + len(tokens)]
        assert (locs >= self.plan.page_size).all(), "a token has no cache slot"
        self.kv[locs] = tokens
        return locs.tolist()

    def _next(self, slot: int, length: int) -> int:
        sequence = self.kv[self.table[slot, :length]]
        assert (sequence >= 0).all(), "a cache slot was read before it was written"
        return NO_TOKEN if self.not_numbers(sequence) else next_token(sequence)

    def _draft_block(self, slot: int, last: int, reserved_len: int) -> None:
        """Writes in the positions ahead, as far as they have a slot."""
        ahead = self.table[slot, self.lens[slot] : min(self.lens[slot] + self.lookahead_slots, reserved_len)]
        assert (ahead >= self.plan.page_size).all(), "a draft's token has no cache slot"
        self.kv[ahead] = -2
        sequence = [*self.kv[self.table[slot, : self.lens[slot]]], max(last, 0)]
        for j in range(self.tokens_per_step):
            self.next_tokens[slot, j] = sequence[-1]
            right = next_token(np.array(sequence))
            wrong = self.random.random() < self.error_rate
            sequence.append((right + 1) % VOCAB if wrong else right)
