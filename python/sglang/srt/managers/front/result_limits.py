"""Limits of the log probabilities and hidden states of a call: their JSON stays in memory until it was sent."""

from __future__ import annotations

import msgspec

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.logprob_budget import ASSUMED_OUTPUT
from sglang.srt.managers.wire.io_struct import TokenizedGenerateReq
from sglang.srt.sampling.hidden_states import MAX_CALL_BYTES, num_states

MAX_TOP_LOGPROBS = 1024
MAX_TOKEN_IDS_LOGPROB = 4096
MAX_LOGPROBS = 1 << 24
"""Log probabilities of one call, of its prompts and outputs: their JSON takes 0.5 to 1.2 GiB."""
MAX_REPEATED_LOGPROBS = 1 << 18
"""Of a stream whose events contain everything so far: the last ones have nine megabytes, which take the event loop four
milliseconds each."""


class ResultLimits:
    """The results of one call, which `add` counts for one prompt after the other."""

    def __init__(self, context_len: int, vocab_size: int, state_bytes: int | None, repeats: bool) -> None:
        """state_bytes: of the hidden states of a token; None: the server returns none. repeats: each event of the
        answer contains everything so far."""
        self._context_len, self._vocab_size, self._state_bytes = context_len, vocab_size, state_bytes
        self._max_logprobs = MAX_REPEATED_LOGPROBS if repeats else MAX_LOGPROBS
        self._repeated = " in a stream that repeats them" if repeats else ""
        self._num_logprobs = self._num_states = 0
        self.num_reserved = 0
        """Log probabilities for which the call needs room at first."""

    def add(self, request: TokenizedGenerateReq, num_samples: int, explicit_length: bool, hidden: bool) -> None:
        """Counts the results of a prompt's samples. Shrinks a length that the client did not ask for to what is
        allowed; otherwise raises RequestError (400). hidden: the prompt asks for hidden states."""
        self._check(request)
        if request.return_logprob:
            self._add_logprobs(request, num_samples, explicit_length)
        if hidden:
            self._add_states(request, num_samples, explicit_length)

    def _check(self, request: TokenizedGenerateReq) -> None:
        length, top, wanted = len(request.input_ids), request.top_logprobs_num, request.token_ids_logprob or []
        if not -1 <= request.logprob_start_len < length:
            raise RequestError(
                f"logprob_start_len must be in [-1, {length - 1}] for a prompt of {length} tokens, got "
                f"{request.logprob_start_len}."
            )
        maximum = min(self._vocab_size, MAX_TOP_LOGPROBS)
        if not 0 <= top <= maximum:
            raise RequestError(f"top_logprobs_num must be in [0, {maximum}], got {top}.")
        if len(wanted) > MAX_TOKEN_IDS_LOGPROB:
            raise RequestError(
                f"token_ids_logprob must have at most {MAX_TOKEN_IDS_LOGPROB} token ids, got {len(wanted)}."
            )
        if set(map(type, wanted)) - {int}:
            raise RequestError("token_ids_logprob must hold integers.")
        bad = next((i for i in wanted if not 0 <= i < self._vocab_size), None)
        if bad is not None:
            raise RequestError(f"token_ids_logprob must hold token ids in [0, {self._vocab_size - 1}], got {bad}.")

    def _add_logprobs(self, request: TokenizedGenerateReq, num_samples: int, explicit_length: bool) -> None:
        width = 1 + request.top_logprobs_num + len(request.token_ids_logprob or ())
        num_inputs = 0 if request.logprob_start_len < 0 else len(request.input_ids) - request.logprob_start_len
        maximum = (self._max_logprobs - self._num_logprobs) // num_samples // width - num_inputs
        length = self._longest_output(request, explicit_length, maximum)
        if length > maximum:
            raise RequestError(
                f"{num_inputs} tokens of the prompt and {length} of the output with {width} log probabilities each are "
                f"more than a call may have, {self._max_logprobs} for all its prompts and samples{self._repeated}; "
                "ask for fewer."
            )
        assumed = length if explicit_length else min(length, ASSUMED_OUTPUT)
        self._num_logprobs += num_samples * (num_inputs + length) * width
        self.num_reserved += num_samples * (num_inputs + assumed) * width

    def _add_states(self, request: TokenizedGenerateReq, num_samples: int, explicit_length: bool) -> None:
        if self._state_bytes is None:
            raise RequestError(
                "return_hidden_states needs a server that was started with --enable-return-hidden-states."
            )
        room = (MAX_CALL_BYTES // self._state_bytes - self._num_states) // num_samples
        num_inputs = len(request.input_ids)
        length = self._longest_output(request, explicit_length, room + 1 - num_inputs)
        states = num_states(num_inputs, num_inputs + length)
        if states > room:
            raise RequestError(
                f"{num_inputs} tokens of the prompt and {length} of the output with {self._state_bytes} bytes of "
                f"hidden states each are more than a call may have, {MAX_CALL_BYTES} bytes for all its prompts and "
                "samples; ask for fewer."
            )
        self._num_states += num_samples * states

    def _longest_output(self, request: TokenizedGenerateReq, explicit_length: bool, maximum: int) -> int:
        """Returns how many tokens the output may have. Shrinks a default length to `maximum`, if that is at least 1."""
        params = request.sampling_params
        length = self._context_len - len(request.input_ids)
        length = length if params.max_new_tokens is None else min(length, params.max_new_tokens)
        if length > maximum and not explicit_length and maximum > 0:
            length = maximum
            shorter = {"max_new_tokens": maximum, "min_new_tokens": min(maximum, params.min_new_tokens)}
            request.sampling_params = msgspec.structs.replace(params, **shorter)
        return length
