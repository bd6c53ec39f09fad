"""The pieces of the OpenAI endpoints: events, usage, log probabilities, and the request's sampling parameters."""

from __future__ import annotations

import json
import re
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest

from sglang.srt.entrypoints.http_body import parse_body
from sglang.srt.entrypoints.http_errors import ApiError, error_body, error_event
from sglang.srt.entrypoints.native_reasoning import _grammar_after_thoughts
from sglang.srt.entrypoints.openai import chat_output, serving_completions
from sglang.srt.entrypoints.openai.chat_output import ChatFormats
from sglang.srt.entrypoints.openai.chunks import ChatChunks, CompletionChunks, finish_fields
from sglang.srt.entrypoints.openai.logprobs import CompletionLogprobs, chat_logprobs
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.entrypoints.openai.sampling import sampling_dict
from sglang.srt.entrypoints.openai.usage import UsageCounter
from sglang.srt.function_call.model_formats import ModelFormats
from sglang.srt.function_call.parser import parse
from sglang.srt.function_call.registry import REASONING_FORMATS
from sglang.srt.managers.wire.io_struct import TokenMeta
from sglang.srt.sampling import output_logprobs
from sglang.srt.sampling.limits import MAX_GRAMMAR_LENGTH
from sglang.srt.utils import json_list
from sglang.srt.utils.json_nesting import MAX_JSON_NESTING
from srt.sampling.packed_logprobs import packed

USER = [{"role": "user", "content": "hi"}]
AWKWARD = 'quote " backslash \\ newline \n emoji 🙂 separator \u2028 null \x00'


def event(data: bytes) -> dict[str, Any]:
    assert data.startswith(b"data: ") and data.endswith(b"\n\n") and data.count(b"\n\n") == 1
    parsed: dict[str, Any] = json.loads(data[6:])
    return parsed


def test_schemas_as_text_have_the_limit_of_bodies() -> None:
    def schema(levels: int) -> dict[str, str]:
        return {"json_schema": '{"a":' * levels + "1" + "}" * levels}

    _grammar_after_thoughts(schema(MAX_JSON_NESTING), REASONING_FORMATS["deepseek-v4"])
    with pytest.raises(ApiError, match=f"more than {MAX_JSON_NESTING} levels"):
        _grammar_after_thoughts(schema(MAX_JSON_NESTING + 1), REASONING_FORMATS["deepseek-v4"])


def test_a_schema_beyond_the_limit_is_not_parsed() -> None:
    too_long = {"json_schema": "[" * (MAX_GRAMMAR_LENGTH + 1)}  # parsing it would raise
    assert _grammar_after_thoughts(too_long, REASONING_FORMATS["deepseek-v4"]) is too_long


def test_chat_events() -> None:
    chunks = ChatChunks("chatcmpl-1", 12, "a model")
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 12, "model": "a model"}
    role = event(chunks.role(1))
    assert role == {
        **head,
        "choices": [
            {
                "index": 1,
                "delta": {"role": "assistant", "content": "", "reasoning_content": None},
                "logprobs": None,
                "finish_reason": None,
                "matched_stop": None,
            }
        ],
        "usage": None,
    }
    text = event(chunks.text(0, AWKWARD))
    assert text["choices"][0]["delta"] == {"content": AWKWARD, "reasoning_content": None}
    last = event(chunks.finish(0, "stop", 7))
    assert last["choices"][0]["finish_reason"] == "stop" and last["choices"][0]["matched_stop"] == 7
    totals = event(chunks.totals({"prompt_tokens": 3}))
    assert totals == {**head, "choices": [], "usage": {"prompt_tokens": 3}}


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("hermes", "call_[0-9a-f]{24}"), ("kimi_k2", r"functions\.f:3"), ("mistral", "[0-9a-z]{9}")],
)
def test_ids_of_calls_are_what_the_template_takes(name: str, pattern: str) -> None:
    before = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}] * 2}
    formats = ChatFormats(ModelFormats(name), ChatCompletionRequest(messages=[*USER, before]), "")
    assert re.fullmatch(pattern, formats.call_id("f", 1))


