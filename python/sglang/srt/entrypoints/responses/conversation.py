"""Converts the items of a conversation to a chat request."""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.http_errors import bad_request
from sglang.srt.entrypoints.openai.media_parts import image_part
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    FunctionName,
    JsonSchemaFormat,
    NamedToolChoice,
    ResponseFormat,
)
from sglang.srt.entrypoints.responses.protocol import (
    AdditionalToolsItem,
    AllowedTools,
    CallItem,
    Content,
    ConversationItem,
    InputImage,
    InputText,
    MessageItem,
    NamedTool,
    OutputText,
    ReasoningItem,
    Refusal,
    ResponseContext,
    ResponsesRequest,
    ResultItem,
    ToolSearchResultItem,
)
from sglang.srt.entrypoints.responses.tools import ToolCatalog

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stream",
    "priority",
    "cache_salt",
    "extra_key",
    "prompt_cache_retention",
    "prompt_cache_options",
)


def tool_catalog(body: ResponseContext, items: list[ConversationItem]) -> ToolCatalog:
    """Returns the tools of the request, and those that its conversation adds."""
    tools = list(body.tools or ())
    for item in items:
        if isinstance(item, ToolSearchResultItem | AdditionalToolsItem):
            tools += item.tools
    return ToolCatalog(tools)


def chat_request(
    body: ResponseContext, items: list[ConversationItem], catalog: ToolCatalog | None = None
) -> ChatCompletionRequest:
    """Returns the chat request. `items`: the whole conversation. `catalog`: its tools, if they are known. Raises
    ApiError 400 for results without a call."""
    catalog = tool_catalog(body, items) if catalog is None else catalog
    chosen = body.chosen_names(catalog)
    messages = [*_instructions(body), *_with_thoughts(body, _messages(items))]
    if not messages:
        raise bad_request("input: it has no text, call or result that a model could read", param="input")
    request = ChatCompletionRequest(
        model=body.model,
        messages=messages,
        tools=catalog.functions(chosen if isinstance(body.tool_choice, AllowedTools) else None),
        tool_choice=_tool_choice(body, chosen),
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=_template_variables(body),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )
    request.response_format = _response_format(body)
    if isinstance(body, ResponsesRequest):
        request.max_tokens = body.max_output_tokens
        for name in _SAME_NAME:
            setattr(request, name, getattr(body, name))
    return request


def _template_variables(body: ResponseContext) -> dict[str, Any] | None:
    given = body.chat_template_kwargs if isinstance(body, ResponsesRequest) else None
    verbosity = None if body.text is None else body.text.verbosity
    return given if verbosity is None else {"verbosity": verbosity, **(given or {})}


def _tool_choice(body: ResponseContext, chosen: list[str] | None) -> Any:
    choice = body.tool_choice
    if isinstance(choice, NamedTool) and chosen:
        return NamedToolChoice(FunctionName(chosen[0]))
    return choice.mode if isinstance(choice, AllowedTools) else choice


def _response_format(body: ResponseContext) -> ResponseFormat | None:
    form = None if body.text is None else body.text.format
    if form is None:
        return None
    schema = JsonSchemaFormat(schema=form.schema, name=form.name) if form.type == "json_schema" else None
    return ResponseFormat(type=form.type, json_schema=schema)


def _instructions(body: ResponseContext) -> list[dict[str, Any]]:
    return [{"role": "system", "content": body.instructions}] if body.instructions else []


def _with_thoughts(body: ResponseContext, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with only those thoughts that `reasoning.context` keeps."""
    if body.reasoning is None or body.reasoning.context != "current_turn":
        return messages
    begin = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=0)
    for message in messages[:begin]:
        message.pop("reasoning_content", None)
    return messages


def _messages(items: list[ConversationItem]) -> list[dict[str, Any]]:
    """Returns the messages. Adjacent thoughts, text and calls in this order become one message of the assistant."""
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    """The names of the calls so far, by id."""
    for item in items:
        if isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _parts(item.content)})
        elif isinstance(item, ResultItem):
            messages += _result(item, names)
        elif isinstance(item, CallItem):
            call_id, name, arguments = item.call()
            if call_id is not None:
                names[call_id] = name
                calls = _open_turn(messages, ()).setdefault("tool_calls", [])
                function = {"name": name, "arguments": arguments}
                calls.append({"id": call_id, "type": "function", "function": function})
        elif isinstance(item, AdditionalToolsItem):
            continue
        elif isinstance(item, ReasoningItem):
            thoughts = item.content or item.summary
            _open_turn(messages, _FIELDS)["reasoning_content"] = "\n".join(thought.text for thought in thoughts)
        elif isinstance(item, MessageItem):
            _open_turn(messages, _FIELDS[1:])["content"] = _parts(item.content)
    return messages


_FIELDS = ("reasoning_content", "content", "tool_calls")
"""Fields of an assistant message, in the order of their items."""


def _open_turn(messages: list[dict[str, Any]], closing: tuple[str, ...]) -> dict[str, Any]:
    """Returns the assistant's message at the end, or a new one if that already has one of the `closing` fields."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or any(name in last for name in closing):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _result(item: ResultItem, names: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the message for a result; None for the result of a call that ran at OpenAI, which has no id."""
    call_id, content = item.result()
    if call_id is None:
        return []
    if call_id not in names:
        kind = item.__struct_config__.tag
        call = str(kind).removesuffix("_output").removesuffix("_call") + "_call"
        raise bad_request(
            f"input: {kind} for {call_id[:64]!r}, but no {call} before it has this call_id", param="input"
        )
    return [{"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": _parts(content)}]


def _parts(content: Content) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, InputText | OutputText):
            parts.append({"type": "text", "text": part.text})
        elif isinstance(part, Refusal):
            parts.append({"type": "text", "text": part.refusal})
        elif isinstance(part, InputImage):
            parts.append(image_part(part.image_url or "", part.detail))
    return parts
