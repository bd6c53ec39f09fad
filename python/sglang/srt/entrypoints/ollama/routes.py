"""Ollama's routes."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.http_body import body_schema, read_body
from sglang.srt.entrypoints.http_errors import json_response
from sglang.srt.entrypoints.http_state import engine_of
from sglang.srt.entrypoints.ollama import serving_ollama as serving
from sglang.srt.entrypoints.ollama.protocol import (
    BODIES,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    ShowRequest,
)

router = APIRouter(tags=["Ollama"])

__all__ = ["BODIES", "router"]


@router.post("/api/chat", openapi_extra=body_schema(OllamaChatRequest))
async def post_chat(request: Request) -> Response:
    service = engine_of(request)
    return await serving.chat(service, await read_body(request, OllamaChatRequest), request)


@router.post("/api/generate", openapi_extra=body_schema(OllamaGenerateRequest))
async def post_generate(request: Request) -> Response:
    service = engine_of(request)
    return await serving.generate(service, await read_body(request, OllamaGenerateRequest), request)


@router.post("/api/embed", openapi_extra=body_schema(OllamaEmbedRequest))
async def post_embed(request: Request) -> Response:
    service = engine_of(request)
    return await serving.embed(service, await read_body(request, OllamaEmbedRequest), request)


@router.post("/api/embeddings", openapi_extra=body_schema(OllamaEmbeddingsRequest))
async def post_embeddings(request: Request) -> Response:
    service = engine_of(request)
    return await serving.embeddings(service, await read_body(request, OllamaEmbeddingsRequest), request)


@router.post("/api/show", openapi_extra=body_schema(ShowRequest))
async def post_show(request: Request) -> Response:
    service = engine_of(request)
    await read_body(request, ShowRequest)
    return json_response(serving.show(service, request.app.state.created))


@router.get("/api/tags")
async def get_tags(request: Request) -> Response:
    return json_response(serving.tags(engine_of(request), request.app.state.created))


@router.get("/api/ps")
async def get_running(request: Request) -> Response:
    return json_response(serving.running(engine_of(request)))


@router.get("/api/version")
async def get_version(request: Request) -> Response:
    return json_response({"version": serving.API_VERSION})
