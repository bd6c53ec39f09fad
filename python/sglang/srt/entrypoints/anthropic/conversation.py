"""Converts Anthropic's form of a conversation to a chat request."""

from __future__ import annotations

import itertools
from typing import Any

from sglang.srt.entrypoints.anthropic.content import Base64Source, Block, ImageBlock, TextBlock, UrlSource, plain_blocks
from sglang.srt.entrypoints.anthropic.hidden_thoughts import shown_thoughts
from sglang.srt.entrypoints.anthropic.protocol import (
    AnyMessage,
    AssistantMessage,
    CompactionBlock,
    CountTokensRequest,
    MessagesRequest,
    SystemMessage,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)
from sglang.srt.entrypoints.anthropic.tools import MessageTool, offered_tools
from sglang.srt.entrypoints.http_errors import bad_request
from sglang.srt.entrypoints.openai.media_parts import base64_part, image_part
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    FunctionName,
    JsonSchemaFormat,
    NamedToolChoice,
    ResponseFormat,
)

_SEPARATOR = "\n"
"""Separator between text blocks that follow one another."""
_UNREADABLE = "__unparsedToolInput"
"""Claude Code's key for tool input that was not JSON."""
_ERROR_MARK = "Error: "
"""Prefix of a tool's result that is an error, as chat templates have no other place for it."""


def chat_request(body: CountTokensRequest) -> ChatCompletionRequest:
    """Returns the chat request. Raises ApiError 400 for tool calls and results that do not match."""
    choice = body.tool_choice
    request = ChatCompletionRequest(
        model=body.model,
        messages=_messages(body),
        tools=[_tool(tool) for tool in offered_tools(body.tools)],
        tool_choice=_tool_choice(body),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        continue_final_message=_continues(body),
        chat_template_kwargs=_template_variables(body),
        prompt_cache_retention=body.retention,
    )
    request.reasoning_effort = _effort(body)
    if body.format is not None:
        schema = JsonSchemaFormat(schema=body.format.schema)
        request.response_format = ResponseFormat(type="json_schema", json_schema=schema)
    if isinstance(body, MessagesRequest):
        request.max_tokens = body.max_tokens
        request.stream = body.stream
        request.stop = body.stop_sequences
        request.temperature, request.top_p, request.top_k = body.temperature, body.top_p, body.top_k
    return request


def _tool(tool: MessageTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.shown_description is not None:
        function["description"] = tool.shown_description
    examples = {"examples": tool.input_examples} if tool.input_examples else {}
    function["parameters"] = {**tool.schema, **examples}  # the order of keys in which templates print them
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _effort(body: CountTokensRequest) -> str | None:
    """Returns the effort that was set last."""
    configs = [message.output_config for message in body.messages if isinstance(message, SystemMessage)]
    efforts = [config.effort for config in (body.output_config, *configs) if config is not None]
    return next((effort for effort in reversed(efforts) if effort is not None), None)


def _tool_choice(body: CountTokensRequest) -> Any:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        return NamedToolChoice(FunctionName(choice.name or ""))
    return "required" if choice.type == "any" else choice.type


def _template_variables(body: CountTokensRequest) -> dict[str, Any] | None:
    """Returns the switch of thoughts under the names that templates use; empty if it is not given."""
    if body.thinking is None:
        return None
    thinks = body.thinking.type != "disabled"
    return {"enable_thinking": thinks, "thinking": thinks}


def _continues(body: CountTokensRequest) -> bool:
    """Returns whether the model continues the last message."""
    last = body.messages[-1]
    if not isinstance(last, AssistantMessage):
        return False
    blocks = plain_blocks(last.content)
    if any(isinstance(block, ToolUseBlock) for block in blocks):
        raise bad_request("messages: the last message calls tools; send their tool_result blocks", param="messages")
    if not _text(blocks).strip():
        raise bad_request("messages: the last message has no text that the model could continue", param="messages")
    return True


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(plain_blocks(body.system))})
    tool_names: dict[str, str] = {}
    """The names of the calls so far, by id."""
    for message in _lasting(body.messages):
        blocks = plain_blocks(message.content)
        if isinstance(message, UserMessage):
            messages += _user_messages(blocks, tool_names)
        elif isinstance(message, SystemMessage):
            messages.append({"role": "system", "content": _text(blocks)})
        else:
            messages.append(_assistant_message(blocks))
            tool_names.update({block.id: block.name for block in blocks if isinstance(block, ToolUseBlock)})
    return messages