@pytest.mark.parametrize("name", ["minimax", "deepseek-r1", "qwen3"])
@pytest.mark.parametrize(
    ("begun", "parsed"),
    [
        ("It is", ("", " 7 now")),
        ("<think>Six</think>It is", ("", " 7 now")),
        ("<think>Six", ("7 now", "")),
    ],
)
def test_a_message_that_is_continued_is_thought_only_within_its_thoughts(
    name: str, begun: str, parsed: tuple[str, str]
) -> None:
    messages = [*USER, {"role": "assistant", "content": begun}]
    body = ChatCompletionRequest(messages=messages, continue_final_message=True, regex="x")
    formats = ChatFormats(ModelFormats(None, name), body, "<user>hi<assistant>\n" + begun)
    output = parse(formats.new_parser(), " 7 now")
    assert (output.reasoning, output.text) == parsed
    params: dict[str, Any] = {"regex": "x"}
    formats.constrain(params)
    assert ('"end":"</think>"' in params["structural_tag"]) == bool(parsed[0])


@pytest.mark.parametrize("parameters", [None, {}, {"description": "nothing"}, {"$schema": "x", "title": "f"}])
@pytest.mark.parametrize("strict", [False, True])
def test_forced_arguments_are_an_object(parameters: dict[str, Any] | None, strict: bool) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
    for choice in ("required", "auto"):
        body = ChatCompletionRequest(messages=USER, tools=[tool], tool_choice=choice, parallel_tool_calls=False)
        params: dict[str, Any] = {}
        ChatFormats(ModelFormats("hermes"), body, "").constrain(params)
        assert '"json_schema":{"type":"object","additionalProperties":true' in params["structural_tag"]


def test_completion_events() -> None:
    chunks = CompletionChunks("cmpl-1", 12, "m")
    assert event(chunks.text(2, AWKWARD))["choices"] == [
        {"index": 2, "text": AWKWARD, "logprobs": None, "finish_reason": None, "matched_stop": None}
    ]
    ended = event(chunks.text(0, "", finish=finish_fields("stop", "\n")))
    assert ended["choices"][0]["matched_stop"] == "\n"


