"""Outputs with much to write: a parser may hold text for long and then give thousands of events at once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.entrypoints.anthropic import message_stream
from sglang.srt.entrypoints.anthropic.message_stream import MessageStream
from sglang.srt.entrypoints.openai.chat_output import ChatFormats, ChoiceOutput
from sglang.srt.entrypoints.openai.chunks import ChunkWriter
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving import ResponseHead as ChatHead
from sglang.srt.entrypoints.openai.serving_chat import _ChatWriter
from sglang.srt.entrypoints.openai.usage import UsageCounter, UsageOptions
from sglang.srt.entrypoints.output_stream import StreamWriter
from sglang.srt.entrypoints.responses.protocol import ResponsesRequest
from sglang.srt.entrypoints.responses.response_object import ResponseHead
from sglang.srt.entrypoints.responses.response_stream import ResponseStream
from sglang.srt.entrypoints.responses.tools import ToolCatalog
from sglang.srt.function_call.model_formats import ModelFormats
from sglang.srt.managers.front.generate_request import GenerateOutput
from sglang.srt.managers.wire.io_struct import TokenMeta

TOOL = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


class Events(bytes):
    """Bytes that count those copied by adding to them."""

    num_copied = 0

    def __add__(self, other: Any) -> Events:
        Events.num_copied += len(self) + len(other)
        return Events(bytes.__add__(self, other))

    def __radd__(self, other: bytes) -> Events:
        Events.num_copied += len(self) + len(other)
        return Events(bytes.__add__(other, self))


def output(text: str) -> GenerateOutput:
    return GenerateOutput(0, text, [], None, TokenMeta(1, 1), None)


def new_formats() -> ChatFormats:
    body = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], tools=[TOOL])
    return ChatFormats(ModelFormats("hermes", "qwen3"), body, "")


def chat_writer(formats: ChatFormats) -> StreamWriter:
    service: Any = SimpleNamespace(manager=SimpleNamespace(tokenizer=None))
    told = UsageOptions(False, False, False)
    return _ChatWriter(service, formats, True, told, ChatHead("id", 1, "m"), UsageCounter(1, False))


def message_writer(formats: ChatFormats) -> StreamWriter:
    rules: Any = None
    return MessageStream(rules, True, formats, ChoiceOutput(formats, None), lambda _: {}, lambda _: {}, {})


def response_writer(formats: ChatFormats) -> StreamWriter:
    head = ResponseHead("id", 1, "m", ResponsesRequest(input="a"), ToolCatalog([]), False)
    return ResponseStream(head, formats, ChoiceOutput(formats, None), lambda _: None)


WRITERS = pytest.mark.parametrize("new_writer", [chat_writer, message_writer, response_writer])


@WRITERS
def test_events_that_come_at_once_are_copied_once(
    new_writer: Callable[[ChatFormats], StreamWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[tuple[Any, str]] = [(ChunkWriter, "_event"), (message_stream, "_sse"), (ResponseStream, "_sse")]
    for owner, name in writes:
        write = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, _write=write, **fields: Events(_write(*args, **fields)))
    Events.num_copied = 0
    written = new_writer(new_formats()).write(output(CALL * 500))
    assert written.count(b'"name":"now"') >= 500
    assert Events.num_copied < 4 * len(written)
