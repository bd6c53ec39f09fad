"""Shared parts of the OpenAI endpoints: their view of the engine, and the collection of a call's outputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.held_body import releases_body
from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.http_request_id import rid_of
from sglang.srt.entrypoints.http_stream import until_disconnect
from sglang.srt.entrypoints.long_json import answer_call
from sglang.srt.entrypoints.long_outputs import written
from sglang.srt.entrypoints.openai.protocol import SamplingFields
from sglang.srt.entrypoints.openai.template_pool import TemplatePool
from sglang.srt.function_call.model_formats import ModelFormats
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.managers.front.text_encoder import LONG_TEXT
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.utils.hf_tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OpenAIService:
    """The engine with the settings that the endpoints need."""

    manager: TokenizerManager
    chat_template: TemplatePool
    model_name: str
    report_cached_tokens: bool
    formats: ModelFormats
    aliases: frozenset[str] = frozenset()
    """Other names of the model, on a server of several."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer. Raises ApiError 400 if the server runs without one."""
        if self.manager.tokenizer is None:
            raise ApiError(400, "the server runs with --skip-tokenizer-init: use /generate with input_ids")
        return self.manager.tokenizer


async def off_event_loop(service: OpenAIService, num_bytes: int, work: Callable[..., T], *args: Any) -> T:
    """Calls `work` for a conversation of about `num_bytes` outside of the event loop, unless it is short."""
    return work(*args) if num_bytes < LONG_TEXT else await service.manager.text.in_thread(num_bytes, work, *args)


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The fields that all chunks of one response repeat."""

    id: str
    created: int
    model: str


def new_head(
    prefix: str, body: SamplingFields, service: OpenAIService, request: Request
) -> tuple[ResponseHead, str | list[str]]:
    """Returns the response's head and the request id(s) for the engine. The response names the model as the request
    does."""
    rid = body.rid or rid_of(request)
    name = rid if isinstance(rid, str) else rid[0]
    return ResponseHead(prefix + name, int(time.time()), body.model or service.model_name), rid


async def collect(
    service: OpenAIService, request: Request, call: GenerateRequest
) -> tuple[GenerationStream, list[GenerateOutput]]:
    """Returns all complete outputs of `call`, releasing the request's body; aborts the call when the client
    disconnects."""
    releases_body(request, call)

    async def work() -> tuple[GenerationStream, list[GenerateOutput]]:
        async with await service.manager.submit(call) as stream:
            return stream, await stream.collect()

    return await until_disconnect(request, work())


async def answered(
    service: OpenAIService,
    request: Request,
    call: GenerateRequest,
    write: Callable[[GenerationStream, list[GenerateOutput]], Response],
    num_more: Callable[[GenerationStream], int] = lambda _: 0,
) -> Response:
    """Returns the response that `write` makes of what `collect` returns, in a thread if it is long. The outputs' log
    probabilities count among those of all calls until it is sent. num_more: returns the characters that are written
    besides the outputs."""
    releases_body(request, call)

    async def response(stream: GenerationStream) -> Response:
        outputs = await stream.collect()
        return await written(outputs, partial(write, stream, outputs), num_more(stream))

    async def work() -> Response:
        return await answer_call(await service.manager.submit(call), response)

    return await until_disconnect(request, work())
