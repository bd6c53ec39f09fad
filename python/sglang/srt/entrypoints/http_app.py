"""The ASGI application: routes, error handlers and middleware."""

from __future__ import annotations

import socket
import time
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from sglang.srt.entrypoints import (
    http_adapters,
    http_corpora,
    http_native,
    http_refused,
    http_sessions,
    http_sleep,
    http_storage,
    http_weights,
)
from sglang.srt.entrypoints.anthropic import routes as anthropic_routes
from sglang.srt.entrypoints.embeddings import routes as embeddings_routes
from sglang.srt.entrypoints.http_errors import ApiError, error_response
from sglang.srt.entrypoints.http_middleware import HeadGate, RequestGate, TraceHeaders, with_sessions
from sglang.srt.entrypoints.http_openapi import describe_api
from sglang.srt.entrypoints.http_origins import with_origins_checked
from sglang.srt.entrypoints.http_request_id import RequestIds
from sglang.srt.entrypoints.http_state import ServerState, state_of
from sglang.srt.entrypoints.http_stream import ClientDisconnected
from sglang.srt.entrypoints.ollama import routes as ollama_routes
from sglang.srt.entrypoints.openai import routes as openai_routes
from sglang.srt.entrypoints.page import routes as page_routes
from sglang.srt.entrypoints.responses import routes as responses_routes
from sglang.srt.managers.front.generate_request import RequestError
from sglang.version import __version__

FORMS = (
    openai_routes,
    anthropic_routes,
    responses_routes,
    embeddings_routes,
    ollama_routes,
    http_native,
    http_sessions,
    http_sleep,
    http_adapters,
    http_corpora,
    http_storage,
    http_weights,
)
"""Modules with the routes of one API each (`router`), and the structs of their request bodies (`BODIES`)."""
OFTEN = frozenset({"/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
"""Paths of the most frequent routes, which are matched first."""
_STATUS_CLIENT_CLOSED = 499
"""Status that the log shows when the client has disconnected; nobody receives it."""


async def _on_api_error(request: Request, error: Any) -> Response:
    return error_response(request.url.path, error)


async def _on_request_error(request: Request, error: Any) -> Response:
    response = error_response(request.url.path, ApiError(error.status_code, error.message))
    if error.retry_after is not None:
        response.headers["retry-after"] = str(error.retry_after)
    return response


async def _on_http_exception(request: Request, error: Any) -> Response:
    path, methods = request.url.path, (error.headers or {}).get("Allow", "")
    message = {
        404: f"there is no route {path}",
        405: f"{request.method} is not allowed on {path}; it takes {methods}{_curl_hint(request, methods)}",
    }.get(error.status_code, str(error.detail))
    response = error_response(request.url.path, ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


def _curl_hint(request: Request, methods: str) -> str:
    """Returns the end of the message for a route that takes POST only: a curl command. Clients of SGLang may try GET,
    which it accepts for some of these routes."""
    return f": curl -X POST {state_of(request).args.url()}{request.url.path}" if methods == "POST" else ""


async def _on_disconnect(request: Request, error: Any) -> Response:
    return Response(status_code=_STATUS_CLIENT_CLOSED)


async def _on_bug(request: Request, error: Any) -> Response:
    """Answers 500. Starlette then raises the error again, and uvicorn logs its traceback."""
    return error_response(request.url.path, ApiError(500, "internal server error; the server's log has the details"))


def create_api(state: ServerState) -> FastAPI:
    """Makes the application with routes and error handlers, without the middleware around it (`create_app`)."""
    no_pages: dict[str, Any] = {"docs_url": None, "redoc_url": None}  # these pages load scripts from other servers
    api = FastAPI(title="sm120-sglang", version=__version__, redirect_slashes=False, **no_pages)
    api.state.server = state
    api.state.created = int(time.time())
    routers = (*(form.router for form in FORMS), page_routes.router, http_refused.router)
    routes = [route for router in routers for route in router.routes]
    # FastAPI tries the routes one after the other, and for an included router tries its routes twice. So the routes
    # themselves are added, the most frequent ones first.
    api.router.routes.extend(sorted(routes, key=lambda route: getattr(route, "path", "") not in OFTEN))
    api.add_exception_handler(ApiError, _on_api_error)
    api.add_exception_handler(RequestError, _on_request_error)
    api.add_exception_handler(HTTPException, _on_http_exception)
    # The client disconnected while it waited for the answer (our error), or while it sent the body (Starlette's).
    for disconnect in (ClientDisconnected, ClientDisconnect):
        api.add_exception_handler(disconnect, _on_disconnect)
    api.add_exception_handler(Exception, _on_bug)

    describe_api(api, [body for form in FORMS for body in form.BODIES])
    return api


def create_app(state: ServerState) -> ASGIApp:
    """Makes the complete application for `state`: that of `create_api` inside middleware. RequestIds is the outermost,
    then come HeadGate, the check of origins (CORS), RequestGate (API key, size of the body), TraceHeaders and
    SessionIds."""
    args = state.args
    api = with_sessions(create_api(state), args)
    gate = RequestGate(TraceHeaders(api) if args.enable_trace else api, args.api_key, args.admin_api_key)
    own_names = (args.host, socket.gethostname())
    return RequestIds(HeadGate(with_origins_checked(gate, args.api_key, args.allowed_origins or (), own_names)))
