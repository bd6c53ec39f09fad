"""Blocks and fields of Anthropic's messages that current clients send: what the model reads of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglang.srt.entrypoints.anthropic.conversation import chat_request
from sglang.srt.entrypoints.anthropic.hidden_thoughts import shown_thoughts, signature_of
from sglang.srt.entrypoints.anthropic.protocol import MessagesRequest
from sglang.srt.entrypoints.http_body import parse_body
from sglang.srt.entrypoints.http_errors import ApiError

CALL = {"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def translated(content: Any = "Hi", **fields: Any) -> Any:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": content}], **fields}
    return chat_request(parse_body(msgspec.json.encode(body), MessagesRequest))


def read(*blocks: dict[str, Any]) -> Any:
    """The content of a message with these blocks as a template gets it."""
    return translated(list(blocks)).messages[0]["content"]


def refusal(content: Any = "Hi", **fields: Any) -> str:
    with pytest.raises(ApiError) as raised:
        translated(content, **fields)
    assert raised.value.status == 400
    return raised.value.message


def document(source: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **fields}


TEXT = {"type": "text", "media_type": "text/plain", "data": "words"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://host/a.png"}}


def test_documents_are_shown_as_their_content() -> None:
    assert read(document(TEXT), {"type": "text", "text": "Sum up."}) == "words\nSum up."
    named = document(TEXT, title="Title", context="of today", citations={"enabled": False}, cache_control=None)
    assert read(named) == "Title\nof today\nwords"
    assert read(document({"type": "content", "content": "words"}, title=None)) == "words"
    pictured = read(document({"type": "content", "content": [{"type": "text", "text": "see"}, IMAGE]}))
    assert [part["type"] for part in pictured] == ["text", "image_url"]


def test_results_of_searches_are_shown_as_their_content() -> None:
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert read({"type": "search_result", "title": "t", "source": "s", "content": content}) == "t\ns\none\ntwo"


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (document({"type": "base64", "media_type": "application/pdf", "data": "AAAA"}), "PDF"),
        (document({"type": "url", "url": "http://host/a.pdf"}), "PDF"),
        (document({"type": "file", "file_id": "f"}), "no files are stored"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "no files are stored"),
        ({**IMAGE, "transformations": {"oversized_image": "error"}}, "oversized_image"),
        (document(TEXT, citations={"enabled": True}), "citations"),
    ],
)
def test_what_is_not_read_is_named(block: dict[str, Any], reason: str) -> None:
    assert reason in refusal([block])
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [block]}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [CALL]}]
    assert reason in refusal(messages=[*turns, {"role": "user", "content": [result]}])


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"content": None, "is_error": None}, ""),
        ({"content": [], "is_error": False, "toolset_name": None}, ""),
        ({"content": None, "is_error": True}, "Error: "),
        ({"content": [document(TEXT), {"type": "tool_reference", "tool_name": "other"}]}, "words\nother"),
    ],
)
def test_results_of_tools(fields: dict[str, Any], content: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", **fields}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{**CALL, "caller": {"type": "direct"}}]},
    ]
    request = translated(messages=[*turns, {"role": "user", "content": [result]}])
    assert request.messages[-1]["role"] == "tool" and request.messages[-1]["content"] == content


@pytest.mark.parametrize(
    "place",
    [{"output_format": 1}, {"output_config": {"format": 1}}, {"output_format": 1, "output_config": {"effort": "low"}}],
)
def test_the_format_of_an_answer_has_two_places(place: dict[str, Any]) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    fields: Any = msgspec.json.decode(msgspec.json.encode(place).replace(b"1", msgspec.json.encode(form)))
    assert translated(**fields).response_format.json_schema.schema == SCHEMA


def test_two_formats_are_refused() -> None:
    fields = {"output_format": {"schema": SCHEMA}, "output_config": {"format": {"schema": {}}}}
    assert "output_format" in refusal(**fields)


def test_examples_of_a_tools_input_are_shown_with_its_schema() -> None:
    tool = {"name": "f", "input_schema": SCHEMA, "input_examples": [{"a": 1}], "eager_input_streaming": True}
    (shown,) = translated(
        tools=[
            tool,
        ]
    ).tools
    assert shown["function"]["parameters"] == {**SCHEMA, "examples": [{"a": 1}]}
    (plain,) = translated(tools=[{**tool, "input_examples": None, "defer_loading": True}]).tools
    assert plain["function"]["parameters"] == SCHEMA


def test_a_reminder_lasts_until_the_next_message_of_the_user() -> None:
    reminder = {"role": "system", "content": "now", "clear_at": "next_user_message"}
    effort = {"role": "system", "output_config": {"effort": "high"}}
    turns = [{"role": "user", "content": "a"}, reminder, effort]
    assert [message["content"] for message in translated(messages=turns).messages] == ["a", "now"]
    turns += [
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {**reminder, "clear_at": "never"},
    ]
    prefill = [turns[0], {"role": "assistant", "content": "b"}, effort]
    assert translated(messages=prefill).continue_final_message, "the effort alone is no message"
    request = translated(messages=turns, output_config={"effort": "low"})
    assert [message["content"] for message in request.messages] == ["a", "b", "c", "now"]
    assert request.reasoning_effort == "high"


def test_hidden_thoughts_come_back_to_the_model() -> None:
    def thoughts(signature: str, thinking: str = "") -> Any:
        block = {"type": "thinking", "thinking": thinking, "signature": signature}
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [block, CALL]}]
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "noon"}
        request = translated(messages=[*turns, {"role": "user", "content": [result]}])
        return request.messages[1].get("reasoning_content")

    assert thoughts(signature_of("hm 🙂")) == "hm 🙂"
    assert thoughts(signature_of("hm"), "shown") == "shown"
    assert thoughts("EqQBCgIYAhIM") is None and shown_thoughts("", "local-thoughts.???") == ""


def test_summaries_of_other_servers_are_read() -> None:
    summary = {"type": "compaction", "content": "so far", "encrypted_content": "x"}
    failed = {"type": "compaction", "content": None}
    moved = {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}
    said = {"role": "assistant", "content": [failed, summary, moved, {"type": "text", "text": "on"}]}
    assert translated(messages=[said, {"role": "user", "content": "a"}]).messages[0]["content"] == "so far\non"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"output_config": {"task_budget": {"type": "tokens", "total": 1}}}, "task_budget"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"thinking": {"type": "between_tools"}}, "thinking"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url", "url": "http://host", "name": "m"}]}, "mcp_servers"),
    ],
)
def test_what_would_change_the_answer_is_named(fields: dict[str, Any], name: str) -> None:
    assert name in refusal(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": 7}, "service_tier": "fast", "inference_geo": "us", "speed": "fast"},
        {"diagnostics": {"previous_message_id": None}, "billing_policy": {"type": "billing_policy"}},
        {"fallbacks": "default", "fallback_credit_token": "x", "betas": ["a"], "anthropic_beta": ["a"]},
        {
            "cache_control": {"type": "ephemeral", "ttl": 300},
            "system": [{"type": "text", "text": "s", "citations": []}],
        },
        {"compaction": None, "container": None, "mcp_servers": [], "context_management": None, "output_format": None},
    ],
)
def test_services_of_others_end_no_request(fields: dict[str, Any]) -> None:
    assert translated(**fields).messages[-1] == {"role": "user", "content": "Hi"}
