"""Routes of the Responses API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.http_body import body_schema, read_body
from sglang.srt.entrypoints.http_errors import bad_request
from sglang.srt.entrypoints.http_state import engine_of, state_of
from sglang.srt.entrypoints.responses import serving_responses as serving
from sglang.srt.entrypoints.responses.protocol import BODIES, ResponseContext, ResponsesRequest

router = APIRouter(tags=["Responses"])

MAX_PAGE = 100
__all__ = ["BODIES", "router"]

_PAGE: dict[str, Any] = {
    "parameters": [
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}},
        {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
        {"name": "after", "in": "query", "schema": {"type": "string"}},
    ]
}


@router.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest))
async def post_responses(request: Request) -> Response:
    service, store = engine_of(request), state_of(request).responses
    return await serving.create(service, store, await read_body(request, ResponsesRequest), request)


@router.post("/v1/responses/input_tokens", openapi_extra=body_schema(ResponseContext))
async def post_input_tokens(request: Request) -> Response:
    service, store = engine_of(request), state_of(request).responses
    return await serving.count_tokens(service, store, await read_body(request, ResponseContext), request)


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> Response:
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise bad_request("stream is not supported here: fetch the response until it has ended", param="stream")
    entry = serving.stored(state_of(request).responses, response_id)
    return Response(entry.response, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    return serving.delete(state_of(request).responses, response_id)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    return await serving.cancel(engine_of(request), state_of(request).responses, response_id)


@router.get("/v1/responses/{response_id}/input_items", openapi_extra=_PAGE)
async def get_input_items(request: Request, response_id: str) -> Response:
    query = request.query_params
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_PAGE):
        raise bad_request(f"limit must be a number in [1, {MAX_PAGE}]", param="limit")
    if order not in ("asc", "desc"):
        raise bad_request("order must be asc or desc", param="order")
    service, store = engine_of(request), state_of(request).responses
    return await serving.input_items(service, store, response_id, int(limit), query.get("after"), order == "desc")
