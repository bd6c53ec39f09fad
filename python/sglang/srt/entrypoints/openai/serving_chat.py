"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.http_errors import bad_request, json_response
from sglang.srt.entrypoints.openai.chunks import ChatChunks, encode
from sglang.srt.entrypoints.openai.logprobs import chat_logprobs
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, NamedToolChoice
from sglang.srt.entrypoints.openai.sampling import cache_namespace, sampling_dict
from sglang.srt.entrypoints.openai.serving import (
    OpenAIService,
    ResponseHead,
    collect,
    new_head,
    stream_events,
)
from sglang.srt.entrypoints.openai.usage import UsageCounter
from sglang.srt.managers.generate_request import GenerateOutput, GenerateRequest
from sglang.srt.managers.io_struct import OutputLogprobs
from sglang.srt.managers.native_output import WEIGHT_VERSION
from sglang.srt.managers.tokenizer_manager import LONG_TEXT


async def chat_completions(service: OpenAIService, body: ChatCompletionRequest, request: Request) -> Response:
    head, rid = new_head("chatcmpl-", body, service)
    call = await _generate_request(service, body, rid, len(await request.body()))
    usage = UsageCounter(body.num_choices, service.report_cached_tokens)
    if body.stream:
        return await stream_events(service, request, call, lambda _: _ChatWriter(service, body, head, usage))
    _, outputs = await collect(service, request, call)
    for output in outputs:
        usage.update(output.index, output.meta)
    return json_response(
        {
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": [_choice(service, output) for output in outputs],
            "usage": usage.as_dict(),
            "metadata": {"weight_version": WEIGHT_VERSION},
        }
    )


async def _generate_request(
    service: OpenAIService, body: ChatCompletionRequest, rid: str | list[str], num_bytes: int
) -> GenerateRequest:
    _check_tool_choice(body)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    prompt = None
    if body.input_ids is None:
        _ = service.tokenizer
        render = service.chat_template.render
        prompt = render(body) if num_bytes < LONG_TEXT else await service.manager.in_thread(render, body)
    return GenerateRequest(
        text=prompt,
        input_ids=body.input_ids,
        add_special_tokens=False,
        sampling_params=sampling_dict(body, max_tokens),
        stream=bool(body.stream),
        return_logprob=bool(body.logprobs),
        top_logprobs_num=body.top_logprobs or 0,
        rid=rid,
        priority=body.priority or 0,
        cache_namespace=cache_namespace(body),
    )


def _check_tool_choice(body: ChatCompletionRequest) -> None:
    if body.tool_choice == "required" or isinstance(body.tool_choice, NamedToolChoice):
        raise bad_request(
            "tool_choice that forces a call needs a server with --tool-call-parser, which this server does not have; "
            'use tool_choice "auto" and read the call from the text',
            param="tool_choice",
        )


def _logprobs(service: OpenAIService, logprobs: OutputLogprobs | None) -> dict[str, Any] | None:
    return None if logprobs is None else chat_logprobs(service.tokenizer, logprobs)


def _choice(service: OpenAIService, output: GenerateOutput) -> dict[str, Any]:
    assert output.finish is not None
    return {
        "index": output.index,
        "message": {"role": "assistant", "content": output.text, "reasoning_content": None, "tool_calls": None},
        "logprobs": _logprobs(service, output.logprobs),
        "finish_reason": output.finish.type,
        "matched_stop": output.finish.matched,
    }


class _ChatWriter:
    def __init__(
        self, service: OpenAIService, body: ChatCompletionRequest, head: ResponseHead, usage: UsageCounter
    ) -> None:
        self._service = service
        self._chunks = ChatChunks(head.id, head.created, head.model)
        self._usage = usage
        self._continuous = body.continuous_usage
        self._final_usage = body.include_usage
        self._introduced: set[int] = set()

    def write(self, output: GenerateOutput) -> bytes:
        index = output.index
        self._usage.update(index, output.meta)
        usage = encode(self._usage.as_dict()) if self._continuous else b"null"
        events = b""
        if index not in self._introduced:
            self._introduced.add(index)
            events = self._chunks.role(index, usage)
        if output.logprobs is not None and output.logprobs.output:
            events += self._chunks.text(index, output.text, encode(_logprobs(self._service, output.logprobs)), usage)
        elif output.text:
            events += self._chunks.text(index, output.text, usage=usage)
        if output.finish is not None:
            events += self._chunks.finish(index, output.finish.type, output.finish.matched, usage)
        return events

    def end(self) -> bytes:
        return self._chunks.usage(self._usage.as_dict()) if self._final_usage else b""
