"""Drives a ModelRunner without scheduler or server: fixed batches, prefill and decode. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.errors import UserError
from sglang.srt.mem_cache.kv_table import KVTable
from sglang.srt.mem_cache.radix_node import Keys, Node
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.step import PromptTokens, StepInput, StepResult
from sglang.srt.sampling.sampling_params import SamplingParams


def direct_table(runner: ModelRunner) -> KVTable:
    """Returns the KV table for the batches of one runner, without prefix cache."""
    return KVTable(runner.plan.pool_sizes, prefix_caching=False)


@dataclass(slots=True)
class DirectRequest:
    """Implements CachedRequest."""

    tokens: list[int]
    namespace: str | None = None
    slot: int = 0
    kv_len: int = 0
    reserved_len: int = 0
    state_is_exact: bool = True
    num_cached: int = 0
    node: Node | None = None

    def cache_keys(self, length: int) -> Keys:
        """Returns the tokens themselves as keys, [length] int64."""
        return np.array(self.tokens[:length], np.int64)

    def matchable_len(self) -> int:
        """Returns 0: no prefix is taken from the cache."""
        return 0


class DirectBatch:
    """Greedy requests that start together, with cache space for `output_len` tokens each. Call `close` to free
    everything."""

    def __init__(self, runner: ModelRunner, kv: KVTable, prompts: list[list[int]], output_len: int) -> None:
        """Places the requests. Raises UserError if they do not fit."""
        self.runner = runner
        self.kv = kv
        self.prompts = prompts
        self._check_fit(output_len)
        self.requests = [DirectRequest(prompt) for prompt in prompts]
        for request in self.requests:
            kv.place(request, kv.tree.root)
            runner.sampling_table.set(request.slot, SamplingParams(temperature=0.0), 0, [], [], ())
        self.slots = np.array([request.slot for request in self.requests], np.int64)
        self.lens = np.zeros(len(prompts), np.int32)
        self.most = np.array([len(prompt) + output_len for prompt in prompts], np.int32)
        self._next_step: StepInput | None = None

    def _check_fit(self, output_len: int) -> None:
        plan = self.runner.plan
        longest = max(len(p) for p in self.prompts) + output_len
        page = self.kv.page_size
        needed = sum(-(-(len(p) + output_len) // page) * page for p in self.prompts)
        if longest > plan.context_len:
            raise UserError(f"{longest} tokens a request exceed the context length {plan.context_len}")
        if len(self.prompts) > plan.max_running_requests:
            raise UserError(
                f"batch size {len(self.prompts)} exceeds --max-running-requests {plan.max_running_requests}"
            )
        if needed > self.kv.available_size():
            raise UserError(f"{needed} tokens do not fit the KV cache of {self.kv.size} tokens")

    def prefill(self, max_tokens: int, upto: int | None = None) -> list[int]:
        """Computes the prompts (their first `upto` tokens), at most `max_tokens` in a step. Returns the next token of
        each request at the end."""
        goals = [len(p) if upto is None else min(upto, len(p)) for p in self.prompts]
        tokens = [0] * len(self.prompts)
        results: list[tuple[list[int], StepResult]] = []
        while any(done < goal for done, goal in zip(self.lens.tolist(), goals, strict=True)):
            results.append(self._prefill_step(goals, max_tokens))
        for finished, result in results:
            result.wait()
            for i, token in zip(finished, result.next_token_ids[:, 0].tolist(), strict=True):
                tokens[i] = token
        return tokens

    def hidden_states(self, upto: int) -> list[torch.Tensor]:
        """Computes the prompts up to their first `upto` tokens, in one step. Returns the final hidden states [n, H]
        fp32 of each prompt's n new tokens."""
        goals = [min(upto, len(prompt)) for prompt in self.prompts]
        before = self.lens.tolist()
        _, result = self._prefill_step(goals, sum(goals), hidden=True)
        result.wait()
        assert result.hidden is not None
        return list(result.hidden.split([goal - done for goal, done in zip(goals, before, strict=True)]))

    def _prefill_step(self, goals: list[int], budget: int, hidden: bool = False) -> tuple[list[int], StepResult]:
        """`hidden`: the step returns the hidden states of its tokens, and no next tokens."""
        chosen: list[tuple[int, int, int]] = []  # request, first, end
        for i, (done, goal) in enumerate(zip(self.lens.tolist(), goals, strict=True)):
            count = min(goal - done, budget)
            if count:
                chosen.append((i, done, done + count))
                budget -= count
        rows = np.array([i for i, _, _ in chosen])
        first = np.array([a for _, a, _ in chosen], np.int32)
        end = np.array([b for _, _, b in chosen], np.int32)
        self.kv.leave_windows(self.slots, self.lens)  # also of prompts that are done: they decode later
        sampled = [] if hidden else [row for row, (i, _, b) in enumerate(chosen) if b == goals[i]]
        step = StepInput(
            slots=self.slots[rows],
            seq_lens=end,
            out_cache_loc=self.kv.grow(self.slots[rows], first, end, 0),
            prompts=PromptTokens(
                input_ids=np.concatenate([np.array(self.prompts[i][a:b], np.int64) for i, a, b in chosen]),
                prefix_lens=first,
                extend_lens=end - first,
                sample_rows=np.array(sampled, np.int64),
            ),
            table_update=self.kv.take_update(),
            hidden_rows=np.arange((end - first).sum()) if hidden else None,
        )
        self.lens[rows] = end
        return [chosen[row][0] for row in sampled], self.runner.run(step)

    def decode(self) -> list[int]:
        """Computes one token for each request from the last sampled one, and waits for the device. Slots of the next
        step are allocated meanwhile, as in the scheduler; the next call launches that step."""
        step, self._next_step = self._next_step or self._decode_step(), None
        result = self.runner.run(step)
        if (self.lens < self.most).all():
            self._next_step = self._decode_step()
        result.wait()
        tokens: list[int] = result.next_token_ids[:, 0].tolist()
        return tokens

    def _decode_step(self) -> StepInput:
        self.kv.leave_windows(self.slots, self.lens)
        lens = self.lens + 1
        locs = self.kv.grow(self.slots, self.lens, lens, len(lens))
        self.lens = lens
        return StepInput(self.slots, lens, locs, table_update=self.kv.take_update())

    def close(self) -> None:
        """Gives back the slots and cache of all requests."""
        for request, length in zip(self.requests, self.lens.tolist(), strict=True):
            self.runner.sampling_table.clear(request.slot)
            request.kv_len = length
            self.kv.release(request, keep=False)
