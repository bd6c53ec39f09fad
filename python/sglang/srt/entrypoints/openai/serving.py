"""The part that the OpenAI endpoints share: their connections, and how a call becomes one response or a stream of
events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.http_stream import DONE, SSE, EventStream, StreamForm, until_disconnect
from sglang.srt.entrypoints.openai.chat_template import ChatTemplate
from sglang.srt.entrypoints.openai.protocol import SamplingFields
from sglang.srt.environ import envs
from sglang.srt.function_call.model_formats import ModelFormats
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.utils.hf_tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OpenAIService:
    """The engine as the endpoints see it."""

    manager: TokenizerManager
    chat_template: ChatTemplate
    model_name: str
    report_cached_tokens: bool
    formats: ModelFormats

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ApiError 400 when the server runs without one."""
        if self.manager.tokenizer is None:
            raise ApiError(400, "the server runs with --skip-tokenizer-init: use /generate with input_ids")
        return self.manager.tokenizer


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The fields that all parts of one response repeat."""

    id: str
    created: int
    model: str


def new_head(prefix: str, request: SamplingFields, service: OpenAIService) -> tuple[ResponseHead, str | list[str]]:
    """The response's identity and the request id(s) that the engine shall use. The response names the model as the
    request does."""
    rid = request.rid or uuid.uuid4().hex
    name = rid if isinstance(rid, str) else rid[0]
    return ResponseHead(prefix + name, int(time.time()), request.model or service.model_name), rid


async def collect(
    service: OpenAIService, request: Request, call: GenerateRequest
) -> tuple[GenerationStream, list[GenerateOutput]]:
    """All outputs of `call`, complete; aborted when the client disconnects."""

    async def work() -> tuple[GenerationStream, list[GenerateOutput]]:
        async with await service.manager.submit(call) as stream:
            return stream, await stream.collect()

    return await until_disconnect(request, work())


async def _first_output(stream: GenerationStream, limit_s: float | None) -> GenerateOutput | None:
    """None: there was none in this time; it is still to come."""
    try:
        return await asyncio.wait_for(anext(stream, None), limit_s)
    except asyncio.TimeoutError:
        return None


class StreamWriter(Protocol):
    """Turns the outputs of one call into events."""

    def write(self, output: GenerateOutput) -> bytes:
        """The events for one output, possibly none (empty)."""
        ...

    def end(self) -> bytes:
        """The events after the last output."""
        ...


async def stream_events(
    service: OpenAIService,
    request: Request,
    call: GenerateRequest,
    make_writer: Callable[[GenerationStream], StreamWriter],
    done: bytes = DONE,
    fail: Callable[[ApiError], bytes] | None = None,
    form: StreamForm = SSE,
) -> Response:
    """A streamed response. What goes wrong before the first event raises, so that it gets an HTTP status, unless that
    takes so long that the connection must be kept alive; `fail` writes what goes wrong later, if not as the route's
    error events."""

    async def start() -> tuple[GenerationStream, StreamWriter, bytes]:
        stream = await service.manager.submit(call)
        try:
            writer = make_writer(stream)
            output = await _first_output(stream, envs.SGLANG_SSE_KEEP_ALIVE if form.keep_alive else None)
            return stream, writer, b"" if output is None else writer.write(output)
        except BaseException:
            await stream.aclose()
            raise

    stream, writer, first = await until_disconnect(request, start())
    return EventStream(first, stream, writer.write, request.url.path, writer.end, done, fail, form)
