"""Tools of Anthropic's Messages API that are more than functions, and what its servers did in history."""

from __future__ import annotations

import logging
import re
from typing import Any, get_args

import msgspec
import pytest
from anthropic.types.beta import BetaContentBlockParam, BetaToolUnionParam

from sglang.srt.entrypoints.anthropic import tools as message_tools
from sglang.srt.entrypoints.anthropic.conversation import chat_request
from sglang.srt.entrypoints.anthropic.protocol import AssistantContent, MessagesRequest, UserContent
from sglang.srt.entrypoints.anthropic.tools import AnyHostedToolBlock
from sglang.srt.entrypoints.http_body import parse_body
from sglang.srt.entrypoints.http_errors import ApiError

REFUSED = {"computer", "browser_toolset", "computer_toolset"}
REFUSED_BLOCKS = {"container_upload", "tool_addition", "tool_removal"}
FUNCTION = {"name": "clock", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "Time?"}


def types_in(union: Any) -> set[str]:
    """The values of `type` in a union of the client's."""
    found: set[str] = set()
    for kind in get_args(union):
        if not isinstance(kind, type):
            found |= types_in(kind)
            continue
        fields = getattr(kind, "model_fields", None)  # of pydantic; a TypedDict has none
        hint = str(fields["type"].annotation if fields else kind.__annotations__["type"])
        found |= set(re.findall(r"""['"]([a-z0-9_]+)['"]""", hint.split("Literal[")[1]))
    return found


def translated(tools: list[Any], messages: list[Any] | None = None, **fields: Any) -> Any:
    body = {"model": "m", "max_tokens": 5, "messages": messages or [USER], "tools": tools, **fields}
    return chat_request(parse_body(msgspec.json.encode(body), MessagesRequest))


def test_every_tool_of_the_client_has_a_verdict() -> None:
    kinds = {message_tools._DATE.sub("", name) for name in types_in(BetaToolUnionParam)}
    assert kinds == {"custom", *message_tools._KNOWN, *message_tools.LEFT_OUT, *REFUSED}


def test_every_block_of_the_client_has_a_verdict() -> None:
    lists = [get_args(content)[0] for content in (UserContent, AssistantContent)]
    read = {kind.__struct_config__.tag for each in lists for kind in get_args(get_args(each)[0])}
    assert types_in(BetaContentBlockParam) == read | REFUSED_BLOCKS


@pytest.mark.parametrize(
    ("kind", "name", "arguments"),
    [
        ("bash_20250124", "bash", {"command"}),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"command", "path", "old_str", "view_range"}),
        ("text_editor_20241022", "str_replace_editor", {"command", "path"}),
        ("memory_20250818", "memory", {"command", "path", "old_path"}),
    ],
)
def test_tools_of_the_client_without_a_schema(kind: str, name: str, arguments: set[str]) -> None:
    (tool,) = translated([{"type": kind, "name": name}], tool_choice={"type": "tool", "name": name}).tools
    assert tool["function"]["name"] == name and tool["function"]["description"]
    assert arguments <= set(tool["function"]["parameters"]["properties"])


def test_what_runs_at_the_provider_is_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    message_tools._log_left_out.cache_clear()
    hosted = [{"type": f"{kind}_20260101", "name": kind} for kind in sorted(message_tools.LEFT_OUT)]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert [tool["function"]["name"] for tool in translated([*hosted, FUNCTION]).tools] == ["clock"]
    assert len(caplog.records) == len(hosted)
    assert translated(hosted).tools == []


@pytest.mark.parametrize(
    ("tool", "choice", "reason"),
    [
        ({"type": "computer_20250124", "name": "computer"}, None, "offer a function"),
        ({"type": "web_search_20250305", "name": "web_search"}, {"type": "any"}, "non-empty"),
        ({"type": "web_search_20250305", "name": "web_search"}, {"type": "tool", "name": "web_search"}, "not here"),
        ({"name": "clock"}, None, "input_schema"),
        ({"input_schema": {}}, None, "name"),
    ],
)
def test_refusals(tool: Any, choice: Any, reason: str) -> None:
    with pytest.raises(ApiError, match=reason):
        translated([tool], tool_choice=choice)


def test_what_another_server_did_is_not_shown() -> None:
    blocks = [{"type": kind.__struct_config__.tag, "id": "1", "content": []} for kind in get_args(AnyHostedToolBlock)]
    said = [{"type": "text", "text": "I look."}, *blocks, {"type": "text", "text": "Noon."}]
    request = translated([FUNCTION], [USER, {"role": "assistant", "content": said}, USER])
    assert request.messages[1] == {"role": "assistant", "content": "I look.\nNoon."}
