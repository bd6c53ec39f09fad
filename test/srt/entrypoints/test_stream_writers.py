"""Outputs with much to write: a parser may hold text for long and then give thousands of events at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang.srt.entrypoints.anthropic import message_stream
from sglang.srt.entrypoints.anthropic.message_stream import MessageStream
from sglang.srt.entrypoints.long_outputs import LONG_OUTPUT
from sglang.srt.entrypoints.ollama.answer import AnswerWriter
from sglang.srt.entrypoints.openai.chat_output import ChatFormats, ChoiceOutput
from sglang.srt.entrypoints.openai.chunks import ChunkWriter
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving import ResponseHead as ChatHead
from sglang.srt.entrypoints.openai.serving_chat import _ChatWriter
from sglang.srt.entrypoints.openai.serving_completions import _CompletionWriter, _Echo
from sglang.srt.entrypoints.openai.usage import UsageCounter, UsageOptions
from sglang.srt.entrypoints.output_stream import StreamWriter, length_written
from sglang.srt.entrypoints.responses.protocol import ResponsesRequest
from sglang.srt.entrypoints.responses.response_object import ResponseHead, echoed_fields
from sglang.srt.entrypoints.responses.response_stream import ResponseStream
from sglang.srt.entrypoints.responses.tools import ToolCatalog
from sglang.srt.function_call.model_formats import ModelFormats
from sglang.srt.managers.front.generate_request import GenerateOutput
from sglang.srt.managers.wire.io_struct import TokenMeta

TOOL = {"type": "function", "function": {"name": "now"}}
TOKENIZER: Any = object()  # no output here has token ids
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


def takes_long(writer: StreamWriter, output: GenerateOutput) -> bool:
    return length_written(writer, output) > LONG_OUTPUT


def output(text: str) -> GenerateOutput:
    return GenerateOutput(0, text, [], None, TokenMeta(1, 1), None)


def new_formats() -> ChatFormats:
    body = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], tools=[TOOL])
    return ChatFormats(ModelFormats("hermes", "qwen3"), body, "")


NUM_ECHOED = 100


def chat_writer(formats: ChatFormats) -> StreamWriter:
    service: Any = SimpleNamespace(manager=SimpleNamespace(tokenizer=TOKENIZER))
    told = UsageOptions(False, False, False)
    return _ChatWriter(service, formats, True, told, ChatHead("id", 1, "m"), UsageCounter(1, False))


def message_writer(formats: ChatFormats) -> StreamWriter:
    rules: Any = None
    return MessageStream(rules, True, formats, ChoiceOutput(formats, TOKENIZER), lambda _: {}, lambda _: {}, {})


def response_writer(formats: ChatFormats) -> StreamWriter:
    echoed = echoed_fields(ResponsesRequest(input="a"))
    head = ResponseHead("id", 1, "m", False, ToolCatalog([]), False, echoed, NUM_ECHOED)
    return ResponseStream(head, formats, ChoiceOutput(formats, TOKENIZER), lambda _: None)


@pytest.mark.parametrize("new_writer", [chat_writer, message_writer, response_writer])
def test_events_that_come_at_once_are_copied_once(
    new_writer: Callable[[ChatFormats], StreamWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[tuple[Any, str]] = [(ChunkWriter, "_event"), (message_stream, "_sse"), (ResponseStream, "_sse")]
    for owner, name in writes:
        write = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, _write=write, **fields: Events(_write(*args, **fields)))
    Events.num_copied = 0
    written = new_writer(new_formats()).write(output(CALL * 500))
    written = written if isinstance(written, bytes) else b"".join(written)
    assert written.count(b'"name":"now"') >= 500
    assert Events.num_copied < 4 * len(written)


def test_a_large_echo_is_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not takes_long(response_writer(new_formats()), output("a"))
    monkeypatch.setattr(sys.modules[__name__], "NUM_ECHOED", 2 << 20)
    assert takes_long(response_writer(new_formats()), output("a"))


def ollama_writer(formats: ChatFormats) -> StreamWriter:
    return AnswerWriter("m", ChoiceOutput(formats, TOKENIZER), True)


@pytest.mark.parametrize("new_writer", [chat_writer, message_writer, response_writer, ollama_writer])
def test_an_output_is_long_by_its_text_and_by_what_was_held_before(
    new_writer: Callable[[ChatFormats], StreamWriter],
) -> None:
    """Calls in thoughts are held until the thoughts end; the arguments of a call are not."""
    long, short = output("a" * (LONG_OUTPUT + 1)), output("a")
    writer = new_writer(new_formats())
    assert takes_long(writer, long) and not takes_long(writer, short)

    for text in ("<think>", long.text):
        writer.write(output(text))
        assert not takes_long(writer, short)
    writer.write(output(CALL * 500))
    assert takes_long(writer, short)
    writer.write(output("</think>"))
    writer.write(output("b"))
    assert not takes_long(writer, short)

    writer = new_writer(new_formats())
    writer.write(output(CALL[:-12] + '"' + long.text))
    assert not takes_long(writer, short)


@pytest.mark.parametrize("prompt", ["a" * (LONG_OUTPUT + 1), None, "short"])
def test_an_echo_is_part_of_the_first_output(prompt: str | None) -> None:
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return "a" * len(ids)

    service: Any = SimpleNamespace(tokenizer=Tokenizer())
    request = SimpleNamespace(input_ids=np.zeros(LONG_OUTPUT + 1, np.int32))
    stream: Any = SimpleNamespace(num_samples=1, prompt_texts=[prompt], requests=[request])
    told = UsageOptions(False, False, False)
    for echoes in (True, False):
        writer = _CompletionWriter(_Echo(service, echoes, stream), told, ChatHead("id", 1, "m"), UsageCounter(1, False))
        assert takes_long(writer, output("b")) is (echoes and prompt != "short")
        writer.write(output("b"))
        assert not takes_long(writer, output("b"))
