"""Processes a step's tokens on the host: appends them, decides whether requests end, and reports.

Order of the checks for one token: stop token, complete grammar, stop string, length limit.

Tokens, grammars and lengths are the same on every rank, and so are decisions based on them. How long a search or a
grammar may take depends on a clock: with tensor parallelism only the leader looks at text and clocks, and its decisions
reach every rank, itself included, with the messages before the next step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang.srt.managers.scheduler.counters import APPENDED, CHECKED, STREAMED
from sglang.srt.managers.scheduler.leader import EndReq, LeaderDecision, SlowMask
from sglang.srt.managers.scheduler.schedule_batch import Req, SampledTokens
from sglang.srt.managers.scheduler.text_stop import TextStop
from sglang.srt.managers.wire.io_struct import BatchTokenIDOut, DecodeOptions, FinishReason, TokenMeta
from sglang.srt.sampling.hidden_states import num_states
from sglang.srt.sampling.output_logprobs import OutputLogprobs
from sglang.srt.utils.stop_strings import shared_allowance
from sglang.srt.utils.text_stream import TextDecoder

if TYPE_CHECKING:
    from sglang.srt.constrained.grammar import Grammar

Counts = npt.NDArray[np.int32]

TOO_SLOW_GRAMMAR = (
    "The grammar takes too long to follow: it allows the same text in too many ways. Remove the ambiguity, "
    "such as rules that repeat themselves without a separator."
)
SLOW_MASK_MS = 0.5
"""Milliseconds a token beyond which the grammar of a request is slow to follow; ordinary ones take tens of
microseconds."""
MESSAGE_BYTES = 1 << 18
"""Bytes of log probabilities and hidden states behind which a message takes no further request. Each process that a
message comes through copies it at once."""
STUCK_GRAMMAR = "The grammar came to a point where no token of the vocabulary can follow; give it a way on."


class StopChecker:
    """Decides after each token whether a request has ended."""

    def __init__(self, decoder: TextDecoder | None, tell: Callable[[LeaderDecision], None] | None = None) -> None:
        """decoder: None on ranks that do not look at text, and without a tokenizer. tell: sends a decision that only
        this rank can take to all ranks before the next step; None with a single rank, whose decisions take effect at
        once."""
        self._decoder = decoder
        self._tell = tell
        self._searching = shared_allowance()

    def finish_reason(self, req: Req) -> FinishReason | None:
        """Returns why the request has ended; None if it goes on, or if its end is on its way to all ranks
        (`req.pending_finish`)."""
        output = req.output
        token = output[-1]
        if token in req.stop_ids:
            return FinishReason("stop", matched=token)
        if req.grammar is not None and req.grammar.is_terminated():
            return FinishReason("stop", matched=token)
        reason = self._leader_reason(req)
        if req.prompt_len + len(output) >= req.limit:  # every rank ends it; only the leader's reason is sent
            return reason or FinishReason("length", length=req.output_len)
        if reason is not None and self._tell is not None:
            req.pending_finish, req.pending_output_len = reason, len(output)
            self._tell(EndReq(req.rid, reason))
            return None
        return reason

    def _leader_reason(self, req: Req) -> FinishReason | None:
        if self._decoder is None or req.pending_finish is not None:
            return None
        if req.grammar is not None and req.grammar.allowance.exhausted:
            return FinishReason("abort", message=TOO_SLOW_GRAMMAR, status_code=400)
        if req.grammar is not None:
            self._tell_slow_mask(req, req.grammar.token_s * 1000)
        if not (req.params.stop or req.params.stop_regex):
            return None
        try:
            if req.text_stop is None:
                req.text_stop = TextStop(self._decoder, req.params, self._searching)
            matched = req.text_stop.push(req.tokens[-1])
        except ValueError as error:
            return FinishReason("abort", message=str(error), status_code=400)
        except TimeoutError:
            message = f"stop_regex takes too long to search: {', '.join(map(repr, req.params.stop_regex))}"
            return FinishReason("abort", message=message, status_code=400)
        return None if matched is None else FinishReason("stop", matched=matched)

    def _tell_slow_mask(self, req: Req, milliseconds: float) -> None:
        """Tells all ranks how long the request's grammar takes for a token, when that has changed much."""
        if req.mask_ms / 4 <= milliseconds <= (req.mask_ms or SLOW_MASK_MS):
            return
        rounded = 0 if milliseconds <= SLOW_MASK_MS else 1 << max(0, math.ceil(math.log2(milliseconds)))
        if self._tell is None:
            req.set_mask_ms(rounded)
        else:
            self._tell(SlowMask(req.rid, rounded))


def rejected_token(grammar: Grammar) -> FinishReason:
    """Returns the finish reason for a sampled token that the grammar rejects: no token was allowed, or the mask was
    wrong."""
    if grammar.is_stuck():
        return FinishReason("abort", message=STUCK_GRAMMAR, status_code=400)
    return FinishReason("abort", message="The grammar rejected a sampled token.", status_code=500)


