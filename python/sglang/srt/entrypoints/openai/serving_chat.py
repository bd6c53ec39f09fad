"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.held_body import body_bytes
from sglang.srt.entrypoints.http_stream import Events, until_disconnect
from sglang.srt.entrypoints.long_json import LongJSON
from sglang.srt.entrypoints.openai.chat_call import chat_call
from sglang.srt.entrypoints.openai.chat_output import ChatFormats, ChoiceOutput
from sglang.srt.entrypoints.openai.chunks import ChatChunks, encode
from sglang.srt.entrypoints.openai.logprobs import chat_logprobs
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving import (
    OpenAIService,
    ResponseHead,
    answered,
    new_head,
)
from sglang.srt.entrypoints.openai.usage import UsageCounter, UsageOptions
from sglang.srt.entrypoints.output_stream import stream_events
from sglang.srt.function_call.events import ArgumentsDelta, CallStart, Event, ReasoningDelta, TextDelta
from sglang.srt.function_call.events import collect as collect_events
from sglang.srt.managers.front.generate_request import GenerateOutput, refuse_aborted
from sglang.srt.managers.front.generation_stream import GenerationStream


async def chat_completions(service: OpenAIService, body: ChatCompletionRequest, request: Request) -> Response:
    """Answers `POST /v1/chat/completions`, whole or as a stream."""
    head, rid = new_head("chatcmpl-", body, service, request)
    told, shows = UsageOptions.of(body), not body.hides_thoughts
    usage = UsageCounter(body.num_choices, service.report_cached_tokens)
    rendering = chat_call(service, body, body_bytes(request), rid, body.wanted_thoughts)
    del body  # the answer needs no more of it
    call, formats = await until_disconnect(request, rendering)
    if call.stream:
        return await stream_events(
            service.manager, request, call, lambda _: _ChatWriter(service, formats, shows, told, head, usage)
        )

    def answer(_: GenerationStream, outputs: list[GenerateOutput]) -> Response:
        choices, long = [], LongJSON()
        for output in outputs:
            choices.append(_choice(service, formats, shows, output, long))
            usage.update(output.index, output.meta)
        return long.response(
            {
                "id": head.id,
                "object": "chat.completion",
                "created": head.created,
                "model": head.model,
                "choices": choices,
                "usage": usage.as_dict(),
                "metadata": {"weight_version": service.manager.weight_version},
                **({"sglext": usage.extension()} if told.extension else {}),
            }
        )

    return await answered(service, request, call, answer)


def _choice(
    service: OpenAIService, formats: ChatFormats, shows_thoughts: bool, output: GenerateOutput, long: LongJSON
) -> dict[str, Any]:
    assert output.finish is not None
    message, has_calls = _message(service, formats, output)
    if not shows_thoughts:
        message["reasoning_content"] = None
    logprobs = output.logprobs
    return {
        "index": output.index,
        "message": message,
        "logprobs": None if logprobs is None else long.part(chat_logprobs(service.tokenizer, logprobs)),
        "finish_reason": _finish_reason(output.finish.type, has_calls),
        "matched_stop": output.finish.matched,
    }


def _message(service: OpenAIService, formats: ChatFormats, output: GenerateOutput) -> tuple[dict[str, Any], bool]:
    """Returns the answer's message, and whether it has calls."""
    parsed = collect_events(ChoiceOutput(formats, service.manager.tokenizer).push(output))
    calls = [
        {
            "index": number,
            "id": formats.call_id(call.name, number),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(parsed.calls)
    ]
    message = {
        "role": "assistant",
        "content": parsed.text or (None if calls or parsed.reasoning else ""),
        "reasoning_content": parsed.reasoning or None,
        "tool_calls": calls or None,
    }
    return message, bool(calls)


def _finish_reason(reason: str, has_calls: bool) -> str:
    return "tool_calls" if has_calls and reason == "stop" else reason


_DELTAS = (TextDelta, ReasoningDelta, CallStart, ArgumentsDelta)


class _ChatWriter:
    def __init__(
        self,
        service: OpenAIService,
        formats: ChatFormats,
        shows_thoughts: bool,
        told: UsageOptions,
        head: ResponseHead,
        usage: UsageCounter,
    ) -> None:
        self._service = service
        self._formats = formats
        self._chunks = ChatChunks(head.id, head.created, head.model)
        self._usage = usage
        self._told = told
        self._kinds = tuple(kind for kind in _DELTAS if kind is not ReasoningDelta or shows_thoughts)
        self._introduced: set[int] = set()
        self._choices: dict[int, ChoiceOutput] = {}
        self._calling: set[int] = set()
        """Choices with a call."""

    def write(self, output: GenerateOutput) -> Events:
        index = output.index
        deltas = self._deltas(output)
        self._usage.update(index, output.meta)
        usage = encode(self._usage.as_dict()) if self._told.continuous else b"null"
        events = []
        if index not in self._introduced:
            self._introduced.add(index)
            events.append(self._chunks.role(index, usage))
        logprobs, long = b"null", LongJSON()
        if output.logprobs is not None and output.logprobs.output:
            logprobs = long.gap(chat_logprobs(self._service.tokenizer, output.logprobs))
            deltas = deltas or [TextDelta("")]
        for delta in deltas:
            events.append(self._delta(index, delta, logprobs, usage))
            logprobs = b"null"
        if output.finish is not None:
            refuse_aborted(output.finish)
            reason = _finish_reason(output.finish.type, index in self._calling)
            events.append(self._chunks.finish(index, reason, output.finish.matched, usage))
        return long.pieces(b"".join(events))

    def num_held(self, index: int) -> int:
        return self._choices[index].num_held if index in self._choices else 0

    def _deltas(self, output: GenerateOutput) -> list[Event]:
        """Returns the deltas for the output's events."""
        choice = self._choices.get(output.index)
        if choice is None:
            choice = self._choices[output.index] = ChoiceOutput(self._formats, self._service.manager.tokenizer)
        return [event for event in choice.push(output) if isinstance(event, self._kinds)]

    def _delta(self, index: int, delta: Event, logprobs: bytes, usage: bytes) -> bytes:
        chunks = self._chunks
        if isinstance(delta, TextDelta):
            return chunks.text(index, delta.text, logprobs, usage)
        if isinstance(delta, CallStart):
            self._calling.add(index)
            call_id = self._formats.call_id(delta.name, delta.call)
            return chunks.call(index, delta.call, call_id, delta.name, logprobs, usage)
        if isinstance(delta, ArgumentsDelta):
            return chunks.arguments(index, delta.call, delta.text, logprobs, usage)
        assert isinstance(delta, ReasoningDelta)
        return chunks.reasoning(index, delta.text, logprobs, usage)

    def end(self) -> bytes:
        usage = self._usage.as_dict() if self._told.final else None
        return self._chunks.totals(usage, self._usage.extension() if self._told.extension else None)
