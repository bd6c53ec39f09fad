"""Routes of embeddings, scores and ranks."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.embeddings.protocol import (
    BODIES,
    ClassifyBody,
    EmbeddingRequest,
    EncodeBody,
    RerankRequest,
    ScoreRequest,
)
from sglang.srt.entrypoints.embeddings.serving_classes import classify
from sglang.srt.entrypoints.embeddings.serving_embeddings import embeddings, encode
from sglang.srt.entrypoints.embeddings.serving_scores import rerank, rerank_results, score
from sglang.srt.entrypoints.http_body import body_schema, read_body
from sglang.srt.entrypoints.http_state import engine_of

router = APIRouter(tags=["Embeddings"])

__all__ = ["BODIES", "router"]


@router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingRequest))
async def post_embeddings(request: Request) -> Response:
    service = engine_of(request)
    return await embeddings(service, await read_body(request, EmbeddingRequest), request)


@router.post("/encode", openapi_extra=body_schema(EncodeBody))
@router.put("/encode", include_in_schema=False)
async def post_encode(request: Request) -> Response:
    service = engine_of(request)
    return await encode(service, await read_body(request, EncodeBody), request)


@router.post("/v1/score", openapi_extra=body_schema(ScoreRequest))
async def post_score(request: Request) -> Response:
    service = engine_of(request)
    return await score(service, await read_body(request, ScoreRequest), request)


@router.post("/v1/rerank", openapi_extra=body_schema(RerankRequest))
@router.put("/v1/rerank", include_in_schema=False)
async def post_rerank(request: Request) -> Response:
    service = engine_of(request)
    return await rerank(service, await read_body(request, RerankRequest), request)


@router.post("/rerank", openapi_extra=body_schema(RerankRequest))
@router.post("/v2/rerank", include_in_schema=False)
async def post_rerank_results(request: Request) -> Response:
    service = engine_of(request)
    return await rerank_results(service, await read_body(request, RerankRequest), request)


@router.post("/classify", openapi_extra=body_schema(ClassifyBody))
@router.put("/classify", include_in_schema=False)
@router.post("/v1/classify", include_in_schema=False)
async def post_classify(request: Request) -> Response:
    service = engine_of(request)
    return await classify(service, await read_body(request, ClassifyBody), request)