def test_usage_counts_a_prompt_once_for_its_samples() -> None:
    usage = UsageCounter(num_choices=2, report_cached=True)
    for index in range(4):
        usage.update(index, TokenMeta(10, 1, 4))
        usage.update(index, TokenMeta(10, 5, 4))
    assert usage.as_dict() == {
        "prompt_tokens": 20,
        "completion_tokens": 20,
        "total_tokens": 40,
        "reasoning_tokens": 0,
        "completion_tokens_details": {"reasoning_tokens": 0},
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    assert UsageCounter(1, report_cached=False).as_dict()["prompt_tokens_details"] is None


def test_the_usage_of_a_chunk_costs_the_same_with_any_number_of_sequences() -> None:
    num_reads = 0

    class Counted(TokenMeta):
        def __getattribute__(self, name: str) -> Any:
            nonlocal num_reads
            num_reads += 1
            return super().__getattribute__(name)

    usage = UsageCounter(num_choices=2, report_cached=True)
    for index in range(1000):
        usage.update(index, Counted(prompt_tokens=3, completion_tokens=1))
    assert usage.as_dict()["completion_tokens"] == 1000
    num_reads = 0
    usage.update(7, Counted(prompt_tokens=3, completion_tokens=5))
    counts = usage.as_dict()
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (1500, 1004)
    assert num_reads < 10


class Tokens:
    """Token 0 is half of a character."""

    def token_bytes(self, token_id: int) -> bytes:
        return [b"\xc3", b"ab", b" c"][token_id]

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")


def test_chat_logprobs_have_the_true_bytes() -> None:
    found = chat_logprobs(Tokens(), packed([(-0.5, 0)], [[(-0.5, 0), (-1.0, 1)]]))
    assert msgspec.json.decode(b"".join(found)) == {
        "content": [
            {
                "token": "\ufffd",
                "bytes": [0xC3],
                "logprob": -0.5,
                "top_logprobs": [
                    {"token": "\ufffd", "bytes": [0xC3], "logprob": -0.5},
                    {"token": "ab", "bytes": [97, 98], "logprob": -1.0},
                ],
            }
        ]
    }


def test_completion_logprobs_continue_their_offsets() -> None:
    writer = CompletionLogprobs(Tokens())
    first = msgspec.json.decode(b"".join(writer.prompt_and_output(packed([(-0.5, 1)], input=[(None, 2), (-2.0, 1)]))))
    assert first["tokens"] == [" c", "ab", "ab"]
    assert first["token_logprobs"] == [None, -2.0, -0.5]
    assert first["text_offset"] == [0, 2, 4]
    second = msgspec.json.decode(b"".join(writer.output(packed([(-0.5, 2)], [[(-0.5, 2), (-3.0, 1)]]))))
    assert second["text_offset"] == [6]
    assert second["top_logprobs"] == [{" c": -0.5, "ab": -3.0}]


def num_numbers(value: Any) -> int:
    """Log probabilities in nested lists and dicts."""
    if isinstance(value, dict):
        return sum(map(num_numbers, value.values()))
    return sum(map(num_numbers, value)) if isinstance(value, list) else isinstance(value, float)


@pytest.mark.parametrize("at_once", [1, 10, 1 << 12])
@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs_are_written_a_few_at_a_time(at_once: int, num_top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte by byte what one dict of all of them is, but no list or dict has many."""
    own = [(-0.1 * i, i % 3) for i in range(20)]
    top = [[(-0.3 * i, (i + at) % 3) for at in range(num_top)] for i in range(20)] if num_top else []
    prompt: Any = [(None, 1), *own[3:]]
    prompt_top: Any = [None, *top[3:]] if num_top else []
    logprobs, tokens = packed(own, top, input=prompt, input_top=prompt_top), Tokens()
    rounded = [(float(np.float32(value)), token) for value, token in own]
    rounded_top = [[(float(np.float32(value)), token) for value, token in row] for row in top]
    encoded = list[int]()

    def encode(value: Any) -> bytes:
        encoded.append(num_numbers(value))
        return msgspec.json.encode(value)

    monkeypatch.setattr(output_logprobs, "VALUES_AT_ONCE", at_once)
    monkeypatch.setattr(json_list, "encode", encode)

    def entry(value: float, token: int) -> dict[str, Any]:
        return {"token": tokens.token_text(token), "bytes": list(tokens.token_bytes(token)), "logprob": value}

    content = [
        {**entry(*one), "top_logprobs": [entry(*each) for each in best]}
        for one, best in zip(rounded, rounded_top or [[]] * 20, strict=True)
    ]
    assert b"".join(chat_logprobs(tokens, logprobs)) == msgspec.json.encode({"content": content})

    rows: Any = [(None, 1), *rounded[3:], *rounded]
    bests: Any = [None, *rounded_top[3:], *rounded_top] if num_top else [None] * len(rows)
    texts = [tokens.token_text(token) for _, token in rows]
    whole = {
        "tokens": texts,
        "token_logprobs": [value for value, _ in rows],
        "top_logprobs": [best and {tokens.token_text(token): value for value, token in best} for best in bests],
        "text_offset": [sum(map(len, texts[:i])) for i in range(len(texts))],
    }
    assert b"".join(CompletionLogprobs(tokens).prompt_and_output(logprobs)) == msgspec.json.encode(whole)
    assert max(encoded) <= max(1 + num_top, at_once)


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_body(json.dumps({"messages": USER, **fields}).encode(), ChatCompletionRequest)


def test_prompts_are_kept_for_as_long_as_asked() -> None:
    assert chat().keep_s == chat(prompt_cache_retention="in_memory", prompt_cache_key="k").keep_s == 0.0
    assert chat(prompt_cache_retention="24h").keep_s == 86_400.0
    assert chat(prompt_cache_retention="forever").keep_s == 0.0  # a hint ends no request


def test_only_given_parameters_are_set() -> None:
    assert sampling_dict(chat(), None) == {"max_new_tokens": None}
    given = sampling_dict(chat(temperature=0, seed=5, min_tokens=2, n=3, stop="x", logit_bias={"4": -100}), 9)
    assert given == {
        "max_new_tokens": 9,
        "temperature": 0.0,
        "sampling_seed": 5,
        "min_new_tokens": 2,
        "n": 3,
        "stop": "x",
        "logit_bias": {"4": -100.0},
    }


@pytest.mark.parametrize(
    ("wanted", "key", "grammar"),
    [
        ({"type": "json_object"}, "json_schema", {"type": "object"}),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}},
            "json_schema",
            {"type": "integer"},
        ),
        (
            {"type": "structural_tag", "structures": [], "triggers": ["<f"]},
            "structural_tag",
            {"type": "structural_tag", "structures": [], "triggers": ["<f"]},
        ),
    ],
)
def test_response_formats(wanted: dict[str, Any], key: str, grammar: dict[str, Any]) -> None:
    assert json.loads(sampling_dict(chat(response_format=wanted), None)[key]) == grammar


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [({"enum": [1] * 1_000_000}, "more than 20000 values"), ({"const": "a" * 1_000_000}, "at most 262144 characters")],
    ids=["values", "characters"],
)
@pytest.mark.parametrize("name", ["json_schema", "structural_tag", "response_format"])
def test_a_grammar_that_is_too_large_is_refused_before_it_is_encoded(
    name: str, grammar: dict[str, Any], reason: str
) -> None:
    wanted = {"type": "json_schema", "json_schema": {"schema": grammar}} if name == "response_format" else grammar
    request = chat(**{name: wanted})
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match=reason):
            sampling_dict(request, None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000


def test_text_format_constrains_nothing_and_two_schemas_conflict() -> None:
    assert "json_schema" not in sampling_dict(chat(response_format={"type": "text"}), None)
    with pytest.raises(ApiError, match="one of them"):
        sampling_dict(chat(response_format={"type": "json_object"}, json_schema="{}"), None)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "role"),
        ({"messages": "hi"}, "messages"),
        ({"tool_choice": "required"}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "'f'"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"n": 0}, "n"),
        ({"seed": 1 << 70}, "seed"),
        ({"response_format": {"type": "json_schema"}}, "schema"),
    ],
)
def test_invalid_chat_requests(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert refused.value.status == 400 and part in refused.value.message


def test_unknown_fields_are_ignored() -> None:
    assert parse_body(b'{"prompt": "x", "future_field": {"a": 1}}', CompletionRequest).prompt == "x"


def test_error_shapes() -> None:
    error = ApiError(404, "no", code="model_not_found", param="model")
    assert error_body("/v1/models/x", error) == {
        "object": "error",
        "message": "no",
        "type": "NotFoundError",
        "param": "model",
        "code": "model_not_found",
    }
    assert error_body("/generate", error) == {"error": {"message": "no"}}
    assert event(error_event("/v1/completions", ApiError(500, "broken")))["error"]["code"] == 500


def test_a_schema_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused with the other parameters, as the client gave it."""
    monkeypatch.setattr(chat_output, "MAX_GRAMMAR_LENGTH", 20)
    body = ChatCompletionRequest(messages=USER)
    formats = ChatFormats(ModelFormats("hermes", "deepseek-r1"), body, "")
    for length, kept in ((20, False), (21, True)):
        params = {"json_schema": "{}".ljust(length)}
        formats.constrain(params)
        assert ("json_schema" in params) is kept and ("structural_tag" in params) is not kept


@pytest.mark.parametrize("prompt", ["ab", ["ab", "c"], [5, 6], [[5, 6], [7]]])
def test_an_echo_for_each_choice_has_a_limit(prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_completions, "MAX_ECHO_CHARS", 100)
    monkeypatch.setattr(serving_completions, "CHARS_PER_TOKEN", 1)
    serving_completions._check(CompletionRequest(prompt=prompt, n=33, echo=True))
    serving_completions._check(CompletionRequest(prompt=prompt, n=128))
    with pytest.raises(ApiError, match="leave echo out"):
        serving_completions._check(CompletionRequest(prompt=prompt, n=51, echo=True))
