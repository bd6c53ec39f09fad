"""What a request that comes may not be: too long, one too many, another of the same id, or one that would hold too
much."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.managers.scheduler.media_steps import MediaRefused
from sglang.srt.managers.scheduler.schedule_batch import Req
from sglang.srt.managers.wire.io_struct import FinishReason, TokenizedGenerateReq
from sglang.srt.sampling.hidden_states import MAX_HELD_BYTES, VALUE_BYTES

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.scheduler import Scheduler

MAX_QUEUED_REQUESTS = 1 << 16
"""Limit of the queue when --max-queued-requests is not given: no queue is unbounded."""


def request_of(
    scheduler: Scheduler, msg: TokenizedGenerateReq, seed: int, stop_ids: frozenset[int]
) -> tuple[Req, FinishReason | None]:
    """Returns the request of a message, and why it is refused; None: it may enter the queue. seed: of its samples,
    where it names none."""
    wanted, length = msg.sampling_params.max_new_tokens, len(msg.input_ids)
    # Guesses may lie beyond the end.
    capacity = scheduler.kv.max_request_len - (scheduler.runner.tokens_per_step - 1)
    media, message = None, ""
    try:
        media = scheduler.media.of_prompt(msg)
    except MediaRefused as error:
        message = str(error)
    req = Req(msg, seed, min(capacity, length + wanted if wanted is not None else capacity), stop_ids, media)
    if length > capacity or (length == capacity and wanted != 0):
        message = (
            f"The prompt has {length} tokens, but this server holds at most {capacity} tokens of one request (context "
            f"length {scheduler.plan.context_len}, KV cache {scheduler.kv.size} tokens)."
        )
    if msg.rid in scheduler.reqs:
        message = f"A request with rid {msg.rid!r} is running."
    if message:
        return req, FinishReason("abort", message=message, status_code=400)
    if message := _too_much(scheduler, req):
        return req, FinishReason("abort", message=message, status_code=503)
    return req, None


def _too_much(scheduler: Scheduler, req: Req) -> str:
    """What this server has too much of for one more request; empty: it may come."""
    queued = scheduler.args.max_queued_requests or MAX_QUEUED_REQUESTS
    if len(scheduler.waiting) + len(scheduler.compiling) >= queued:
        return f"The queue is full ({queued} requests)."
    if not req.most_hidden:
        return ""
    values = (scheduler.held_hidden + req.most_hidden) * scheduler.plan.description.hidden_size
    if values * VALUE_BYTES <= MAX_HELD_BYTES:
        return ""
    return f"The hidden states of all requests together may reach {MAX_HELD_BYTES >> 20} MiB; try again later."
