"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.http_errors import bad_request
from sglang.srt.entrypoints.http_stream import Events
from sglang.srt.entrypoints.long_json import LongJSON
from sglang.srt.entrypoints.openai.adapter_names import AdapterNames, adapters_of
from sglang.srt.entrypoints.openai.chunks import CompletionChunks, encode, finish_fields
from sglang.srt.entrypoints.openai.logprobs import CompletionLogprobs
from sglang.srt.entrypoints.openai.protocol import CompletionRequest
from sglang.srt.entrypoints.openai.sampling import COMPLETION_DEFAULT_MAX_TOKENS, sampling_dict
from sglang.srt.entrypoints.openai.serving import (
    OpenAIService,
    ResponseHead,
    answered,
    new_head,
)
from sglang.srt.entrypoints.openai.usage import UsageCounter, UsageOptions
from sglang.srt.entrypoints.output_stream import stream_events
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest, refuse_aborted
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.sampling.output_logprobs import OutputLogprobs
from sglang.srt.utils.json_list import Pieces

MAX_ECHO_CHARS = 1 << 26
"""Characters of prompts that an answer may repeat: all of them are in memory several times while it is written."""
CHARS_PER_TOKEN = 16
"""Characters that a token id of a prompt counts as."""


async def completions(service: OpenAIService, body: CompletionRequest, request: Request) -> Response:
    """Answers `POST /v1/completions`, whole or as a stream."""
    _check(body)
    _ = service.tokenizer  # without a tokenizer the answer would be an empty text
    head, rid = new_head("cmpl-", body, service, request)
    call = _generate_request(body, rid, adapters_of(service, body.model, body.lora_path))
    echoes, told = bool(body.echo), UsageOptions.of(body)
    usage = UsageCounter(body.num_choices, service.report_cached_tokens)
    del body  # the answer needs no more of it
    if call.stream:
        return await stream_events(
            service.manager,
            request,
            call,
            lambda stream: _CompletionWriter(_Echo(service, echoes, stream), told, head, usage),
        )

    def answer(stream: GenerationStream, outputs: list[GenerateOutput]) -> Response:
        echo, long = _Echo(service, echoes, stream), LongJSON()
        for output in outputs:
            usage.update(output.index, output.meta)
        return long.response(
            {
                "id": head.id,
                "object": "text_completion",
                "created": head.created,
                "model": head.model,
                "choices": [_choice(echo, output, long) for output in outputs],
                "usage": usage.as_dict(),
                "metadata": {"weight_version": service.manager.weight_version},
                **({"sglext": usage.extension()} if told.extension else {}),
            }
        )

    def num_echoed(stream: GenerationStream) -> int:
        echo = _Echo(service, echoes, stream)
        return sum(map(echo.num_chars, range(len(stream.requests))))

    return await answered(service, request, call, answer, num_echoed)


def _check(body: CompletionRequest) -> None:
    if body.suffix is not None:
        raise bad_request("suffix (fill in the middle) is not supported", param="suffix")
    if body.best_of is not None and body.best_of != body.num_choices:
        raise bad_request("best_of other than n is not supported: leave it out", param="best_of")
    if not body.prompt:
        raise bad_request("prompt is empty", param="prompt")
    if body.echo:
        _bound_echo(body)


def _bound_echo(body: CompletionRequest) -> None:
    is_one = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    prompts: Any = [body.prompt] if is_one else body.prompt
    num_chars = body.num_choices * sum(_num_chars(prompt) for prompt in prompts)
    if num_chars > MAX_ECHO_CHARS:
        raise bad_request(
            f"echo repeats the prompts in each of {body.num_choices} choices, which makes {num_chars} characters;"
            f" {MAX_ECHO_CHARS} are the limit: leave echo out, or ask for fewer choices",
            param="echo",
        )


def _num_chars(prompt: str | list[int]) -> int:
    """Returns the characters of a prompt's text, or an estimate if it is token ids."""
    return CHARS_PER_TOKEN * len(prompt) if isinstance(prompt, list) else len(prompt)


