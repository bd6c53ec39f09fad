"""What happens to a step's tokens on the host: append, decide whether the request ends, and report.

Order of the checks for one token: stop token, complete grammar, stop string, length limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sglang.srt.managers.io_struct import (
    BatchTokenIDOut,
    DecodeOptions,
    FinishReason,
    OutputLogprobs,
    TokenMeta,
)
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.utils.stop_strings import search

REGEX_WINDOW = 1024
"""A stop_regex is searched in the last tokens only, so that its cost per token is bounded."""


class StopChecker:
    """Decides after each token whether a request has ended. `decode` turns token ids into text."""

    def __init__(self, decode: Callable[[list[int]], str] | None) -> None:
        self.decode = decode

    def finish_reason(self, req: Req) -> FinishReason | None:
        token = req.tokens[-1]
        if token in req.stop_ids:
            return FinishReason("stop", matched=token)
        if req.grammar is not None and req.grammar.is_terminated():
            return FinishReason("stop", matched=token)
        try:
            matched = self._matched_text(req)
        except TimeoutError:
            message = f"stop_regex takes too long to search: {', '.join(map(repr, req.params.stop_regex))}"
            return FinishReason("abort", message=message, status_code=400)
        if matched is not None:
            return FinishReason("stop", matched=matched)
        if len(req.tokens) >= req.limit:
            return FinishReason("length", length=req.output_len)
        return None

    def _matched_text(self, req: Req) -> str | None:
        if self.decode is None or not (req.params.stop or req.params.stop_regex):
            return None
        # A token holds at least one byte, so a stop string of n bytes ends within the last n tokens; one more token
        # in front keeps a character that the window would cut in half out of the way.
        window = REGEX_WINDOW if req.params.stop_regex else max(len(s.encode()) for s in req.params.stop) + 1
        tail = self.decode(req.tokens[max(req.prompt_len, len(req.tokens) - window) :])
        for stop in req.params.stop:
            if stop in tail:
                return stop
        for pattern in req.params.stop_regex:
            if search(pattern, tail):
                return pattern
        return None


def _take_logprobs(req: Req) -> OutputLogprobs | None:
    if not req.return_logprob:
        return None
    taken, req.pending_logprobs = req.pending_logprobs, OutputLogprobs()
    return taken


def _options(req: Req) -> DecodeOptions:
    p = req.params
    return DecodeOptions(p.skip_special_tokens, p.spaces_between_special_tokens, p.no_stop_trim, p.stop, p.stop_regex)


def output_message(reqs: Iterable[Req]) -> BatchTokenIDOut:
    """Everything of these requests that has not been sent yet."""
    out = BatchTokenIDOut(rids=[], new_ids=[], finish=[], meta=[], options=[], logprobs=[])
    for req in reqs:
        out.rids.append(req.rid)
        out.new_ids.append(req.tokens[req.sent_len :])
        out.finish.append(req.finish)
        out.meta.append(TokenMeta(req.prompt_len, req.output_len, req.hit_len, req.num_retractions))
        out.options.append(_options(req) if req.first_message else None)
        out.logprobs.append(_take_logprobs(req))
        req.sent_len = len(req.tokens)
        req.first_message = False
    return out
