"""Checks of arriving requests: too long, too many, a duplicate id, or too much memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang.srt.managers.scheduler.counters import Counters
from sglang.srt.managers.scheduler.media_steps import MediaRefused, MediaSteps
from sglang.srt.managers.scheduler.prompt_table import MAX_PROMPT_BYTES, PromptTable
from sglang.srt.managers.scheduler.schedule_batch import Req
from sglang.srt.managers.wire.io_struct import FinishReason, TokenizedGenerateReq
from sglang.srt.mem_cache.kv_table import KVTable
from sglang.srt.sampling.hidden_states import MAX_HELD_BYTES, VALUE_BYTES

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

MAX_QUEUED_REQUESTS = 1 << 16
"""Limit of the queue without --max-queued-requests; every queue is bounded."""
MAX_PARAMETER_BYTES = 512 << 20
"""Limit of the grammars, stop strings and other parameters of all requests that run or wait, on each rank: every sample
of a prompt has its own copy."""


@dataclass(slots=True)
class RequestTotals:
    """What the current requests of a process hold in main memory, in all attention groups together."""

    prompts: PromptTable = field(default_factory=PromptTable)
    hidden_rows: int = 0
    """Hidden states that the requests may come to hold."""
    parameter_bytes: int = 0

    def add(self, req: Req) -> None:
        """Counts what a request holds besides its prompt, which `prompts` counts."""
        self.hidden_rows += req.max_hidden_rows
        self.parameter_bytes += req.parameter_bytes

    def remove(self, req: Req) -> None:
        """Ends what `add` counted."""
        self.hidden_rows -= req.max_hidden_rows
        self.parameter_bytes -= req.parameter_bytes


@dataclass(frozen=True, slots=True)
class Intake:
    """Accepts or refuses arriving requests. max_queued: None means MAX_QUEUED_REQUESTS. reqs: all current requests by
    id."""

    max_queued: int | None
    runner: ModelRunner
    kv: KVTable
    media: MediaSteps
    reqs: Mapping[str, Req]
    totals: RequestTotals
    counters: Counters

    def request_of(
        self,
        msg: TokenizedGenerateReq,
        seed: int,
        stop_ids: frozenset[int],
        num_queued: int,
    ) -> tuple[Req, FinishReason | None]:
        """Returns the request of a message, and why it is refused (the caller must then give its prompt back to
        `totals.prompts`); None: it may enter the queue, which has `num_queued`. seed: used if the request has none."""
        wanted, length = msg.sampling_params.max_new_tokens, len(msg.input_ids)
        # Draft tokens may lie beyond the end.
        capacity = self.kv.max_request_len - (self.runner.tokens_per_step - 1)
        media, message = None, ""
        try:
            media = self.media.plan_prompt(msg)
        except MediaRefused as error:
            message = str(error)
        prompt = self.totals.prompts.take(msg.input_ids, media is not None)
        limit = min(capacity, length + wanted if wanted is not None else capacity)
        req = Req(msg, seed, limit, stop_ids, media, prompt, self.counters)
        if length > capacity or (length == capacity and wanted != 0):
            message = (
                f"The prompt has {length} tokens, but this server holds at most {capacity} tokens of one request"
                f" (context length {self.runner.plan.context_len}, KV cache {self.kv.size} tokens)."
            )
        if msg.rid in self.reqs:
            message = f"A request with rid {msg.rid!r} is running."
        if message:
            return req, FinishReason("abort", message=message, status_code=400)
        if message := self._too_much(req, num_queued):
            return req, FinishReason("abort", message=message, status_code=503)
        return req, None

    def _too_much(self, req: Req, num_queued: int) -> str:
        """Returns which limit of the server one more request would exceed; empty: none."""
        maximum = self.max_queued or MAX_QUEUED_REQUESTS
        if num_queued >= maximum:
            return f"The queue is full ({maximum} requests)."
        if self.totals.prompts.num_bytes > MAX_PROMPT_BYTES and self.totals.prompts.num_users > 1:
            return f"The prompts that run or wait may have {MAX_PROMPT_BYTES >> 20} MiB; send this one again later."
        if req.parameter_bytes and self.totals.parameter_bytes + req.parameter_bytes > MAX_PARAMETER_BYTES:
            return (
                "The grammars, stop strings, stop_token_ids and logit_bias of the requests that run or wait may have"
                f" {MAX_PARAMETER_BYTES >> 20} MiB; send this one again later."
            )
        if not req.max_hidden_rows:
            return ""
        values = (self.totals.hidden_rows + req.max_hidden_rows) * self.runner.plan.description.hidden_size
        if values * VALUE_BYTES <= MAX_HELD_BYTES:
            return ""
        return f"The hidden states of all requests together may reach {MAX_HELD_BYTES >> 20} MiB; try again later."
