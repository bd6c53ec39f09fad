"""Drives a ModelRunner without scheduler or server: fixed batches, prefill and decode. Imports torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.errors import UserError
from sglang.srt.mem_cache.allocator import TokenAllocator
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.step import ExtendInput, StepInput, StepResult, TableUpdate
from sglang.srt.sampling.sampling_params import SamplingParams

Ids = npt.NDArray[np.int64]


class DirectBatch:
    """Greedy requests that start together, with cache space for `output_len` tokens each. `close` frees everything."""

    def __init__(
        self, runner: ModelRunner, allocator: TokenAllocator, prompts: list[list[int]], output_len: int
    ) -> None:
        """Raises UserError if they do not fit."""
        self.runner = runner
        self.allocator = allocator
        self.prompts = prompts
        self._check_fit(output_len)
        self.slots = np.array([runner.req_pool.alloc() for _ in prompts], np.int64)
        ends = [len(p) + output_len for p in prompts]
        locs = allocator.alloc([0] * len(prompts), ends, [-1] * len(prompts))
        assert locs is not None
        self.locs = np.split(locs, np.cumsum(ends)[:-1])
        self.lens = np.zeros(len(prompts), np.int32)
        for slot in self.slots.tolist():
            runner.sampling_table.set(slot, SamplingParams(temperature=0.0), 0, [], [], ())

    def _check_fit(self, output_len: int) -> None:
        plan = self.runner.plan
        longest = max(len(p) for p in self.prompts) + output_len
        page = self.allocator.page_size
        needed = sum(-(-(len(p) + output_len) // page) * page for p in self.prompts)
        if longest > plan.context_len:
            raise UserError(f"{longest} tokens a request exceed the context length {plan.context_len}")
        if len(self.prompts) > plan.max_running_requests:
            raise UserError(
                f"batch size {len(self.prompts)} exceeds --max-running-requests {plan.max_running_requests}"
            )
        if needed > self.allocator.available_size():
            raise UserError(f"{needed} tokens do not fit the KV cache of {self.allocator.size} tokens")

    def prefill(self, max_tokens: int, upto: int | None = None) -> list[int]:
        """Computes the prompts (their first `upto` tokens), at most `max_tokens` in a step. Returns the next token of
        each request when all is done."""
        goals = [len(p) if upto is None else min(upto, len(p)) for p in self.prompts]
        tokens = [0] * len(self.prompts)
        results: list[tuple[list[int], StepResult]] = []
        while any(done < goal for done, goal in zip(self.lens.tolist(), goals, strict=True)):
            results.append(self._prefill_step(goals, max_tokens))
        for finished, result in results:
            self._wait(result)
            for i, token in zip(finished, result.next_token_ids[:, 0].tolist(), strict=True):
                tokens[i] = token
        return tokens

    def _prefill_step(self, goals: list[int], budget: int) -> tuple[list[int], StepResult]:
        chosen: list[tuple[int, int, int]] = []  # request, first, end
        for i, (done, goal) in enumerate(zip(self.lens.tolist(), goals, strict=True)):
            count = min(goal - done, budget)
            if count:
                chosen.append((i, done, done + count))
                budget -= count
        rows = np.array([i for i, _, _ in chosen])
        first = np.array([a for _, a, _ in chosen], np.int32)
        end = np.array([b for _, _, b in chosen], np.int32)
        sampled = [row for row, (i, _, b) in enumerate(chosen) if b == goals[i]]
        locs = np.concatenate([self.locs[i][a:b] for i, a, b in chosen])
        step = StepInput(
            slots=self.slots[rows],
            seq_lens=end,
            out_cache_loc=locs,
            extend=ExtendInput(
                input_ids=np.concatenate([np.array(self.prompts[i][a:b], np.int64) for i, a, b in chosen]),
                prefix_lens=first,
                extend_lens=end - first,
                sample_rows=np.array(sampled, np.int64),
            ),
            table_update=TableUpdate(np.concatenate([self._table_index(i, a, b) for i, a, b in chosen]), locs),
        )
        self.lens[rows] = end
        return [chosen[row][0] for row in sampled], self.runner.run(step)

    def _table_index(self, request: int, first: int, end: int) -> Ids:
        row = int(self.slots[request]) * self.runner.req_pool.context_len
        return np.arange(row + first, row + end, dtype=np.int64)

    def decode(self) -> list[int]:
        """One token for each request, from the token that was sampled last; waits for the device."""
        locs = np.array([loc[n] for loc, n in zip(self.locs, self.lens.tolist(), strict=True)], np.int32)
        self.lens = self.lens + 1
        result = self.runner.run(StepInput(slots=self.slots, seq_lens=self.lens, out_cache_loc=locs))
        self._wait(result)
        tokens: list[int] = result.next_token_ids[:, 0].tolist()
        return tokens

    def _wait(self, result: StepResult) -> None:
        result.wait()
        if self.runner.device == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        self.allocator.free(np.concatenate(self.locs))
        for slot in self.slots.tolist():
            self.runner.sampling_table.clear(slot)
            self.runner.req_pool.free(slot)
