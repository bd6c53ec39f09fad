"""The steps that the start-up canary computes: the same few prompts whole, in parts, decoded, verified and mixed."""

from __future__ import annotations

import numpy as np
import torch

from sglang.srt.mem_cache.kv_table import NO_ROWS, TableUpdate
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.step import PromptTokens, StepInput

PROMPT_TOKENS = 24
REQUESTS = 3


class CanarySteps:
    """Request slots 1 to `count` with cache slots behind the padding page. As in the scheduler's steps the device's
    tables have the slots of earlier tokens only: those of new tokens come with the step."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.state, plan = runner, runner.state, runner.plan
        window_tokens = [size.tokens for size in plan.windows]
        tokens = min(plan.max_total_num_tokens, *window_tokens) if window_tokens else plan.max_total_num_tokens
        pages_each = -(-PROMPT_TOKENS // plan.page_size)
        self.count = max(1, min(REQUESTS, plan.max_running_requests, tokens // (pages_each * plan.page_size)))
        self.length = min(PROMPT_TOKENS, plan.context_len, tokens)
        self.guesses = self.state.drafter is not None
        request, position = np.arange(self.count)[:, None], np.arange(self.length)
        self.ids = (17 + 31 * position + 7 * request) % plan.model.vocab_size
        self.cache = plan.page_size * (1 + pages_each * request) + position
        self.slots = np.arange(1, self.count + 1)

    def forget(self) -> None:
        """Leave no trace but in cache slots and states that no request has."""
        state = self.state
        state.req_to_token[:, 1 : self.count + 1] = 0
        state.next_tokens[: self.count + 1] = 0
        state.lens[: self.count + 1] = 0

    def prompts(self, length: int) -> StepInput:
        """The first `length` tokens of every prompt."""
        return self._mixed(0, self.count, length)

    def decoded(self, count: int) -> StepInput:
        """The last tokens of the first `count` prompts, whose other tokens are computed."""
        lens, last = np.full(count, self.length, np.int32), self.cache[:count, -1].astype(np.int32)
        self._sampled_last(count)
        return StepInput(self.slots[:count], lens, last, table_update=self._entries(count, self.length - 1, 1))

    def mixed(self) -> StepInput:
        """The last token of the first prompt, which decodes, and all other prompts whole."""
        self._sampled_last(1)
        return self._mixed(1, self.count, self.length)

    @property
    def width(self) -> int:
        """Tokens that each request brings to `verified`."""
        return min(self.state.tokens_per_step, self.length - 1)

    def verified(self) -> StepInput:
        """The last tokens of every prompt, all but the first as guesses."""
        first = self.length - self.width
        tokens = torch.from_numpy(self.ids[:, first:]).to(self.state.device)
        self.state.next_tokens[1 : self.count + 1, : self.width] = tokens
        lens, widths = np.full(self.count, self.length, np.int32), np.full(self.count, self.width, np.int32)
        update = self._entries(self.count, first, 0)
        return StepInput(self.slots, lens, np.empty(0, np.int32), table_update=update, widths=widths)

    def rows_of_verified(self) -> slice:
        """Of the logits of `verified`: those of the last tokens."""
        return slice(self.width - 1, None, self.state.tokens_per_step)

    def _sampled_last(self, count: int) -> None:
        last = torch.from_numpy(self.ids[:count, -1]).to(self.state.device)
        self.state.next_tokens[1 : count + 1, 0] = last

    def _mixed(self, decodes: int, end: int, length: int) -> StepInput:
        """The last tokens of the first `decodes` requests, and `length` tokens of the others up to `end`."""
        num = end - decodes
        prompts = PromptTokens(
            self.ids[decodes:end, :length].flatten(),
            np.zeros(num, np.int32),
            np.full(num, length, np.int32),
            np.arange(end),
        )
        lens = np.concatenate((np.full(decodes, self.length), np.full(num, length))).astype(np.int32)
        cache = np.concatenate((self.cache[:decodes, -1], self.cache[decodes:end, :length].flatten()))
        update = self._entries(decodes, self.length - 1, 1, (decodes, end, length))
        return StepInput(self.slots[:end], lens, cache.astype(np.int32), prompts, update)

    def _entries(
        self, decodes: int, first: int, first_table: int, prompts: tuple[int, int, int] = (0, 0, 0)
    ) -> TableUpdate | None:
        """Of the tables from `first_table` on the positions from `first` of the requests that decode; a step of one
        token enters those of table 0 itself, without a drafter. Of all tables those of prompts (begin, end, length)."""
        num_tables, _, context = self.state.req_to_token.shape
        first_table = 0 if self.guesses else first_table
        begin, end, length = prompts
        index, value = [], []
        for table in range(num_tables):
            spans = [(0, decodes, first, self.length)] if table >= first_table else []
            for low, high, start, stop in [*spans, (begin, end, 0, length)]:
                rows = table * self.state.req_to_token[0].numel() + self.slots[low:high, None] * context
                index.append((rows + np.arange(start, stop)).flatten())
                value.append(self.cache[low:high, start:stop].flatten())
        written = np.concatenate(index)
        if not len(written):
            return None
        return TableUpdate(written, np.concatenate(value).astype(np.int32), NO_ROWS, NO_ROWS)
