"""Fields of chat completions and responses that current clients send: what the model and the engine get of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglang.srt.entrypoints.http_body import parse_body
from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.sampling import sampling_dict
from sglang.srt.entrypoints.openai.template_messages import CallForm, template_message
from sglang.srt.entrypoints.responses.conversation import chat_request
from sglang.srt.entrypoints.responses.protocol import ResponsesRequest, read_items
from sglang.srt.entrypoints.responses.response_object import typed_item

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("a", "b", "c")]
QUIET = {"enable_thinking": False, "thinking": False}
LOUD = {"enable_thinking": True, "thinking": True}


def chat(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return parse_body(msgspec.json.encode(body), ChatCompletionRequest)


def responses(**fields: Any) -> ChatCompletionRequest:
    body = parse_body(msgspec.json.encode({"model": "m", "input": "Hi", **fields}), ResponsesRequest)
    return chat_request(body, read_items(body.items()))


@pytest.mark.parametrize(
    ("fields", "variables", "effort", "tokens"),
    [
        ({}, None, None, None),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, None, "high", None),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, None, "high", None),
        ({"reasoning": {"effort": None, "exclude": False}}, None, None, None),
        ({"reasoning": {"enabled": False}}, QUIET, None, None),
        ({"reasoning": {"max_tokens": 100}}, None, None, 100),
        ({"enable_thinking": False}, QUIET, None, None),
        ({"thinking": True}, LOUD, None, None),
        ({"thinking": {"type": "disabled"}}, QUIET, None, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 64}}, LOUD, None, 64),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, {"clear_thinking": False, **LOUD}, None, None),
        ({"thinking": False, "chat_template_kwargs": {"thinking": True}}, {**QUIET, "thinking": True}, None, None),
    ],
)
def test_names_for_the_switch_of_thoughts(
    fields: dict[str, Any], variables: dict[str, Any] | None, effort: str | None, tokens: int | None
) -> None:
    request = chat(**fields)
    assert request.chat_template_kwargs == variables
    assert (request.reasoning_effort, request.wanted_thoughts, request.thinking_budget) == (effort, tokens, None)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_among_some_tools(mode: str) -> None:
    named = [{"type": "function", "function": {"name": name}} for name in ("c", "a")]
    request = chat(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}})
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["a", "c"] and request.tool_choice == mode
    assert chat(tools=TOOLS, tool_choice={"function": {"name": "b"}}).tool_choice.function.name == "b"  # type: ignore[union-attr]


@pytest.mark.parametrize("read", [chat, responses])
@pytest.mark.parametrize(
    ("fields", "kept_s"),
    [
        ({"prompt_cache_retention": "in_memory"}, 0),
        ({"prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}}, 86_400),
        ({"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}, 1_800),
        ({"prompt_cache_options": {"ttl": "12h", "comparison_response_id": "r"}}, 43_200),
        ({"prompt_cache_retention": "for ever", "prompt_cache_options": {"ttl": 7, "mode": 7}}, 0),
    ],
)
def test_no_hint_about_the_cache_ends_a_request(read: Any, fields: dict[str, Any], kept_s: float) -> None:
    assert read(**fields).keep_s == kept_s


@pytest.mark.parametrize("read", [chat, responses])
def test_services_of_others_end_no_request(read: Any) -> None:
    fields = {"service_tier": "ultrafast", "store": False, "safety_identifier": "s", "metadata": {"a": "b"}}
    options = {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert read(**fields, **options, user="u", prediction={"type": "content", "content": "x"}).stream


def test_services_that_only_responses_name() -> None:
    fields = {
        "access_programs": {"cyber": "standard"},
        "image": {"context_compression": "enabled"},
        "max_tool_calls": 3,
    }
    reasoning = {"effort": "low", "summary": "none", "generate_summary": "auto", "mode": "pro", "context": "auto"}
    request = responses(
        **fields,
        reasoning=reasoning,
        include=["reasoning.encrypted_content", "web_search_call.action.sources"],
        context_management=[{"type": "compaction", "compact_threshold": 1000}],
        client_metadata={"a": "b"},
    )
    assert request.reasoning_effort == "low"


@pytest.mark.parametrize(
    ("context", "kept"), [(None, ["t0", "t1"]), ("all_turns", ["t0", "t1"]), ("current_turn", ["t1"])]
)
def test_thoughts_of_earlier_turns(context: str | None, kept: list[str]) -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "1", "name": "a", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "x"}
    hi = {"role": "user", "content": "Hi"}
    items = [hi, thought("t0"), {"role": "assistant", "content": "a"}, hi, thought("t1"), call, result]
    messages = responses(input=items, reasoning={"context": context}).messages
    assert [message["reasoning_content"] for message in messages if "reasoning_content" in message] == kept


@pytest.mark.parametrize("detail", [None, "auto", "low", "high", "original", "default"])
def test_how_closely_an_image_is_looked_at(detail: str | None) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,", "detail": detail}}
    chat(messages=[{"role": "user", "content": [image]}])
    part = {"type": "input_image", "image_url": "data:,", "detail": detail}
    (message,) = responses(input=[{"role": "user", "content": [part]}]).messages
    assert message["content"][0]["image_url"]["detail"] == detail


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"reasoning": "hm", "reasoning_content": None},
        {"reasoning_content": "hm", "reasoning": "other"},
        {"thinking": "hm"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "h"}, {"type": "x"}, {"text": "m"}]},
    ],
)
@pytest.mark.parametrize("content", ["", "text"])
def test_thoughts_in_history_by_any_name(fields: dict[str, Any], content: str) -> None:
    message = {"role": "assistant", "content": content, **fields}
    (given,) = chat(messages=[message]).messages
    read = template_message(given, CallForm())
    assert (read["reasoning_content"], read["content"]) == ("hm", content)
    assert content or read["thinking"] == "hm"


@pytest.mark.parametrize("fields", [{}, {"reasoning": {"effort": "low"}}, {"reasoning": None, "reasoning_details": 3}])
def test_no_thoughts_in_history(fields: dict[str, Any]) -> None:
    assert "reasoning_content" not in template_message({"role": "assistant", "content": "a", **fields}, CallForm())


def test_a_refusal_in_history_is_text() -> None:
    said = [{"role": "assistant", "content": None, "refusal": "I will not."}]
    part = [{"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}]
    for messages in (said, part):
        (message,) = chat(messages=messages).messages
        assert template_message(message, CallForm())["content"] == "I will not."


def test_hints_at_parts_end_no_request() -> None:
    part = {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}, "cache_control": 3}
    (message,) = chat(messages=[{"role": "user", "content": [part]}]).messages
    assert template_message(message, CallForm())["content"] == "a"
    responses(input=[{"role": "user", "content": [{**part, "type": "input_text"}], "phase": "commentary"}])


def test_more_tokens_than_any_context_has() -> None:
    assert sampling_dict(chat(), 1 << 62)["max_new_tokens"] == (1 << 31) - 1
    assert sampling_dict(chat(), 0)["max_new_tokens"] == 0 and sampling_dict(chat(), None)["max_new_tokens"] is None


def test_items_of_the_input_have_their_type() -> None:
    assert typed_item({"id": "1", "role": "user", "content": "a"}) == {
        "id": "1",
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "a"}],
    }
    call = {"id": "2", "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "incomplete"}
    assert typed_item(call) == call


def test_verbosity_is_a_wish_for_the_template() -> None:
    """Codex asks for it by the model's name; other variables of the client stay."""
    request = responses(text={"verbosity": "low"}, chat_template_kwargs={"depth": 2})
    assert request.chat_template_kwargs == {"verbosity": "low", "depth": 2}
    assert responses(text={"format": {"type": "text"}}).chat_template_kwargs is None


@pytest.mark.parametrize(
    ("read", "fields", "reason"),
    [
        (chat, {"moderation": {"model": "m"}}, "moderation"),
        (responses, {"moderation": {"model": "m"}}, "moderation"),
        (responses, {"personality": "friendly"}, "personality"),
        (responses, {"include": ["message.output_text.logprobs"]}, "output_text.logprobs"),
        (responses, {"context_management": [{"type": "forget"}]}, "context_management"),
        (chat, {"verbosity": "low"}, "verbosity"),
        (chat, {"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
    ],
)
def test_what_would_change_the_answer_is_named(read: Any, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ApiError, match=reason):
        read(**fields)
