"""Anthropic's routes."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.anthropic.protocol import BODIES, CountTokensRequest, MessagesRequest
from sglang.srt.entrypoints.anthropic.serving_messages import count_tokens, messages
from sglang.srt.entrypoints.http_body import body_schema, read_body
from sglang.srt.entrypoints.http_state import engine_of

router = APIRouter(tags=["Anthropic"])

__all__ = ["BODIES", "router"]


@router.post("/v1/messages", openapi_extra=body_schema(MessagesRequest))
async def post_messages(request: Request) -> Response:
    engine = engine_of(request)
    return await messages(engine, await read_body(request, MessagesRequest), request)


@router.post("/v1/messages/count_tokens", openapi_extra=body_schema(CountTokensRequest))
async def post_count_tokens(request: Request) -> Response:
    engine = engine_of(request)
    return await count_tokens(engine, await read_body(request, CountTokensRequest), request)
