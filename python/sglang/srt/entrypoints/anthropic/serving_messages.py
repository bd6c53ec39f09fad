"""`POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.anthropic import message_parts as parts
from sglang.srt.entrypoints.anthropic.conversation import chat_request
from sglang.srt.entrypoints.anthropic.message_stream import MessageStream
from sglang.srt.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from sglang.srt.entrypoints.http_errors import json_response
from sglang.srt.entrypoints.http_stream import until_disconnect
from sglang.srt.entrypoints.openai.chat_call import chat_call, count_prompt
from sglang.srt.entrypoints.openai.chat_output import ChatFormats, ChoiceOutput
from sglang.srt.entrypoints.openai.serving import OpenAIService, collect
from sglang.srt.entrypoints.output_stream import stream_events
from sglang.srt.function_call.events import collect as collect_events
from sglang.srt.managers.front.generate_request import GenerateOutput
from sglang.srt.managers.wire.io_struct import TokenMeta


async def messages(service: OpenAIService, body: MessagesRequest, request: Request) -> Response:
    rid = uuid.uuid4().hex
    budget = None if body.thinking is None else body.thinking.budget_tokens
    rendering = chat_call(service, chat_request(body), len(await request.body()), rid, budget)
    call, formats = await until_disconnect(request, rendering)
    choice = ChoiceOutput(formats, service.tokenizer)

    def usage(meta: TokenMeta) -> dict[str, Any]:
        return parts.usage(meta, service.report_cached_tokens)

    def message(meta: TokenMeta, content: list[dict[str, Any]]) -> dict[str, Any]:
        return parts.message(f"msg_{rid}", body.model or service.model_name, content, usage(meta))

    if body.stream:
        writer = MessageStream(formats, choice, lambda meta: message(meta, []), usage, body.stop_sequences)
        return await stream_events(service.manager, request, call, lambda _: writer, done=b"")
    _, (output,) = await collect(service, request, call)
    assert output.finish is not None
    content, has_calls = _content(formats, choice, output)
    return json_response(message(output.meta, content) | parts.ending(output.finish, has_calls, body.stop_sequences))


def _content(formats: ChatFormats, choice: ChoiceOutput, output: GenerateOutput) -> tuple[list[dict[str, Any]], bool]:
    """The blocks of a whole answer, and whether it has calls."""
    parsed = collect_events(choice.push(output))
    content = [parts.thinking_block(parsed.reasoning)] if parsed.reasoning else []
    if parsed.text:
        content.append(parts.text_block(parsed.text))
    for number, call in enumerate(parsed.calls):
        call_id = formats.call_id(call.name, number, parts.CALL_ID_PREFIX)
        content.append(parts.tool_use_block(call_id, call.name, call.arguments))
    return content, bool(parsed.calls)


async def count_tokens(service: OpenAIService, body: CountTokensRequest, request: Request) -> Response:
    counting = count_prompt(service, chat_request(body), len(await request.body()))
    count = await until_disconnect(request, counting)
    return json_response({"input_tokens": count})
