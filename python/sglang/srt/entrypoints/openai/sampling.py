"""Converts OpenAI request fields to sampling parameters."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang.srt.entrypoints.http_errors import bad_request
from sglang.srt.entrypoints.openai.protocol import SamplingFields
from sglang.srt.sampling.limits import verify_grammar_value
from sglang.srt.sampling.sampling_params import MAX_COUNT

COMPLETION_DEFAULT_MAX_TOKENS = 16

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "logit_bias",
    "regex",
    "ebnf",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "n",
)
_TAG_FIELDS = ("type", "format", "structures", "triggers")
_RENAMED = {"min_tokens": "min_new_tokens", "seed": "sampling_seed"}


def _as_json(name: str, value: Any) -> str:
    """Returns the grammar of parameter `name` as text. Raises ApiError 400 for one that is too large."""
    if isinstance(value, str):
        return value
    try:
        verify_grammar_value(name, value)
    except ValueError as error:
        raise bad_request(str(error), param=name) from None
    return msgspec.json.encode(value).decode()


def _format_constraint(request: SamplingFields) -> dict[str, str]:
    """Returns the grammar that `response_format` asks for."""
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"json_schema": '{"type":"object"}'}
    if wanted.type == "json_schema":
        assert wanted.json_schema is not None and wanted.json_schema.schema is not None
        return {"json_schema": _as_json("json_schema", wanted.json_schema.schema)}
    tag = {name: value for name in _TAG_FIELDS if (value := getattr(wanted, name)) is not msgspec.UNSET}
    return {"structural_tag": _as_json("structural_tag", tag)}


def sampling_dict(request: SamplingFields, max_new_tokens: int | None) -> dict[str, Any]:
    """Returns the sampling parameters that the request sets; omitted ones keep the model's defaults.

    `max_new_tokens` of None, and any number beyond every context, mean: until the context is full.
    """
    params: dict[str, Any] = {"max_new_tokens": max_new_tokens and min(max_new_tokens, MAX_COUNT)}
    for name in _SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            params[name] = value
    for name, engine_name in _RENAMED.items():
        value = getattr(request, name)
        if value is not None:
            params[engine_name] = value
    for name in ("json_schema", "structural_tag"):
        value = getattr(request, name)
        if value is not None:
            params[name] = _as_json(name, value)
    for name, grammar in _format_constraint(request).items():
        if name in params:
            raise bad_request(f"response_format and {name} both constrain the output; give one of them.", param=name)
        params[name] = grammar
    return params
