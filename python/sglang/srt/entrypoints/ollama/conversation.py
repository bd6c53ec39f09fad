"""Converts Ollama's form of a conversation to a chat request."""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest, OllamaMessage
from sglang.srt.entrypoints.openai.media_parts import base64_part
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, JsonSchemaFormat, ResponseFormat
from sglang.srt.function_call.model_formats import ModelFormats

_RENAMED = {
    "seed": "seed",
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "stop": "stop",
}


def chat_request(body: OllamaChatRequest | OllamaGenerateRequest, formats: ModelFormats) -> ChatCompletionRequest:
    """Returns the chat request. Raises ApiError 400."""
    request = ChatCompletionRequest(
        model=body.model,
        messages=_messages(body.messages or [], formats) if isinstance(body, OllamaChatRequest) else _prompt(body),
        tools=body.tools if isinstance(body, OllamaChatRequest) else None,
        stream=body.stream is not False,
        response_format=_response_format(body.format),
        chat_template_kwargs=_template_variables(body.think),
        reasoning_effort=body.think if isinstance(body.think, str) else None,
    )
    options = body.read_options()
    for name, ours in _RENAMED.items():
        setattr(request, ours, getattr(options, name))
    request.max_tokens = None if options.num_predict is None or options.num_predict < 0 else options.num_predict
    request.top_k = -1 if options.top_k == 0 else options.top_k
    return request


def _prompt(body: OllamaGenerateRequest) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": body.system}] if body.system else []
    return [*system, {"role": "user", "content": _content(body.prompt, body.images)}]


def _content(text: str | None, images: list[str] | None) -> str | list[dict[str, Any]]:
    """Returns the content, with images before the text."""
    if not images:
        return text or ""
    return [*map(base64_part, images), {"type": "text", "text": text or ""}]


def _response_format(wanted: str | dict[str, Any] | None) -> ResponseFormat | None:
    if not wanted:
        return None
    if isinstance(wanted, str):
        return ResponseFormat(type="json_object")
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=wanted))


def _template_variables(think: bool | str | None) -> dict[str, Any] | None:
    """Returns the switch of thoughts under the names that templates use; empty if it is not given."""
    return None if think is None else {"enable_thinking": bool(think), "thinking": bool(think)}


def _messages(messages: list[OllamaMessage], formats: ModelFormats) -> list[dict[str, Any]]:
    """Returns the messages. Calls have no ids here, so results belong to the preceding calls in order."""
    converted = []
    call_ids: list[str] = []
    num_results = 0
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": _content(message.content, message.images)}
        if message.thinking:
            fields["reasoning_content"] = message.thinking
        if message.tool_calls:
            functions = [call.function for call in message.tool_calls]
            new_ids = [formats.counted_id(call.name, number) for number, call in enumerate(functions, len(call_ids))]
            call_ids += new_ids
            fields["tool_calls"] = [
                {"id": new_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for new_id, call in zip(new_ids, functions, strict=True)
            ]
        if message.role == "tool":
            unasked = formats.counted_id(message.tool_name or "", num_results)
            fields["tool_call_id"] = call_ids[num_results] if num_results < len(call_ids) else unasked
            num_results += 1
            if message.tool_name is not None:
                fields["name"] = message.tool_name
        converted.append(fields)
    return converted
