"""Numbers at and beyond the ends of every machine type, in every field that takes a number."""

from __future__ import annotations

import json
from collections.abc import Iterator

from fuzz.hostile_bodies import CHAT, COMPLETIONS, GENERATE
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


PROMPTS = {CHAT: '"messages": [{"role": "user", "content": "a"}]'}
if LONG:
    PROMPTS[COMPLETIONS] = '"prompt": "a"'
RID = "the same"


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
