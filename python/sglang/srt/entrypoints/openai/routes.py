"""The routes below `/v1`."""

from __future__ import annotations

import datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.held_body import body_bytes
from sglang.srt.entrypoints.http_body import body_schema, read_body
from sglang.srt.entrypoints.http_errors import ApiError, json_response
from sglang.srt.entrypoints.http_state import engine_of
from sglang.srt.entrypoints.http_stream import until_disconnect
from sglang.srt.entrypoints.openai.protocol import (
    BODIES,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ParseCallsRequest,
    SeparateReasoningRequest,
    TokenizeRequest,
)
from sglang.srt.entrypoints.openai.serving import OpenAIService
from sglang.srt.entrypoints.openai.serving_chat import chat_completions
from sglang.srt.entrypoints.openai.serving_completions import completions
from sglang.srt.entrypoints.openai.serving_tokenize import tokenize
from sglang.srt.entrypoints.output_formats import parse_calls, separate_reasoning

router = APIRouter(tags=["OpenAI"])

MAX_DETOKENIZE_TOKENS = 1 << 20
__all__ = ["BODIES", "router"]


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest))
async def post_chat_completions(request: Request) -> Response:
    engine = engine_of(request)
    return await chat_completions(engine, await read_body(request, ChatCompletionRequest), request)


@router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
async def post_completions(request: Request) -> Response:
    engine = engine_of(request)
    return await completions(engine, await read_body(request, CompletionRequest), request)


def model_card(engine: OpenAIService, created: int) -> dict[str, Any]:
    """Returns the model's entry of /v1/models."""
    context_len = engine.manager.model_config.context_len
    return {
        "id": engine.model_name,
        "object": "model",
        "created": created,
        "owned_by": "sglang",
        "root": engine.model_name,
        "parent": None,
        "max_model_len": context_len,
        **_anthropic_card(engine.model_name, created, context_len),
    }


def _anthropic_card(name: str, created: int, context_len: int) -> dict[str, Any]:
    """The fields that Anthropic's clients read of the same card."""
    return {
        "type": "model",
        "display_name": name,
        "created_at": datetime.datetime.fromtimestamp(created, datetime.timezone.utc).isoformat(),
        "max_input_tokens": context_len,
        "max_tokens": context_len,
        "lifecycle": "active",
    }


def adapter_cards(engine: OpenAIService, created: int) -> dict[str, dict[str, Any]]:
    """Returns the entries of the model's LoRA adapters in /v1/models, by their names."""
    adapters = engine.manager.adapters
    loaded = {} if adapters is None else adapters.loaded
    model, context_len = model_card(engine, created), engine.manager.model_config.context_len
    return {
        name: model
        | _anthropic_card(name, created, context_len)
        | {"id": name, "root": adapter.path, "parent": engine.model_name, "max_model_len": None}
        for name, adapter in loaded.items()
    }


def _cards(request: Request) -> list[dict[str, Any]]:
    """Returns the cards of the model and of its LoRA adapters."""
    engine, created = engine_of(request), request.app.state.created
    return [model_card(engine, created), *adapter_cards(engine, created).values()]


@router.get("/v1/models")
async def get_models(request: Request) -> Response:
    cards = _cards(request)
    page = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    return json_response({"object": "list", "data": cards, **page})


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> Response:
    card = next((card for card in _cards(request) if card["id"] == model_id), None)
    if card is None:
        raise ApiError(404, f"The model '{model_id}' does not exist", code="model_not_found", param="model")
    return json_response(card)


@router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
@router.post("/v1/tokenize", include_in_schema=False)
async def post_tokenize(request: Request) -> Response:
    engine = engine_of(request)
    body = await read_body(request, TokenizeRequest)
    return json_response(await until_disconnect(request, tokenize(engine, body, body_bytes(request))))


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
@router.post("/v1/detokenize", include_in_schema=False)
async def post_detokenize(request: Request) -> Response:
    engine = engine_of(request)
    body = await read_body(request, DetokenizeRequest)
    single = not body.tokens or isinstance(body.tokens[0], int)
    sequences: list[list[int]] = [body.tokens] if single else body.tokens  # type: ignore[list-item,assignment]
    count, vocab_size = sum(map(len, sequences)), engine.manager.model_config.vocab_size
    if count > MAX_DETOKENIZE_TOKENS:
        raise ApiError(400, f"at most {MAX_DETOKENIZE_TOKENS} tokens are turned into text at once", param="tokens")

    def decode(ids: list[int]) -> str:
        wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ApiError(400, f"token id {wrong} is not in the vocabulary (0..{vocab_size - 1})", param="tokens")
        return engine.tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens)

    decoding = engine.manager.text.in_thread(count, lambda: [decode(ids) for ids in sequences])
    texts = await until_disconnect(request, decoding)
    return json_response({"text": texts[0] if single else texts})


@router.post("/parse_function_call", openapi_extra=body_schema(ParseCallsRequest))
async def post_parse_function_call(request: Request) -> Response:
    engine = engine_of(request)
    body = await read_body(request, ParseCallsRequest)
    return json_response(await until_disconnect(request, parse_calls(engine.manager, engine.formats, body)))


@router.post("/separate_reasoning", openapi_extra=body_schema(SeparateReasoningRequest))
async def post_separate_reasoning(request: Request) -> Response:
    engine = engine_of(request)
    body = await read_body(request, SeparateReasoningRequest)
    parsing = separate_reasoning(engine.manager, engine.formats, body)
    return json_response(await until_disconnect(request, parsing))
