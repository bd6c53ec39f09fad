"""Ollama's `/api/...`: chat, generate, embed, and information about models."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.embeddings.serving_embeddings import collect_complete, encoded_embeddings
from sglang.srt.entrypoints.held_body import body_bytes, releases_body
from sglang.srt.entrypoints.http_errors import json_response
from sglang.srt.entrypoints.http_request_id import rid_of
from sglang.srt.entrypoints.http_stream import NDJSON, until_disconnect
from sglang.srt.entrypoints.long_json import LongJSON
from sglang.srt.entrypoints.ollama.answer import AnswerWriter, now
from sglang.srt.entrypoints.ollama.conversation import chat_request
from sglang.srt.entrypoints.ollama.protocol import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from sglang.srt.entrypoints.openai.adapter_names import adapters_of
from sglang.srt.entrypoints.openai.chat_call import chat_call
from sglang.srt.entrypoints.openai.chat_output import ChatFormats, ChoiceOutput
from sglang.srt.entrypoints.openai.media_parts import media_of
from sglang.srt.entrypoints.openai.sampling import sampling_dict
from sglang.srt.entrypoints.openai.serving import OpenAIService, off_event_loop
from sglang.srt.entrypoints.output_stream import stream_events
from sglang.srt.function_call.model_formats import ModelFormats
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest

API_VERSION = "0.12.0"
"""The Ollama release whose API this is."""


async def chat(service: OpenAIService, body: OllamaChatRequest, request: Request) -> Response:
    """Answers `/api/chat`."""
    if not body.messages:
        return _loaded(service, body)
    model, calling = body.model, _chat_call(service, body, request)
    del body  # the answer needs no more of it
    call, formats = await until_disconnect(request, calling)
    return await _answer(service, model, request, call, formats, in_message=True)


async def generate(service: OpenAIService, body: OllamaGenerateRequest, request: Request) -> Response:
    """Answers `/api/generate`."""
    if not body.prompt:
        return _loaded(service, body)
    model, calling = body.model, (_raw_call if body.raw else _chat_call)(service, body, request)
    del body  # the answer needs no more of it
    call, formats = await until_disconnect(request, calling)
    return await _answer(service, model, request, call, formats, in_message=False)


async def _chat_call(
    service: OpenAIService, body: OllamaChatRequest | OllamaGenerateRequest, request: Request
) -> tuple[GenerateRequest, ChatFormats]:
    num_bytes = body_bytes(request)
    chat = await off_event_loop(service, num_bytes, chat_request, body, service.formats)
    return await chat_call(service, chat, num_bytes, rid_of(request))


async def _raw_call(
    service: OpenAIService, body: OllamaGenerateRequest, request: Request
) -> tuple[GenerateRequest, ChatFormats]:
    """Returns the call for a prompt that is not rendered by a template."""
    num_bytes, adapters = body_bytes(request), adapters_of(service, body.model)
    chat = await off_event_loop(service, num_bytes, chat_request, body, service.formats)
    params = await off_event_loop(service, num_bytes, sampling_dict, chat, chat.max_tokens)
    call = GenerateRequest(text=body.prompt, sampling_params=params, stream=bool(chat.stream), cuts_length=True)
    call.lora_path = adapters
    media = media_of(chat.messages)
    call.media = [media] if media else None
    return call, ChatFormats(ModelFormats(), chat, "")


def _loaded(service: OpenAIService, body: OllamaChatRequest | OllamaGenerateRequest) -> Response:
    """Answers a request that only loads the model."""
    adapters_of(service, body.model)  # which refuses unknown names
    in_message = isinstance(body, OllamaChatRequest)
    empty: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if in_message else {"response": ""}
    head = {"model": body.model or service.model_name, "created_at": now()}
    return json_response(head | empty | {"done": True, "done_reason": "load"})


async def _answer(
    service: OpenAIService,
    model: str | None,
    request: Request,
    call: GenerateRequest,
    formats: ChatFormats,
    in_message: bool,
) -> Response:
    choice = ChoiceOutput(formats, service.tokenizer)
    writer = AnswerWriter(model or service.model_name, choice, in_message)
    if call.stream:
        return await stream_events(service.manager, request, call, lambda _: writer, done=b"", form=NDJSON)
    call.stream = True  # the answer reports when its first token came
    releases_body(request, call)

    async def work() -> dict[str, Any]:
        async with await service.manager.submit(call) as stream:
            return await writer.whole(stream)

    return json_response(await until_disconnect(request, work()))


async def embed(service: OpenAIService, body: OllamaEmbedRequest, request: Request) -> Response:
    """Answers `/api/embed`."""
    started = time.perf_counter()
    call = GenerateRequest(text=[body.input] if isinstance(body.input, str) else body.input, embed=True)
    dimensions, model = body.dimensions, body.model or service.model_name
    del body  # the answer needs no more of it
    outputs, entries = await _embedded(service, request, call, dimensions)
    long = LongJSON()
    return long.response(
        {
            "model": model,
            "embeddings": [long.part([entry]) for entry in entries],
            "total_duration": int((time.perf_counter() - started) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": sum(output.meta.prompt_tokens for output in outputs),
        }
    )


async def embeddings(service: OpenAIService, body: OllamaEmbeddingsRequest, request: Request) -> Response:
    """Answers the earlier form of `embed`: one prompt and one vector, empty without a prompt."""
    call = GenerateRequest(text=[body.prompt] if body.prompt else [], embed=True)
    del body  # the answer needs no more of it
    _, entries = await _embedded(service, request, call, None)
    return json_response({"embedding": msgspec.Raw(entries[0]) if entries else []})


async def _embedded(
    service: OpenAIService, request: Request, call: GenerateRequest, dimensions: int | None
) -> tuple[list[GenerateOutput], list[bytes]]:
    """Returns the outputs and their vectors as JSON; none for a call without a text."""
    outputs: list[GenerateOutput] = []
    if call.text:
        _, outputs = await collect_complete(service, request, call)
    return outputs, await encoded_embeddings(service, outputs, dimensions, as_base64=False)


# --- models -----------------------------------------------------------------------------------------------------------


def _details(service: OpenAIService) -> dict[str, Any]:
    model = service.manager.model_config
    family = str(model.hf_config.get("model_type") or "")
    quantization = service.manager.args.quantization or str(model.hf_config.get("torch_dtype") or "")
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": quantization,
    }


def _cards(service: OpenAIService) -> list[dict[str, Any]]:
    """Returns the cards of the model and of its LoRA adapters."""
    adapters, details = service.manager.adapters, _details(service)
    named = {service.model_name: service.manager.args.model_path}
    of_adapters = {} if adapters is None else {name: adapter.id for name, adapter in adapters.loaded.items()}
    return [
        {
            "name": name,
            "model": name,
            "size": 0,
            "digest": hashlib.sha256(content.encode()).hexdigest(),
            "details": details if name in named else details | {"parent_model": service.model_name},
        }
        for name, content in (named | of_adapters).items()
    ]


def tags(service: OpenAIService, created: int) -> dict[str, Any]:
    """Returns the list of models: the one that is served, and its LoRA adapters."""
    return {"models": [card | {"modified_at": _time(created)} for card in _cards(service)]}


def running(service: OpenAIService) -> dict[str, Any]:
    """Returns the loaded models, which are those of `tags`: they are always loaded."""
    more = {
        "expires_at": _time(2**33), "size_vram": 0, "context_length": service.manager.model_config.context_len,
    }  # fmt: skip
    return {"models": [card | more for card in _cards(service)]}


def show(service: OpenAIService, created: int) -> dict[str, Any]:
    """Returns the description of the model."""
    model, tokenizer = service.manager.model_config, service.manager.tokenizer
    family = str(model.hf_config.get("model_type") or "")
    capabilities = ["completion", "embedding"]
    capabilities += ["tools"] if service.formats.calls is not None else []
    capabilities += ["vision"] if service.manager.media is not None else []
    capabilities += ["thinking"] if service.formats.reasoning is not None else []
    template = "" if tokenizer is None else service.chat_template.sources
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "modified_at": _time(created),
        "details": _details(service),
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": model.context_len,
            f"{family}.vocab_size": model.vocab_size,
        },
        "capabilities": capabilities,
    }


def _time(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
