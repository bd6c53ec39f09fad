"""The steps of the start-up check: the same few prompts whole, in parts, decoded, verified and mixed."""

from __future__ import annotations

import numpy as np
import torch

from sglang.srt.mem_cache.kv_table import NO_SLOTS, TableUpdate
from sglang.srt.model_executor.canary_images import COUNT, CanaryImages
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.step import PromptTokens, StepInput
from sglang.srt.plan.cache_spec import PER_REQUEST

PROMPT_TOKENS = 24
REQUESTS = 3


class CanarySteps:
    """Builds steps of request slots 1 to `count`, whose cache slots follow the padding page.

    As in the scheduler's steps the device's tables hold the slots of earlier tokens only; those of new tokens come with
    the step. Until then the tables refer to a slot filled with NaN, so that code that reads too early is noticed."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.state, plan = runner, runner.state, runner.plan
        window_tokens = [size.tokens for size in plan.windows]
        tokens = min(plan.max_total_num_tokens, *window_tokens) if window_tokens else plan.max_total_num_tokens
        pages_each = -(-PROMPT_TOKENS // plan.page_size)
        self.count = max(1, min(REQUESTS, plan.max_running_requests, tokens // (pages_each * plan.page_size)))
        self.length = min(PROMPT_TOKENS, plan.context_len, tokens)
        self.has_drafts = self.state.has_drafts
        request, position = np.arange(self.count)[:, None], np.arange(self.length)
        self.ids = (17 + 31 * position + 7 * request) % plan.model.vocab_size
        self.cache = plan.page_size * (1 + pages_each * request) + position
        self.slots = np.arange(1, self.count + 1)
        unused = plan.page_size * (1 + pages_each * self.count)
        self.unset = unused if unused < tokens + plan.page_size else 0
        """The slot filled with NaN, for positions without one; the padding slot if there is no room for it."""
        self._fill_unset(float("nan"))
        self.images: CanaryImages | None = None
        """None: the model reads text only, or no graph has images."""
        features = self.state.features
        if features is not None and not features.description.both_ways and self.length > COUNT:
            self.images = CanaryImages(features, self.length, self.state.position_deltas is not None)

    def _fill_unset(self, value: float) -> None:
        if not self.unset:
            return
        for group, caches in zip(self.runner.pools.groups, self.runner.pools.tensors, strict=True):
            if group.lifetime != PER_REQUEST and group.entries_per_token == 1:
                for tensor in (tensor for cache in caches for tensor in cache.values()):
                    tensor[self.unset] = torch.full(tensor.shape[1:], value).to(tensor.dtype)

    def start(self) -> None:
        """Resets the requests: none of their tokens is computed."""
        state = self.state
        state.req_to_token[:, 1 : self.count + 1] = self.unset
        state.next_tokens[: self.count + 1] = 0
        state.lens[: self.count + 1] = 0

    def end(self) -> None:
        """Restores everything except cache slots and states that no request owns."""
        self.start()
        self.state.req_to_token[:, 1 : self.count + 1] = 0
        self._fill_unset(0.0)

    def prompts(self, length: int) -> StepInput:
        """Returns a step with the first `length` tokens of every prompt."""
        return self._step(np.arange(0), np.arange(self.count), length)

    def first_tokens(self, others: int) -> StepInput:
        """Returns a step with the first token of every prompt. Those of all prompts but the middle one are others for
        each number `others`."""
        step = self.prompts(1)
        assert step.prompts is not None
        changed = np.arange(self.count) != self.middle
        step.prompts.input_ids = (step.prompts.input_ids + others * changed) % self.runner.plan.model.vocab_size
        return step

    @property
    def middle(self) -> int:
        """Returns the number of the prompt that has others on both sides."""
        return self.count // 2

    def alone(self, number: int) -> StepInput:
        """Returns a step with one prompt."""
        return self._step(np.arange(0), np.arange(number, number + 1), self.length)

    def decoded(self, count: int) -> StepInput:
        """Returns a step that decodes the last tokens of the first `count` prompts, whose other tokens are computed."""
        return self._step(np.arange(count), np.arange(0), 0)

    @property
    def mixed_order(self) -> np.ndarray:
        """Returns the order of the prompts in `mixed`: the last prompt, which decodes, comes first, so that a backend's
        plan of an earlier step, which began with the first prompt, does not fit by accident."""
        return np.roll(np.arange(self.count), 1)

    def mixed(self) -> StepInput:
        """Returns a step that decodes the last token of one prompt and computes all other prompts whole."""
        decodes, prompts = np.split(self.mixed_order, [1])
        return self._step(decodes, prompts, self.length)

    def with_images(self) -> StepInput:
        """Returns a step with all prompts with images."""
        assert self.images is not None
        return self.images.put(self.prompts(self.length))

    def mixed_with_images(self) -> StepInput:
        """Returns the same step as `mixed`, with images in the prompts."""
        assert self.images is not None
        return self.images.put(self.mixed())

    @property
    def width(self) -> int:
        """Returns the tokens that each request brings to `verified`."""
        return min(self.state.tokens_per_step, self.length - 1)

    def verified(self) -> StepInput:
        """Returns a step with the last tokens of every prompt, all but the first as draft tokens."""
        first = self.length - self.width
        tokens = torch.from_numpy(self.ids[:, first:]).to(self.state.device)
        self.state.next_tokens[1 : self.count + 1, : self.width] = tokens
        lens, widths = np.full(self.count, self.length, np.int32), np.full(self.count, self.width, np.int32)
        update = self._entries(np.arange(self.count), first, np.arange(0), 0)
        step = StepInput(self.slots, lens, np.empty(0, np.int32), table_update=update, widths=widths)
        step.width, step.reserved_lens = self.state.tokens_per_step, lens
        return step

    def rows_of_verified(self) -> slice:
        """Returns the rows of the last tokens among the logits of `verified`."""
        return slice(self.width - 1, None, self.state.tokens_per_step)

    def _step(self, decodes: np.ndarray, prompts: np.ndarray, length: int) -> StepInput:
        """Returns a step with the last tokens of the requests `decodes`, and the first `length` tokens of `prompts`."""
        state = self.state
        state.next_tokens[1 + torch.from_numpy(decodes), 0] = torch.from_numpy(self.ids[decodes, -1]).to(state.device)
        num, order = len(prompts), np.concatenate((decodes, prompts))
        tokens = None
        if num:
            lens = np.full(num, length, np.int32)
            ids = self.ids[prompts, :length].flatten()
            tokens = PromptTokens(ids, np.zeros(num, np.int32), lens, np.arange(len(order)))
            tokens.next_ids = np.zeros(num, np.int64) if self.has_drafts else None
        seq_lens = np.repeat([self.length, length], [len(decodes), num]).astype(np.int32)
        cache = np.concatenate((self.cache[decodes, -1], self.cache[prompts, :length].flatten())).astype(np.int32)
        step = StepInput(self.slots[order], seq_lens, cache, tokens, self._entries(decodes, -1, prompts, length))
        step.reserved_lens = seq_lens if self.has_drafts else None
        return step

    def _entries(self, decodes: np.ndarray, first: int, prompts: np.ndarray, length: int) -> TableUpdate | None:
        """Returns the table entries of a step: for the requests `decodes` the positions from `first` on, for `prompts`
        the first `length`. Without a drafter a decode step itself writes its entries in table 0."""
        num_tables, num_rows, context = self.state.req_to_token.shape
        positions = np.arange(self.length)
        index, value = [], []
        for table in range(num_tables):
            in_step = table == 0 and not self.has_drafts
            for requests, span in (
                (decodes[:0] if in_step else decodes, positions[first:]),
                (prompts, positions[:length]),
            ):
                rows = (table * num_rows + self.slots[requests, None]) * context
                index.append((rows + span).flatten())
                value.append(self.cache[requests[:, None], span].flatten())
        written = np.concatenate(index)
        if not len(written):
            return None
        return TableUpdate(written, np.concatenate(value).astype(np.int32), NO_SLOTS, NO_SLOTS)