def _lasting(messages: list[AnyMessage]) -> list[AnyMessage]:
    """Returns the messages without system messages that are empty or no longer apply."""
    last = max((i for i, message in enumerate(messages) if isinstance(message, UserMessage)), default=-1)

    def lasts(index: int, message: AnyMessage) -> bool:
        if not isinstance(message, SystemMessage):
            return True
        return bool(message.content) and not (message.clear_at == "next_user_message" and index < last)

    return [message for index, message in enumerate(messages) if lasts(index, message)]


def _text(blocks: list[Block]) -> str:
    return _SEPARATOR.join(block.text for block in blocks if isinstance(block, TextBlock))


def _user_messages(blocks: list[Block], tool_names: dict[str, str]) -> list[dict[str, Any]]:
    """Returns a user message as several: tool results become messages of their own, in order with the text between
    them."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            messages.append(_result_message(block, tool_names))
        elif isinstance(block, TextBlock | ImageBlock):
            if messages and messages[-1]["role"] == "user":
                messages[-1]["blocks"].append(block)
            else:
                messages.append({"role": "user", "blocks": [block]})
    for message in messages:
        if "blocks" in message:
            message["content"] = _content(message.pop("blocks"))
    return messages or [{"role": "user", "content": ""}]


def _content(blocks: list[Block]) -> str | list[dict[str, Any]]:
    """Returns text, or with images a list of parts, in which adjacent texts are joined."""
    parts: list[dict[str, Any]] = []
    for is_text, group in itertools.groupby(blocks, key=lambda block: isinstance(block, TextBlock)):
        if is_text:
            parts.append({"type": "text", "text": _text(list(group))})
        else:
            parts += [_image(block) for block in group if isinstance(block, ImageBlock)]
    if any(part["type"] != "text" for part in parts):
        return parts
    return _text(blocks)


def _image(block: ImageBlock) -> dict[str, Any]:
    source = block.source
    if isinstance(source, Base64Source):
        return base64_part(source.data, source.media_type)
    assert isinstance(source, UrlSource)
    return image_part(source.url)


def _result_message(block: ToolResultBlock, tool_names: dict[str, str]) -> dict[str, Any]:
    if block.tool_use_id not in tool_names:
        raise bad_request(
            f"messages: tool_result for {block.tool_use_id[:64]!r}, but no tool_use block before it has this id",
            param="messages",
        )
    content = _content(plain_blocks(block.content))
    if block.is_error:
        mark = {"type": "text", "text": _ERROR_MARK}
        content = _ERROR_MARK + content if isinstance(content, str) else [mark, *content]
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "name": tool_names[block.tool_use_id],
        "content": content,
    }


def _assistant_message(blocks: list[Block]) -> dict[str, Any]:
    blocks = [
        TextBlock(block.content) if isinstance(block, CompactionBlock) and block.content else block for block in blocks
    ]
    message: dict[str, Any] = {"role": "assistant", "content": _text(blocks)}
    thoughts = [shown_thoughts(block.thinking, block.signature) for block in blocks if isinstance(block, ThinkingBlock)]
    if any(thoughts):
        message["reasoning_content"] = _SEPARATOR.join(filter(None, thoughts))
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": _arguments(block.input)}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def _arguments(given: Any) -> Any:
    """Returns the input of a call as JSON text; the model's own text if the client could not parse it."""
    broken = given.get(_UNREADABLE) if isinstance(given, dict) and len(given) == 1 else None
    raw = broken.get("raw") if isinstance(broken, dict) else None
    return raw if isinstance(raw, str) else given
