"""Processing of a step's tokens on the host: append, decide whether the request ends, and report.

Order of the checks for one token: stop token, complete grammar, stop string, length limit.

Tokens, grammars and lengths are the same on every rank, and so is what they decide. How long a search or a grammar may
take is decided by a clock: with tensor parallelism only the leader looks at text and clocks, and its decisions reach
every rank, itself included, with the messages before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from sglang.srt.managers.scheduler.leader import EndReq
from sglang.srt.managers.scheduler.schedule_batch import Req
from sglang.srt.managers.scheduler.text_stop import TextStop
from sglang.srt.managers.wire.io_struct import BatchTokenIDOut, DecodeOptions, FinishReason, TokenMeta
from sglang.srt.sampling.hidden_states import num_states
from sglang.srt.sampling.output_logprobs import OutputLogprobs
from sglang.srt.utils.text_stream import TextDecoder

if TYPE_CHECKING:
    from sglang.srt.constrained.grammar import Grammar

TOO_SLOW_GRAMMAR = (
    "The grammar takes too long to follow: it allows the same text in too many ways. Remove the ambiguity, "
    "such as rules that repeat themselves without a separator."
)
STUCK_GRAMMAR = "The grammar came to a point where no token of the vocabulary can follow; give it a way on."


class StopChecker:
    """Decides after each token whether a request has ended."""

    def __init__(self, decoder: TextDecoder | None, tell: Callable[[EndReq], None] | None = None) -> None:
        """decoder: None on ranks that do not look at text, and without a tokenizer. tell: brings a decision that only
        this rank can take to all of them before the next step; None: alone, decisions take effect at once."""
        self._decoder = decoder
        self._tell = tell

    def finish_reason(self, req: Req) -> FinishReason | None:
        """None also for a request whose end is on its way to all ranks (`req.pending_finish`)."""
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
            req.pending_finish, req.pending_finish_len = reason, len(req.tokens)
            self._tell(EndReq(req.rid, reason))
            return None
        return reason

    def _leader_reason(self, req: Req) -> FinishReason | None:
        if self._decoder is None or req.pending_finish is not None:
            return None
        if req.grammar is not None and req.grammar.allowance.exhausted:
            return FinishReason("abort", message=TOO_SLOW_GRAMMAR, status_code=400)
        if not (req.params.stop or req.params.stop_regex):
            return None
        try:
            if req.text_stop is None:
                req.text_stop = TextStop(self._decoder, req.params)
            matched = req.text_stop.push(req.tokens[-1])
        except ValueError as error:
            return FinishReason("abort", message=str(error), status_code=400)
        except TimeoutError:
            message = f"stop_regex takes too long to search: {', '.join(map(repr, req.params.stop_regex))}"
            return FinishReason("abort", message=message, status_code=400)
        return None if matched is None else FinishReason("stop", matched=matched)


def rejected_token(grammar: Grammar) -> FinishReason:
    """Returns the finish reason for a sampled token that the grammar does not take: because it takes none, or because
    its mask was wrong."""
    if grammar.is_stuck():
        return FinishReason("abort", message=STUCK_GRAMMAR, status_code=400)
    return FinishReason("abort", message="The grammar rejected a sampled token.", status_code=500)


def _take_logprobs(req: Req) -> OutputLogprobs:
    taken, req.pending_logprobs = req.pending_logprobs, OutputLogprobs()
    return taken


def _options(req: Req) -> DecodeOptions:
    p = req.params
    return DecodeOptions(p.skip_special_tokens, p.spaces_between_special_tokens, p.no_stop_trim, p.stop, p.stop_regex)


def output_message(reqs: Iterable[Req]) -> BatchTokenIDOut:
    """Everything of these requests that has not been sent yet."""
    out = BatchTokenIDOut(rids=[], new_ids=[], finish=[], meta=[], options=[], logprobs=[], hidden={})
    for req in reqs:  # up to all running requests, each step
        prompt_len, output = req.prompt_len, req.output
        length = prompt_len + len(output) if req.pending_finish is None else req.pending_finish_len
        meta = TokenMeta(prompt_len, length - prompt_len, req.hit_len, req.num_retractions, req.started_time)
        if req.host_len is not None:
            meta.host_tokens, meta.stored_tokens = req.host_len, req.stored_len
        if req.first_token_time:
            meta.first_token_time = req.first_token_time
        if req.drafts.steps:
            meta.drafts = req.drafts.copy(with_histogram=req.finish is not None)
        out.rids.append(req.rid)
        out.new_ids.append(output[req.sent_len - prompt_len : length - prompt_len])
        out.finish.append(req.finish)
        out.meta.append(meta)
        out.options.append(_options(req) if req.first_message else None)
        out.logprobs.append(_take_logprobs(req) if req.return_logprob else None)
        if req.hidden is not None and req.finish is not None:
            out.hidden[req.rid] = req.hidden.up_to(num_states(req.prompt_len, length))
        req.sent_len = length
        req.first_message = False
    return out
