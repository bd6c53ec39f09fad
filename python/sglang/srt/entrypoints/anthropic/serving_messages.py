"""`POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.anthropic import message_parts as parts
from sglang.srt.entrypoints.anthropic.context_edits import apply_edits
from sglang.srt.entrypoints.anthropic.conversation import chat_request
from sglang.srt.entrypoints.anthropic.message_stream import MessageStream
from sglang.srt.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from sglang.srt.entrypoints.held_body import body_bytes
from sglang.srt.entrypoints.http_errors import json_response
from sglang.srt.entrypoints.http_request_id import rid_of
from sglang.srt.entrypoints.http_stream import until_disconnect
from sglang.srt.entrypoints.long_outputs import written
from sglang.srt.entrypoints.openai.chat_call import chat_call, count_prompt
from sglang.srt.entrypoints.openai.chat_output import ChatFormats, ChoiceOutput
from sglang.srt.entrypoints.openai.serving import OpenAIService, collect, off_event_loop
from sglang.srt.entrypoints.output_stream import stream_events
from sglang.srt.function_call.events import collect as collect_events
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest
from sglang.srt.managers.wire.io_struct import TokenMeta


async def messages(service: OpenAIService, body: MessagesRequest, request: Request) -> Response:
    """Answers `POST /v1/messages`, whole or as a stream."""
    rid, model = rid_of(request), body.model or service.model_name
    rules = parts.EndingRules(body.max_tokens, body.stop_sequences)
    shows_thoughts = not body.hides_thoughts
    preparation = _prepare_call(service, body, body_bytes(request), rid)
    del body  # nothing may hold it once the call is submitted (`held_body.releases_body`)
    call, formats, edit_report = await until_disconnect(request, preparation)
    choice = ChoiceOutput(formats, service.tokenizer)

    def usage(meta: TokenMeta) -> dict[str, Any]:
        return parts.usage(meta, service.report_cached_tokens)

    def message(meta: TokenMeta, content: list[dict[str, Any]]) -> dict[str, Any]:
        return parts.message(f"msg_{rid}", model, content, usage(meta))

    if call.stream:
        writer = MessageStream(
            rules, shows_thoughts, formats, choice, lambda meta: message(meta, []), usage, edit_report
        )
        return await stream_events(service.manager, request, call, lambda _: writer, done=b"")
    _, (output,) = await collect(service, request, call)
    assert output.finish is not None
    content, has_calls = await written([output], lambda: _content_blocks(formats, choice, output, not shows_thoughts))
    ending = rules.ending(output.finish, has_calls, output.meta)
    return json_response(message(output.meta, content) | ending | edit_report)


async def _prepare_call(
    service: OpenAIService, body: MessagesRequest, num_bytes: int, rid: str
) -> tuple[GenerateRequest, ChatFormats, dict[str, Any]]:
    """Applies the client's edits to the conversation and converts the request to a call of the engine. Returns the
    call, the formats of its outputs, and the answer's field that reports the edits ({} if none were asked for)."""
    edit_report = await _edit_messages(service, body, num_bytes)
    budget = None if body.thinking is None else body.thinking.budget_tokens
    chat = await off_event_loop(service, num_bytes, chat_request, body)
    return *await chat_call(service, chat, num_bytes, rid, budget, folds=True), edit_report


async def _edit_messages(service: OpenAIService, body: CountTokensRequest, num_bytes: int) -> dict[str, Any]:
    """Applies the edits of `context_management` to `body.messages`. Returns the answer's field `context_management`, or
    {} if the client asked for no edits."""
    if body.context_management is None:
        return {}
    in_thread = partial(off_event_loop, service, num_bytes)
    applied = await apply_edits(body, lambda: _count(service, body, num_bytes), in_thread)
    return {"context_management": {"applied_edits": applied}}


async def _count(service: OpenAIService, body: CountTokensRequest, num_bytes: int) -> int:
    """Returns the number of prompt tokens of the conversation as it is now."""
    return await count_prompt(
        service, await off_event_loop(service, num_bytes, chat_request, body), num_bytes, folds=True
    )


def _content_blocks(
    formats: ChatFormats, choice: ChoiceOutput, output: GenerateOutput, hides_thoughts: bool
) -> tuple[list[dict[str, Any]], bool]:
    """Returns the content blocks of an answer that is not streamed, and whether tool calls are among them."""
    parsed = collect_events(choice.push(output))
    content = [parts.thinking_block(parsed.reasoning, hides_thoughts)] if parsed.reasoning else []
    if parsed.text:
        content.append(parts.text_block(parsed.text))
    for number, call in enumerate(parsed.calls):
        call_id = formats.call_id(call.name, number, parts.CALL_ID_PREFIX)
        content.append(parts.tool_use_block(call_id, call.name, call.arguments))
    return content, bool(parsed.calls)


async def count_tokens(service: OpenAIService, body: CountTokensRequest, request: Request) -> Response:
    """Answers `POST /v1/messages/count_tokens`: the number of tokens; with `context_management`, the numbers
    after its edits and before them."""
    return json_response(await until_disconnect(request, _counts(service, body, body_bytes(request))))


async def _counts(service: OpenAIService, body: CountTokensRequest, num_bytes: int) -> dict[str, Any]:
    count = await _count(service, body, num_bytes)
    if body.context_management is None:
        return {"input_tokens": count}
    original = {"context_management": {"original_input_tokens": count}}
    if (await _edit_messages(service, body, num_bytes))["context_management"]["applied_edits"]:
        count = await _count(service, body, num_bytes)
    return {"input_tokens": count, **original}