def _take_logprobs(req: Req) -> OutputLogprobs:
    taken = req.pending_logprobs
    req.pending_logprobs = OutputLogprobs(taken.num_top, taken.named)
    return taken


def _meta(req: Req, length: int) -> TokenMeta:
    """length: output tokens up to this message."""
    drafts = req.drafts if req.finish is not None and req.drafts.steps else None
    return TokenMeta(
        req.prompt_len, length, req.hit_len, req.num_retractions, req.started_time, req.first_token_time,
        drafts=drafts, host_tokens=req.host_len, stored_tokens=req.stored_len,
        weight_versions=req.weight_versions,
    )  # fmt: skip


def _options(req: Req) -> DecodeOptions:
    p = req.params
    return DecodeOptions(p.skip_special_tokens, p.spaces_between_special_tokens, p.no_stop_trim, p.stop, p.stop_regex)


class StreamedTokens(NamedTuple):
    """New tokens of streams of which there is nothing else to tell."""

    rids: list[str]
    new_ids: list[list[int]]
    drafts: Counts
    """[N, 3] counts of their draft tokens."""
    num_appended: int
    """Tokens that were appended with them, also to requests that stream nothing now."""


_NO_STREAMS = StreamedTokens([], [], np.empty((0, 3), np.int32), 0)


def append_tokens(reqs: list[Req], sampled: SampledTokens, interval: int, report: list[Req]) -> StreamedTokens:
    """Appends the tokens of a step's requests that need no check. These may be all running requests in each step, so no
    function is called for any. Adds to `report` those with tokens for a message, of at least `interval` tokens, and
    returns the others that stream."""
    quiet, quiet_ids = sampled.handled(reqs, APPENDED)
    for req, ids in zip(quiet, quiet_ids, strict=True):
        req.output += ids
        if req.stream:
            req.num_unsent += len(ids)
            if req.num_unsent >= interval:
                report.append(req)
    streams, new_ids = sampled.handled(reqs, STREAMED)
    for req, ids in zip(streams, new_ids, strict=True):
        req.output += ids
    num_appended = int(sampled.counts[sampled.handling != CHECKED].sum())
    drafts = sampled.drafts[sampled.handling == STREAMED]
    return StreamedTokens([req.rid for req in streams], new_ids, drafts, num_appended)


def _drafts(reqs: list[Req], streamed: StreamedTokens) -> bytes:
    """Returns `BatchTokenIDOut.drafts`. Requests that have ended have no slot, and say it in their `meta`."""
    drafts = streamed.drafts
    if reqs:
        drafts = np.concatenate((drafts, reqs[0].counters.drafts[[req.slot for req in reqs]]))
    return drafts.tobytes() if drafts.any() else b""


def output_messages(reqs: list[Req], streamed: StreamedTokens = _NO_STREAMS) -> Iterator[BatchTokenIDOut]:
    """Yields messages with everything of these requests that has not been sent yet, and with `streamed`. A message ends
    with the request whose log probabilities or hidden states make it MESSAGE_BYTES long."""
    first, num_bytes = 0, 0
    for end, req in enumerate(reqs, 1):
        if not req.return_logprob and req.hidden is None:
            continue
        num_bytes += req.num_pending_bytes
        if num_bytes >= MESSAGE_BYTES:
            yield _output_message(reqs[first:end], streamed)
            first, num_bytes, streamed = end, 0, _NO_STREAMS
    if first < len(reqs) or streamed.rids:
        yield _output_message(reqs[first:], streamed)


def _output_message(reqs: list[Req], streamed: StreamedTokens) -> BatchTokenIDOut:
    # These may be all running requests in each step, so no function is called for one that just goes on.
    lengths = [len(r.output) if r.pending_finish is None else r.pending_output_len for r in reqs]
    first: list[Any] = [None] * len(streamed.rids)
    starts = [len(r.output) - r.num_unsent if r.stream or r.return_logprob else 0 for r in reqs]
    new_ids = [r.output[start:length] for r, start, length in zip(reqs, starts, lengths, strict=True)]
    meta = [
        _meta(r, length) if r.meta_changed or r.finish is not None else None
        for r, length in zip(reqs, lengths, strict=True)
    ]
    out = BatchTokenIDOut(
        rids=streamed.rids + [r.rid for r in reqs],
        new_ids=streamed.new_ids + new_ids,
        finish=first + [r.finish for r in reqs],
        meta=first + meta,
        options=first + [_options(r) if r.first_message else None for r in reqs],
        logprobs=first + [_take_logprobs(r) if r.return_logprob else None for r in reqs],
        drafts=_drafts(reqs, streamed),
    )
    for req, length in zip(reqs, lengths, strict=True):
        if req.hidden is not None and req.finish is not None:
            out.hidden[req.rid] = req.hidden.states_before(num_states(req.prompt_len, req.prompt_len + length))
        req.num_unsent, req.first_message, req.meta_changed = len(req.output) - length, False, False
    return out