def _generate_request(body: CompletionRequest, rid: str | list[str], adapters: AdapterNames) -> GenerateRequest:
    prompt = body.prompt
    is_text = isinstance(prompt, str) or isinstance(prompt[0], str)
    max_tokens = COMPLETION_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return GenerateRequest(
        text=prompt if is_text else None,  # type: ignore[arg-type]
        input_ids=None if is_text else prompt,  # type: ignore[arg-type]
        cuts_length=True,
        sampling_params=sampling_dict(body, max_tokens),
        stream=bool(body.stream),
        return_logprob=body.logprobs is not None,
        logprob_start_len=0 if body.echo and body.logprobs is not None else -1,
        top_logprobs_num=body.logprobs or 0,
        rid=rid,
        priority=body.priority,
        keep_s=body.keep_s,
        cache_salt=body.cache_salt,
        extra_key=body.extra_key,
        lora_path=adapters,
        keeps_texts=bool(body.echo),
    )


class _Echo:
    """The prompts' texts and log probabilities in the choices (`echo`)."""

    def __init__(self, service: OpenAIService, echoes: bool, stream: GenerationStream) -> None:
        self._service = service
        self._echo = echoes
        self._stream = stream
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._decoded: dict[int, str] = {}
        """Texts of prompts that were given as ids, which samples of a prompt share."""

    def num_chars(self, index: int) -> int:
        """Returns about how many characters must be written before the first output text of choice `index`."""
        if not self._echo:
            return 0
        text = self._stream.prompt_texts[index // self._stream.num_samples]
        return len(self._stream.requests[index].input_ids) if text is None else len(text)

    def prompt_text(self, index: int) -> str:
        """Returns the text before the first output text of choice `index`."""
        if not self._echo:
            return ""
        prompt = index // self._stream.num_samples
        text = self._stream.prompt_texts[prompt]
        if text is not None:
            return text
        if prompt not in self._decoded:
            self._decoded[prompt] = self._service.tokenizer.decode(self._stream.requests[index].input_ids.tolist())
        return self._decoded[prompt]

    def logprobs(self, index: int, logprobs: OutputLogprobs) -> Pieces:
        """Returns the next part of choice `index`; the first part includes the prompt's tokens if they are echoed."""
        if index in self._logprobs:
            return self._logprobs[index].output(logprobs)
        writer = self._logprobs[index] = CompletionLogprobs(self._service.tokenizer)
        return writer.prompt_and_output(logprobs) if self._echo else writer.output(logprobs)


def _choice(echo: _Echo, output: GenerateOutput, long: LongJSON) -> dict[str, Any]:
    assert output.finish is not None
    logprobs = output.logprobs
    return {
        "index": output.index,
        "text": echo.prompt_text(output.index) + output.text,
        "logprobs": None if logprobs is None else long.part(echo.logprobs(output.index, logprobs)),
        "finish_reason": output.finish.type,
        "matched_stop": output.finish.matched,
    }


class _CompletionWriter:
    def __init__(self, echo: _Echo, told: UsageOptions, head: ResponseHead, usage: UsageCounter) -> None:
        self._echo = echo
        self._chunks = CompletionChunks(head.id, head.created, head.model)
        self._usage = usage
        self._told = told
        self._introduced: set[int] = set()

    def write(self, output: GenerateOutput) -> Events:
        index, text, finish = output.index, output.text, output.finish
        self._usage.update(index, output.meta)
        if index not in self._introduced:
            self._introduced.add(index)
            text = self._echo.prompt_text(index) + text
        if not text and finish is None and output.logprobs is None:
            return b""
        logprobs, long = b"null", LongJSON()
        if output.logprobs is not None:
            logprobs = long.gap(self._echo.logprobs(index, output.logprobs))
        usage = encode(self._usage.as_dict()) if self._told.continuous else b"null"
        if finish is None:
            return long.pieces(self._chunks.text(index, text, logprobs, usage))
        refuse_aborted(finish)
        ended = finish_fields(finish.type, finish.matched)
        return long.pieces(self._chunks.text(index, text, logprobs, usage, ended))

    def num_held(self, index: int) -> int:
        return 0 if index in self._introduced else self._echo.num_chars(index)

    def end(self) -> bytes:
        usage = self._usage.as_dict() if self._told.final else None
        return self._chunks.totals(usage, self._usage.extension() if self._told.extension else None)
