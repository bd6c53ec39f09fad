"""Additions to `/openapi.json` that FastAPI does not derive from routes: bodies, refusals and event streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI

from sglang.srt.entrypoints.http_answers import answer_schema
from sglang.srt.entrypoints.http_body import body_definitions
from sglang.srt.entrypoints.http_errors import error_schema_name
from sglang.srt.entrypoints.http_middleware import ADMIN_PATHS, is_open, takes_any_type

_STREAMING = ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
_LINES = ("/api/chat", "/api/generate")
"""Routes that stream JSON lines."""
_PROBES = ("/health", "/ready", "/ping", "/health_generate")
_OF_VLLM = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_PLAIN_TEXT = ("/metrics", "/flush_cache", "/start_profile", "/stop_profile", *_OF_VLLM)
_MEMORY = ("/release_memory_occupation", "/resume_memory_occupation")
_EMPTY = (*_PROBES, *_MEMORY, "/abort_request", "/close_session")
"""Routes whose answer is only a status."""
_STORED_RESPONSE = "/v1/responses/{response_id}"
_NOT_FOUND = (
    "/v1/models/{model_id}",
    "/metrics",
    "/v1/unload_lora_adapter",
    _STORED_RESPONSE,
    _STORED_RESPONSE + "/cancel",
    _STORED_RESPONSE + "/input_items",
)
_STORE = "/hicache/storage-backend"
_REFUSING = (
    _STORE,
    "/list_external_corpora",
    "/sleep",
    "/wake_up",
    "/flush_cache",
    "/start_profile",
    "/stop_profile",
    _STORED_RESPONSE,
    _STORED_RESPONSE + "/cancel",
    _STORED_RESPONSE + "/input_items",
)
"""Routes without a body that may be refused because of the engine's state."""

_ERRORS = {
    400: "The request is wrong: the message says what to change.",
    401: "The server has an API key, which neither `Authorization: Bearer KEY` nor `x-api-key: KEY` gives.",
    403: "Only holders of another key may do this: of --admin-api-key, or of any, where the server has none.",
    404: "There is no such thing.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    500: "The engine failed.",
    503: "The server is starting, overloaded or shutting down.",
}
_STRING = {"type": "string"}
_EVENT = {"type": "object", "required": ["data"], "properties": {"event": _STRING, "data": _STRING}}
"""Schema of one event of an event stream."""
_ERROR_SCHEMAS: dict[str, Any] = {
    "OpenAIError": {
        "type": "object",
        "required": ["object", "message", "type", "param", "code"],
        "properties": {
            "object": {"const": "error"},
            "message": _STRING,
            "type": _STRING,
            "param": {"type": ["string", "null"]},
            "code": {"type": ["string", "integer"]},
        },
    },
    "NativeError": {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "object", "required": ["message"], "properties": {"message": _STRING}}},
    },
    "OllamaError": {"type": "object", "required": ["error"], "properties": {"error": _STRING}},
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": _STRING, "message": _STRING},
            },
        },
    },
    "Unauthorized": {"type": "object", "required": ["error"], "properties": {"error": {"const": "Unauthorized"}}},
}


def describe_api(api: FastAPI, bodies: Sequence[type[msgspec.Struct]]) -> None:
    """Adds the requests and responses that the routes handle by hand to the description of `api`."""
    routes_only = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            schema = routes_only()
            components = schema.setdefault("components", {})
            components["schemas"] = {**body_definitions(bodies), **_ERROR_SCHEMAS}
            for path, operations in schema["paths"].items():
                for method, operation in operations.items():
                    operation["responses"] = _responses(path, method, "requestBody" in operation)
        assert api.openapi_schema is not None
        return api.openapi_schema

    api.openapi = openapi  # type: ignore[method-assign]


def _responses(path: str, method: str, has_body: bool) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "Success"}
    if path in _PLAIN_TEXT:
        success["content"] = {"text/plain": {"schema": _STRING}}
    elif path not in _EMPTY:
        success["content"] = {"application/json": {"schema": answer_schema(method, path)}}
    if path in _STREAMING:
        success["content"]["text/event-stream"] = {"schema": _EVENT}
    if path in _LINES:
        success["content"]["application/x-ndjson"] = {}
    responses: dict[str, Any] = {"200": success}
    for status in sorted(_statuses(path, method, has_body)):
        if status == 503 and path in _PROBES:
            content: dict[str, Any] = {"text/plain": {"schema": _STRING}}
        else:
            name = error_schema_name(path, status)
            content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        responses[str(status)] = {"description": _ERRORS[status], "content": content}
    return responses


def _statuses(path: str, method: str, has_body: bool) -> set[int]:
    """Returns the error statuses of this operation."""
    statuses = {503} if path in _PROBES else {500, 503}
    if path == "/metrics":
        statuses = set()
    if not is_open(path):
        statuses.add(401)
    if method in ("post", "put"):
        statuses |= {413} if takes_any_type(path) else {413, 415}
    if has_body or path in _REFUSING:
        statuses.add(400)
    if path in ADMIN_PATHS:
        statuses.add(403)
    if path in _NOT_FOUND:
        statuses.add(404)
    return statuses
