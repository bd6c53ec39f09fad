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
_UNPARSED_INPUT = "__unparsedToolInput"
"""Claude Code's key for tool input that it could not parse as JSON (`_arguments`)."""
_ERROR_MARK = "Error: "
"""Prefix of a tool result with `is_error`: chat templates have no field for that."""


def chat_request(body: CountTokensRequest) -> ChatCompletionRequest:
    """Returns the chat request with the same conversation, tools and sampling. Raises ApiError 400 for a tool_result
    without its tool_use, and for a last message of the assistant that cannot be continued."""
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
    function["parameters"] = {**tool.schema, **examples}  # templates print the keys in this order
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _effort(body: CountTokensRequest) -> str | None:
    """Returns the effort that was set last: by a system message within the conversation, or by the request itself."""
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
    """Returns the variable that switches thinking on or off, under both names that templates have for it; None if the
    client does not say."""
    if body.thinking is None:
        return None
    thinks = body.thinking.type != "disabled"
    return {"enable_thinking": thinks, "thinking": thinks}


def _continues(body: CountTokensRequest) -> bool:
    """Returns whether the model continues the last message, i.e. that is the assistant's. Raises ApiError 400 if it
    calls tools or has no text."""
    left = _without_ended_instructions(body.messages)
    last = left[-1] if left else None
    if not isinstance(last, AssistantMessage):
        return False
    blocks = plain_blocks(last.content)
    if any(isinstance(block, ToolUseBlock) for block in blocks):
        raise bad_request("messages: the last message calls tools; send their tool_result blocks", param="messages")
    if not _text(blocks).strip():
        raise bad_request("messages: the last message has no text that the model could continue", param="messages")
    return True


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    """Returns the system prompt and the conversation as messages of the chat API."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(plain_blocks(body.system))})
    tool_names: dict[str, str] = {}
    """For the id of each tool call so far, the name of the tool."""
    for message in _without_ended_instructions(body.messages):
        blocks = plain_blocks(message.content)
        if isinstance(message, UserMessage):
            messages += _user_messages(blocks, tool_names)
        elif isinstance(message, SystemMessage):
            messages.append({"role": "system", "content": _text(blocks)})
        else:
            messages.append(_assistant_message(blocks))
            tool_names.update({block.id: block.name for block in blocks if isinstance(block, ToolUseBlock)})
    return messages


def _without_ended_instructions(messages: list[AnyMessage]) -> list[AnyMessage]:
    """Returns the messages without those system messages that are empty, or that apply only until the next user message
    (`clear_at`) when there is a later one."""
    last_user_message = max((i for i, message in enumerate(messages) if isinstance(message, UserMessage)), default=-1)

    def applies(index: int, message: AnyMessage) -> bool:
        if not isinstance(message, SystemMessage):
            return True
        return bool(message.content) and not (message.clear_at == "next_user_message" and index < last_user_message)

    return [message for index, message in enumerate(messages) if applies(index, message)]


def _text(blocks: list[Block]) -> str:
    """Returns the text of the text blocks among `blocks`."""
    return _SEPARATOR.join(block.text for block in blocks if isinstance(block, TextBlock))


def _user_messages(blocks: list[Block], tool_names: dict[str, str]) -> list[dict[str, Any]]:
    """Splits a user message: each tool result becomes a message of its own, and so do the text and images before,
    between and after the results. Their order stays."""
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
    """Returns the joined text of the blocks. If there are images, returns parts of the chat API in the order of the
    blocks, with neighbouring text blocks joined into one part."""
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
    """Returns a tool message. Raises ApiError 400 if no tool call before it has its id."""
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
    """Returns an assistant message; the summary of a compaction block is part of its text."""
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
    """Returns the arguments of a call: its input as it is given, or the text that the model wrote if the client could
    not parse that and sent it as {"__unparsedToolInput": {"raw": text}}."""
    broken = given.get(_UNPARSED_INPUT) if isinstance(given, dict) and len(given) == 1 else None
    raw = broken.get("raw") if isinstance(broken, dict) else None
    return raw if isinstance(raw, str) else given
