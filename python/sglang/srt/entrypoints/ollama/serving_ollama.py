"""Ollama's `/api/...`: chat, generate, embed, and what it says about models."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.embeddings.serving_embeddings import collect_complete, encoded_embeddings
from sglang.srt.entrypoints.http_errors import json_response
from sglang.srt.entrypoints.http_request_id import rid_of
from sglang.srt.entrypoints.http_stream import NDJSON, until_disconnect
from sglang.srt.entrypoints.ollama.answer import AnswerWriter, now
from sglang.srt.entrypoints.ollama.conversation import chat_request
from sglang.srt.entrypoints.ollama.protocol import OllamaChatRequest, OllamaEmbedRequest, OllamaGenerateRequest
from sglang.srt.entrypoints.openai.chat_call import chat_call
from sglang.srt.entrypoints.openai.chat_output import ChatFormats, ChoiceOutput
from sglang.srt.entrypoints.openai.media_parts import media_of
from sglang.srt.entrypoints.openai.sampling import sampling_dict
from sglang.srt.entrypoints.openai.serving import OpenAIService
from sglang.srt.entrypoints.output_stream import stream_events
from sglang.srt.function_call.model_formats import ModelFormats
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest

API_VERSION = "0.12.0"
"""The release of Ollama whose API this is."""


async def chat(service: OpenAIService, body: OllamaChatRequest, request: Request) -> Response:
    if not body.messages:
        return _loaded(service, body)
    chat_body = chat_request(body, service.formats)
    rendering = chat_call(service, chat_body, len(await request.body()), rid_of(request))
    call, formats = await until_disconnect(request, rendering)
    return await _answer(service, body, request, call, formats)


async def generate(service: OpenAIService, body: OllamaGenerateRequest, request: Request) -> Response:
    if not body.prompt:
        return _loaded(service, body)
    chat_body = chat_request(body, service.formats)
    if not body.raw:
        rendering = chat_call(service, chat_body, len(await request.body()), rid_of(request))
        call, formats = await until_disconnect(request, rendering)
    else:
        params = sampling_dict(chat_body, chat_body.max_tokens)
        media = media_of(chat_body.messages)
        streams = bool(chat_body.stream)
        call = GenerateRequest(text=body.prompt, sampling_params=params, stream=streams, cuts_length=True)
        call.media = [media] if media else None
        formats = ChatFormats(ModelFormats(), chat_body, "")
    return await _answer(service, body, request, call, formats)


def _loaded(service: OpenAIService, body: OllamaChatRequest | OllamaGenerateRequest) -> Response:
    """The answer to a request that only wants the model to be there."""
    in_message = isinstance(body, OllamaChatRequest)
    empty: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if in_message else {"response": ""}
    head = {"model": body.model or service.model_name, "created_at": now()}
    return json_response(head | empty | {"done": True, "done_reason": "load"})


async def _answer(
    service: OpenAIService,
    body: OllamaChatRequest | OllamaGenerateRequest,
    request: Request,
    call: GenerateRequest,
    formats: ChatFormats,
) -> Response:
    choice = ChoiceOutput(formats, service.tokenizer)
    writer = AnswerWriter(body.model or service.model_name, choice, isinstance(body, OllamaChatRequest))
    if call.stream:
        return await stream_events(service.manager, request, call, lambda _: writer, done=b"", form=NDJSON)
    call.stream = True  # the answer tells when its first token came

    async def work() -> dict[str, Any]:
        async with await service.manager.submit(call) as stream:
            return await writer.whole(stream)

    return json_response(await until_disconnect(request, work()))


async def embed(service: OpenAIService, body: OllamaEmbedRequest, request: Request) -> Response:
    started = time.perf_counter()
    texts = [body.input] if isinstance(body.input, str) else body.input
    outputs: list[GenerateOutput] = []
    if texts:
        _, outputs = await collect_complete(service, request, GenerateRequest(text=texts, embed=True))
    entries = await encoded_embeddings(outputs, body.dimensions, as_base64=False)
    return json_response(
        {
            "model": body.model or service.model_name,
            "embeddings": [msgspec.Raw(entry) for entry in entries],
            "total_duration": int((time.perf_counter() - started) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": sum(output.meta.prompt_tokens for output in outputs),
        }
    )


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


def _card(service: OpenAIService) -> dict[str, Any]:
    digest = hashlib.sha256(service.manager.args.model_path.encode()).hexdigest()
    return {
        "name": service.model_name,
        "model": service.model_name,
        "size": 0,
        "digest": digest,
        "details": _details(service),
    }


def tags(service: OpenAIService, created: int) -> dict[str, Any]:
    """The one model there is."""
    return {"models": [_card(service) | {"modified_at": _time(created)}]}


def running(service: OpenAIService) -> dict[str, Any]:
    """Returns the loaded models, which are those of `tags`: the model is always loaded."""
    context_len = service.manager.model_config.context_len
    return {"models": [_card(service) | {"expires_at": _time(2**33), "size_vram": 0, "context_length": context_len}]}


def show(service: OpenAIService, created: int) -> dict[str, Any]:
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
