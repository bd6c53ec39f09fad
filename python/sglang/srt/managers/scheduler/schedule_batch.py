"""The scheduler's view: one request (`Req`), the requests that decode (`RunningBatch`), and one launched step.

Lengths. `tokens` holds the prompt and the output tokens that the host has seen. `kv_len` counts the tokens whose KV has
been launched, `planned_len` the tokens that exist once every launched step has sampled. Steps are launched before the
previous one is read back, so `planned_len` may be one ahead of `len(tokens)`; `kv_len` never is, which is what makes it
safe to end a request at any moment: every KV slot it owns belongs to a token that the host knows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sglang.srt.managers.wire.io_struct import FinishReason, TokenizedGenerateReq
from sglang.srt.mem_cache.radix_node import Node
from sglang.srt.model_executor.step import StepInput, StepResult
from sglang.srt.sampling.logprobs import LogprobResult
from sglang.srt.sampling.output_logprobs import OutputLogprobs
from sglang.srt.sampling.sampling_params import NO_TOKEN

if TYPE_CHECKING:
    from sglang.srt.constrained.grammar import Grammar
    from sglang.srt.managers.scheduler.text_stop import TextStop


class Req:
    """One sequence, from its arrival to its last message."""

    def __init__(self, msg: TokenizedGenerateReq, seed: int, limit: int, stop_ids: frozenset[int]) -> None:
        self.rid = msg.rid
        self.params = msg.sampling_params
        self.stream = msg.stream
        self.seed = seed
        self.namespace = msg.cache_namespace
        self.stop_ids = stop_ids
        self.tokens = list(msg.input_ids)
        self._token_array = np.empty(0, np.int32)
        self.prompt_len = len(msg.input_ids)
        self.limit = limit
        """Longest length this request may reach, prompt included."""

        self.slot = 0
        self.kv_len = 0
        self.planned_len = self.prompt_len
        self.num_cached = 0
        """Leading tokens whose KV belongs to the radix tree, locked through `node`."""
        self.node: Node | None = None
        """Where the cached prefix ends: locked while the request has a slot; while it waits, as last matched."""
        self.hit_len = 0
        """Prompt tokens that the first admission found in the cache; reported to the client."""
        self.admitted = False
        self.num_retractions = 0
        self.queued_time = time.monotonic()
        """When it last entered the queue; this rank's clock, as `started_time`."""
        self.started_time = 0.0
        """When its first step was chosen; 0: none was."""

        self.return_logprob = msg.return_logprob
        wants_prompt = msg.return_logprob and msg.logprob_start_len >= 0
        self.logprob_start = msg.logprob_start_len if wants_prompt else self.prompt_len
        self.top_logprobs_num = msg.top_logprobs_num
        self.token_ids_logprob = msg.token_ids_logprob or []
        self.pending_logprobs = OutputLogprobs()
        if self.logprob_start == 0 and self.prompt_len:  # nothing predicts the first token
            self.pending_logprobs.input = [(None, self.tokens[0])]
            self.pending_logprobs.input_top = [None] if self.top_logprobs_num else None
            self.pending_logprobs.input_token_ids = [None] if self.token_ids_logprob else None
        self.prompt_logprobs_done = 0
        """Prompt tokens whose log probability has been collected (a retracted request computes its prompt again)."""

        self.grammar: Grammar | None = None
        self.text_stop: TextStop | None = None
        self.ending = False
        """The leader has decided its end, and the ranks have not heard of it yet."""
        self.finish: FinishReason | None = None
        self.sent_len = self.prompt_len
        self.first_message = True

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.logprob_start < self.prompt_len

    def token_array(self, length: int) -> np.ndarray:
        """The first `length` tokens, int32. Each is converted once: lists of 100,000 numbers take milliseconds."""
        done = len(self._token_array)
        if done < length:
            self._token_array = np.concatenate((self._token_array, np.array(self.tokens[done:], np.int32)))
        return self._token_array[:length]

    def matchable_len(self) -> int:
        """How many leading tokens may come from the cache: the last one must be computed to sample from it, and so must
        everything whose log probability is wanted and not collected yet."""
        limit = len(self.tokens) - 1
        if self.wants_prompt_logprobs and self.prompt_logprobs_done < self.prompt_len:
            limit = min(limit, max(self.logprob_start - 1, 0))
        return limit


class RunningBatch:
    """Requests in decode, with the arrays of the next step kept up to date instead of rebuilt."""

    def __init__(self) -> None:
        self.reqs: list[Req] = []
        self.slots = np.empty(0, np.int64)
        self.seq_lens = np.empty(0, np.int32)
        self.limits = np.empty(0, np.int32)
        """Both as of the steps launched so far: `seq_lens` counts the tokens whose KV is launched."""

    def __len__(self) -> int:
        return len(self.reqs)

    def add(self, reqs: list[Req]) -> None:
        self._rebuild(self.reqs + reqs)

    def drop_finished(self) -> None:
        """Forget requests that ended, and those whose last token is already on its way."""
        keep = [r for r in self.reqs if r.finish is None and r.planned_len < r.limit]
        if len(keep) < len(self.reqs):
            self._rebuild(keep)

    def remove(self, req: Req) -> None:
        self._rebuild([r for r in self.reqs if r is not req])

    def _rebuild(self, reqs: list[Req]) -> None:
        self.reqs = reqs
        self.slots = np.fromiter((r.slot for r in reqs), np.int64, len(reqs))
        self.seq_lens = np.fromiter((r.kv_len for r in reqs), np.int32, len(reqs))
        self.limits = np.fromiter((r.limit for r in reqs), np.int32, len(reqs))

    def advance(self) -> None:
        """Count one launched decode step."""
        self.seq_lens = self.seq_lens + 1
        for r in self.reqs:
            r.kv_len += 1
            r.planned_len += 1


@dataclass(slots=True)
class ScheduleBatch:
    """One step: the requests whose token it samples, in the order of the sampled rows."""

    step: StepInput
    sampled: list[Req]
    prompt_logprob_spans: list[tuple[Req, int, int]] = field(default_factory=list)
    """(request, first, end) prompt positions whose log probabilities this step computes, in row order."""
    result: StepResult | None = None

    def tokens(self) -> list[int]:
        """The sampled tokens; waits for the device, then files the step's log probabilities with their requests."""
        assert self.result is not None
        self.result.wait()
        tokens: list[int] = self.result.next_token_ids.tolist()
        if self.result.prompt_logprobs is not None:
            self._file_prompt_logprobs(self.result.prompt_logprobs)
        if self.result.logprobs is not None:
            for row, (req, token) in enumerate(zip(self.sampled, tokens, strict=True)):
                wanted = req.return_logprob and req.finish is None and req.prompt_len < req.limit
                if wanted and token != NO_TOKEN:
                    self.result.logprobs.add_output(req.pending_logprobs, row, row, token)
        return tokens

    def _file_prompt_logprobs(self, logprobs: LogprobResult) -> None:
        row = 0
        for i, (req, first, end) in enumerate(self.prompt_logprob_spans):
            logprobs.add_input(req.pending_logprobs, i, range(row, row + end - first), req.tokens[first:end])
            row += end - first
