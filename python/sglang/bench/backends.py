"""Requests for each kind of server, and their times and counts from the stream of events."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sglang.bench.datasets import Prompt
from sglang.bench.http_client import Endpoint, HttpError, send


@dataclass(slots=True)
class RequestResult:
    """Result of a request, times in seconds. TTFT: from the send to the first token. `itl`: gaps between later chunks.
    `latency`: from the send to the last token."""

    prompt_len: int
    output_len: int = 0
    cached_tokens: int = 0
    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""

    @property
    def success(self) -> bool:
        """Returns whether the request ended without an error."""
        return not self.error

    @property
    def tpot(self) -> float | None:
        """Returns the time per output token after the first; None for single tokens."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of all requests of a run."""

    model: str
    stream: bool = True
    ignore_eos: bool = True
    return_logprob: bool = False
    keep_text: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)


class _Clock:
    """Turns arrival times of token chunks into TTFT and gaps."""

    def __init__(self, result: RequestResult) -> None:
        self.result = result
        self.chunks = 0
        self._last = 0.0

    def tick(self, now: float) -> None:
        if self.chunks == 0:
            self.result.ttft = now - self.result.start
        else:
            self.result.itl.append(now - self._last)
        self.chunks += 1
        self._last = now
        self.result.latency = now - self.result.start


# --- /generate --------------------------------------------------------------------------------------------------------


