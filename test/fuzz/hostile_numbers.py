"""Numbers at and beyond the ends of every machine type, in every field that takes a number."""

from __future__ import annotations

import json
from collections.abc import Iterator

from fuzz.hostile_bodies import CHAT, COMPLETIONS, GENERATE, SESSIONS
from fuzz.scale import LONG

BITS, STEPS = ((7, 15, 31, 32, 53, 63, 64, 65), (-1, 0, 1)) if LONG else ((31, 63, 64), (0,))
NUMBERS = [
    *(str(sign * (1 << bits) + step) for bits in BITS for sign in (1, -1) for step in STEPS),
    *("0", "-1", "0.5", "1e308", "1e400", "1" + "0" * 400, "NaN", "-Infinity", "true", "null", '"1"', "[]"),
    *(("-0", "2", "-0.5", "5e-324", "-1e400", "1E+2", "-1" + "0" * 400, "{}") if LONG else ()),
]
"""As they stand in JSON, also where that is no JSON."""

SAMPLING_FIELDS = [
    *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty"),
    *("presence_penalty", "repetition_penalty", "sampling_seed", "n", "ignore_eos"),
]
NATIVE_FIELDS = ["logprob_start_len", "top_logprobs_num", "priority", "return_logprob", "token_ids_logprob"]
OPENAI_FIELDS = [
    *("max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logprobs", "top_logprobs", "best_of", "priority"),
]


SESSION_FIELDS = ["offset", "replace", "drop_previous_output", "rid", "id"]
MESSAGES_FIELDS = ["max_tokens", "temperature", "top_p", "top_k"]
RESPONSES_FIELDS = ["max_output_tokens", "temperature", "top_p", "top_k", "max_tool_calls", "priority"]
OLLAMA_OPTIONS = ["seed", "num_predict", "top_k", "top_p", "temperature", "repeat_penalty", "num_ctx"]
THINKING_FIELDS = ["thinking_budget", "max_thinking_tokens", "thinking_token_budget"]
PROMPTS = {CHAT: '"messages": [{"role": "user", "content": "a"}]'}
if LONG:
    PROMPTS[COMPLETIONS] = '"prompt": "a"'
RID = "the same"
MESSAGES, RESPONSES, EMBEDDINGS = "/v1/messages", "/v1/responses", "/v1/embeddings"


def numbered_bodies(number: str) -> Iterator[tuple[str, str, bytes]]:
    """A number in every field that takes one: the name of the field, the path and the body. All have the same rid."""

    def native(field: str, fields: str, params: str = "") -> tuple[str, str, bytes]:
        params = f'{{"max_new_tokens": 1{params}}}'
        return field, GENERATE, f'{{{fields}, "rid": "{RID}", "sampling_params": {params}}}'.encode()

    for field in SAMPLING_FIELDS:
        yield native(field, '"text": "a"', f', "{field}": {number}')
    yield native("stop_token_ids", '"text": "a"', f', "stop_token_ids": [{number}]')
    yield native("logit_bias", '"text": "a"', f', "logit_bias": {{"5": {number}, {json.dumps(number)}: 1}}')
    for field in NATIVE_FIELDS:
        yield native(field, f'"text": "a", "{field}": {number}')
    yield native("input_ids", f'"input_ids": [{number}]')
    for field in OPENAI_FIELDS:
        for path, prompt in PROMPTS.items():
            yield field, path, f'{{{prompt}, "rid": "{RID}", "max_tokens": 1, "{field}": {number}}}'.encode()
    yield "tokens", "/detokenize", f'{{"tokens": [{number}]}}'.encode()
    yield from numbers_in_sessions(number)
    yield from numbers_in_other_forms(number)


def numbers_in_sessions(number: str) -> Iterator[tuple[str, str, bytes]]:
    """In what opens a session, in what goes on from one, and in the prompt that does."""
    for field in ("capacity_of_str_len", "timeout", "streaming", "session_id"):
        yield field, "/open_session", f'{{"capacity_of_str_len": 9, "{field}": {number}}}'.encode()
    yield "session_id", "/close_session", f'{{"session_id": {number}}}'.encode()
    for session in SESSIONS if LONG else ["tree"]:
        for field in SESSION_FIELDS:
            params = f'{{"id": "{session}", "{field}": {number}}}'
            body = f'"text": "a", "session_params": {params}, "sampling_params": {{"max_new_tokens": 1}}'
            yield f"session_params.{field} of {session}", GENERATE, f"{{{body}}}".encode()
        params = f'"session_params": {{"id": "{session}"}}, "sampling_params": {{"max_new_tokens": 1}}'
        for ids in (f"[{number}]", f"[5, {number}]", f"[5, [{number}]]", f"[[{number}]]"):
            yield f"input_ids {ids[:20]} of {session}", GENERATE, f'{{"input_ids": {ids}, {params}}}'.encode()
        for field in NATIVE_FIELDS:
            body = f'"text": "a", "{field}": {number}, {params}'
            yield f"{field} in {session}", GENERATE, f"{{{body}}}".encode()


def numbers_in_other_forms(number: str) -> Iterator[tuple[str, str, bytes]]:
    """Anthropic's, Responses, Ollama's, embeddings, and what ends thoughts."""
    user = '"messages": [{"role": "user", "content": "a"}]'
    for field in MESSAGES_FIELDS:
        yield field, MESSAGES, f'{{{user}, "max_tokens": 1, "{field}": {number}}}'.encode()
    for max_tokens in (1, 5000):
        thinking = f'"thinking": {{"type": "enabled", "budget_tokens": {number}}}, "max_tokens": {max_tokens}'
        yield "thinking.budget_tokens", MESSAGES, f"{{{user}, {thinking}}}".encode()
    for field in THINKING_FIELDS:
        yield field, CHAT, f'{{{user}, "max_tokens": 1, "{field}": {number}}}'.encode()
    for field in RESPONSES_FIELDS:
        yield field, RESPONSES, f'{{"input": "a", "max_output_tokens": 1, "{field}": {number}}}'.encode()
    for field in OLLAMA_OPTIONS:
        options = f'"options": {{"num_predict": 1, "{field}": {number}}}'
        yield f"options.{field}", "/api/chat", f'{{{user}, "stream": false, {options}}}'.encode()
    yield "keep_alive", "/api/generate", f'{{"prompt": "a", "stream": false, "keep_alive": {number}}}'.encode()
    yield "dimensions", EMBEDDINGS, f'{{"input": "a", "dimensions": {number}}}'.encode()
    yield "input", EMBEDDINGS, f'{{"input": [{number}]}}'.encode()
    yield "top_n", "/v1/rerank", f'{{"query": "a", "documents": ["b"], "top_n": {number}}}'.encode()
    yield "label_token_ids", "/v1/score", f'{{"query": "a", "items": "b", "label_token_ids": [{number}]}}'.encode()