class _GenerateMeta(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: Any = None


class _GenerateEvent(msgspec.Struct):
    """An event of /generate, without text and ids: they are cumulative, so reading them once, at the end, is enough."""

    meta_info: _GenerateMeta | None = None
    error: Any = None


_generate_event = msgspec.json.Decoder(_GenerateEvent)
_META = b'"meta_info":'


def _read_generate_event(data: bytes) -> _GenerateEvent:
    """Reads the event from its meta_info on, as the part before grows with each token. Quotes in JSON strings are
    escaped, so the name cannot occur in a string."""
    start = data.rfind(_META)
    return _generate_event.decode(data if start < 0 else b"{" + data[start:])


def generate_body(prompt: Prompt, options: CallOptions) -> dict[str, Any]:
    """Returns the body of a request to /generate."""
    sampling = {"temperature": 0.0, "max_new_tokens": prompt.output_len, "ignore_eos": options.ignore_eos}
    body: dict[str, Any] = {"sampling_params": sampling, "stream": options.stream}
    body |= {"input_ids": prompt.ids} if prompt.ids is not None else {"text": prompt.text}
    if options.return_logprob:
        body["return_logprob"] = True
    extra = dict(options.extra_body)
    sampling |= extra.pop("sampling_params", {})
    return body | extra


class GenerateReader:
    """Reads the events of /generate."""

    def __init__(self, result: RequestResult, keep_text: bool) -> None:
        self.clock = _Clock(result)
        self.result = result
        self.keep_text = keep_text
        self._last = b""
        self._tokens = 0

    def on_event(self, data: bytes, now: float) -> None:
        if data.startswith(b"[DONE]"):
            return
        event = _read_generate_event(data)
        if event.meta_info is None:
            raise_on_error(event.error)
            return
        self._last = data
        if event.meta_info.completion_tokens > self._tokens:
            self._tokens = event.meta_info.completion_tokens
            self.clock.tick(now)

    def finish(self, body: bytes, now: float) -> None:
        """Completes the result. `body`: the answer if it was not streamed."""
        if body:
            self.on_event(body, now)
        if not self._last:
            raise HttpError("the server sent no output")
        meta = _read_generate_event(self._last).meta_info
        assert meta is not None
        reason = meta.finish_reason
        if isinstance(reason, dict) and reason.get("type") == "abort":
            raise HttpError(f"aborted: {reason.get('message')}")
        self.result.output_len = meta.completion_tokens
        self.result.cached_tokens = meta.cached_tokens
        self.result.prompt_len = meta.prompt_tokens or self.result.prompt_len
        if self.keep_text:
            self.result.text = json.loads(self._last).get("text") or ""


# --- OpenAI -----------------------------------------------------------------------------------------------------------


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None

    def any_text(self) -> str:
        return (self.reasoning_content or "") + (self.content or "") + ("\0" if self.tool_calls else "")


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _OpenAIEvent(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_openai_event = msgspec.json.Decoder(_OpenAIEvent)


def _openai_body(prompt: Prompt, options: CallOptions) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": options.model,
        "temperature": 0.0,
        "max_tokens": prompt.output_len,
        "stream": options.stream,
        "ignore_eos": options.ignore_eos,
    }
    if options.stream:
        body["stream_options"] = {"include_usage": True}
    return body


def completions_body(prompt: Prompt, options: CallOptions) -> dict[str, Any]:
    """Returns the body of a request to /v1/completions."""
    sent = prompt.ids if prompt.ids is not None else prompt.text
    logprobs = {"logprobs": 1} if options.return_logprob else {}
    return _openai_body(prompt, options) | {"prompt": sent} | logprobs | options.extra_body


def chat_body(prompt: Prompt, options: CallOptions) -> dict[str, Any]:
    """Returns the body of a request to /v1/chat/completions; the prompt needs a text."""
    assert prompt.text is not None, "the chat endpoint takes text"
    logprobs = {"logprobs": True} if options.return_logprob else {}
    messages = [{"role": "user", "content": prompt.text}]
    return _openai_body(prompt, options) | {"messages": messages} | logprobs | options.extra_body


class OpenAIReader:
    """Reads the events of the OpenAI routes."""

    def __init__(self, result: RequestResult, keep_text: bool) -> None:
        self.clock = _Clock(result)
        self.result = result
        self.keep_text = keep_text
        self._text: list[str] = []
        self._usage: _Usage | None = None

    def on_event(self, data: bytes, now: float) -> None:
        if data.startswith(b"[DONE]"):
            return
        event = _openai_event.decode(data)
        raise_on_error(event.error)
        self._usage = event.usage or self._usage
        text = "".join(_choice_text(c) for c in event.choices)
        if text:
            self.clock.tick(now)
            if self.keep_text:
                self._text.append(text)

    def finish(self, body: bytes, now: float) -> None:
        if body:
            self.on_event(body, now)
        usage = self._usage
        if usage is None and not self.clock.chunks:
            raise HttpError("the server sent no output")
        if not self.clock.chunks:  # all tokens had empty texts
            self.clock.tick(now)
        self.result.output_len = self.clock.chunks
        if usage is not None:
            self.result.output_len = usage.completion_tokens or self.clock.chunks
            self.result.prompt_len = usage.prompt_tokens or self.result.prompt_len
            details = usage.prompt_tokens_details
            self.result.cached_tokens = (details.cached_tokens or 0) if details is not None else 0
        self.result.text = "".join(self._text)


def _choice_text(choice: _Choice) -> str:
    part = choice.delta or choice.message
    return part.any_text() if part is not None else choice.text or ""


def raise_on_error(error: Any) -> None:
    """Raises HttpError for an error that the server reported."""
    if error is not None:
        raise HttpError(f"the server reported: {json.dumps(error)[:500]}")


# --- all of them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Backend:
    """How a kind of server is asked."""

    path: str
    body: Callable[[Prompt, CallOptions], dict[str, Any]]
    reader: Callable[[RequestResult, bool], GenerateReader | OpenAIReader]
    default_port: int
    takes_ids: bool
    """True if prompts that are token ids by nature (random-ids) are sent as such unless text is asked for."""
    is_sglang: bool = True


BACKENDS: Mapping[str, Backend] = {
    "sglang": Backend("/generate", generate_body, GenerateReader, 30000, True),
    "sglang-native": Backend("/generate", generate_body, GenerateReader, 30000, True),
    "sglang-oai": Backend("/v1/completions", completions_body, OpenAIReader, 30000, False),
    "sglang-oai-chat": Backend("/v1/chat/completions", chat_body, OpenAIReader, 30000, False),
    "vllm": Backend("/v1/completions", completions_body, OpenAIReader, 8000, False, is_sglang=False),
    "vllm-chat": Backend("/v1/chat/completions", chat_body, OpenAIReader, 8000, False, is_sglang=False),
}


async def run_request(backend: Backend, endpoint: Endpoint, prompt: Prompt, options: CallOptions) -> RequestResult:
    """Sends one request and reads its answer. A failure is stored in the result, as a load test goes on."""
    result = RequestResult(prompt.prompt_len)
    reader = backend.reader(result, options.keep_text)
    failure: list[Exception] = []

    def on_event(data: bytes, now: float) -> None:
        try:
            reader.on_event(data, now)
        except (HttpError, msgspec.DecodeError) as error:
            failure.append(error)

    body = backend.body(prompt, options)
    result.start = time.perf_counter()
    try:
        answer = await send(endpoint, "POST", backend.path, body, on_event if options.stream else None)
        if failure:
            raise failure[0]
        reader.finish(answer, time.perf_counter())
    except (HttpError, msgspec.DecodeError) as error:
        result.error = str(error)
    return result
