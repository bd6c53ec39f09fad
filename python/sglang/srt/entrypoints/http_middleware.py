"""Plain ASGI middleware that every HTTP request passes before it reaches a route."""

from __future__ import annotations

import asyncio
import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang.srt.configs.load_balance import PREFIX_AFFINITY
from sglang.srt.entrypoints.held_body import HELD_BODY
from sglang.srt.entrypoints.http_errors import ApiError, error_response
from sglang.srt.managers.front.request_trace import trace_headers
from sglang.srt.managers.front.session_affinity import session_id, session_of
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.free_memory import release_free_memory, trim_allocator

MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_BODIES_BYTES = 8 * MAX_BODY_BYTES
"""Limit of the total size of bodies in memory, complete or not: those of calls that were not submitted yet, and the
parts of others that their answers need."""
MAX_HEAD_BYTES = 1 << 18
"""Limit for the request line and all headers of a request."""

LARGE_BODY_BYTES = 1 << 18
"""Size of a body after which memory kept by the C library is returned to the system, even on a busy server."""
TRIM_DELAY_S = 1.0
"""Delay in seconds before memory is given back: one trim serves several bodies."""

_OPEN_PATHS = ("/", "/health", "/ready", "/metrics")
"""Paths that need no API key: probes and scrapers have none, and the page asks for it."""
_OPEN_PREFIX = "/page/"
ADMIN_PATHS = frozenset(
    {"/abort_request", "/flush_cache", "/pause_generation", "/continue_generation", "/start_profile", "/stop_profile"}
    | {"/add_external_corpus", "/remove_external_corpus", "/list_external_corpora", "/hicache/storage-backend"}
    | {"/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed"}
    | {"/init_weights_update_group", "/destroy_weights_update_group", "/begin_weight_update", "/end_weight_update"}
    | {"/update_weight_version", "/get_weights_by_name", "/weights_checker"}
    | {"/release_memory_occupation", "/resume_memory_occupation", "/sleep", "/wake_up"}
    | {"/load_lora_adapter", "/unload_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    | {"/load_lora_adapter_from_tensors"}
)
"""Routes by which a client affects other clients, or loads code; the same as in SGLang."""
_ADMIN_PREFIXES = ("/unload", "/api/models/unload")
"""Beginnings of routes by which a client puts models to sleep, on a server of several."""
_ANY_TYPE_PATHS = ("/api/",)
"""Prefixes of Ollama's routes, whose bodies are JSON whatever their content type: `curl -d` sends another one."""
_UNAUTHORIZED = ApiError(401, "the API key is missing or wrong")
_NO_ADMIN = ApiError(
    403, "this route needs the key that the server was given with --admin-api-key, in place of its other key"
)
_NOT_JSON = ApiError(415, "the body must be JSON: send it with the header Content-Type: application/json")


_TOO_MANY_HEADERS = ApiError(431, f"the headers are larger than {MAX_HEAD_BYTES} bytes")


def is_open(path: str) -> bool:
    """Returns whether `path` needs no API key."""
    return path in _OPEN_PATHS or path.startswith(_OPEN_PREFIX)


def _is_admin(path: str) -> bool:
    return path in ADMIN_PATHS or path.startswith(_ADMIN_PREFIXES)


def takes_any_type(path: str) -> bool:
    """Returns whether a body is read as JSON whatever its content type."""
    return path.startswith(_ANY_TYPE_PATHS)


class HeadGate:
    """Refuses request heads that are too large, and those with no or several `Host` headers, which a proxy may
    interpret differently."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await error_response(scope["path"], refusal)(scope, receive, send)

    @staticmethod
    def _refusal(scope: Scope) -> ApiError | None:
        count, size = 0, len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
        for name, value in scope["headers"]:
            size += len(name) + len(value) + len(b": \r\n")
            count += name == b"host"
        if size > MAX_HEAD_BYTES:
            return _TOO_MANY_HEADERS
        if count > 1 or (not count and scope.get("http_version", "1.1") != "1.0"):
            return ApiError(400, f"a request has one header Host, this one has {count or 'none'}")
        return None


class RequestGate:
    """Checks the API key, and the type and size of request bodies. Strips slashes from the ends of paths, because a
    redirect would have to trust the client's `Host`."""

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None,
        admin_api_key: str | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_bodies_bytes: int = MAX_BODIES_BYTES,
    ) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._admin_key = None if admin_api_key is None else admin_api_key.encode()
        self._max_body_bytes = max_body_bytes
        self._max_bodies_bytes = max_bodies_bytes
        self._num_bytes = 0
        """Total size of the bodies that are held."""
        self._num_requests = 0
        """Number of requests under way, without those that probes send."""
        self._had_large_body = False
        self._trimming: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        headers = dict(scope["headers"])
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await error_response(scope["path"], refusal)(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0").lstrip(b"0")  # int() refuses thousands of digits, also zeros
        if length.isdigit() and int(length) > self._max_body_bytes:
            await error_response(scope["path"], self._too_large())(scope, receive, send)
            return
        if scope["method"] in ("POST", "PUT") and not _is_json(scope["path"], headers):
            await error_response(scope["path"], _NOT_JSON)(scope, receive, send)
            return
        body = _BoundedBody(self, receive)
        counts = not is_open(scope["path"])
        self._num_requests += counts
        try:
            await self._app({**scope, HELD_BODY: body}, body.receive, send)
        finally:
            self._num_requests -= counts
            body.hold_only(0)
            if counts and not self._num_requests:
                self._trim_later()

    def release(self, num_bytes: int) -> None:
        """Subtracts `num_bytes` of a body from the total."""
        self._num_bytes -= num_bytes
        if num_bytes >= LARGE_BODY_BYTES:
            self._had_large_body = True
            self._trim_later()

    def _trim_later(self) -> None:
        if self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(TRIM_DELAY_S, self._trim)

    def _trim(self) -> None:
        """Returns free memory to the system. While requests run, it does so only after a large body and without a
        garbage collection: a trim blocks allocations for milliseconds, a collection everything. Without requests it
        collects first, as errors with tracebacks leave bodies in reference cycles."""
        self._trimming = None
        if self._had_large_body or not self._num_requests:
            self._had_large_body = False
            release = trim_allocator if self._num_requests else release_free_memory
            asyncio.get_running_loop().run_in_executor(None, release)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        """Returns why the request's key is not sufficient, None if it is."""
        is_admin = self._admin_key is not None and _is_admin(scope["path"])
        expected = self._admin_key if is_admin else self._key
        if expected is None or scope["method"] == "OPTIONS" or is_open(scope["path"]):
            return None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")
        key = key.strip()
        if hmac.compare_digest(key, expected):
            return None
        has_other = is_admin and self._key is not None and hmac.compare_digest(key, self._key)
        return _NO_ADMIN if has_other else _UNAUTHORIZED

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the request body is larger than {self._max_body_bytes} bytes")

    def admit(self, num_new: int, num_bytes: int) -> None:
        """Adds `num_new` bytes of a body, which has `num_bytes` with them, to the total. Raises ApiError."""
        self._num_bytes += num_new
        if num_bytes > self._max_body_bytes:
            raise self._too_large()
        if num_new and self._num_bytes > self._max_bodies_bytes:
            raise ApiError(503, "the bodies of the requests under way fill their memory; send this one again later")


class _BoundedBody:
    """A `receive` that counts a body's bytes, also for bodies of unannounced length (chunked transfer)."""

    def __init__(self, gate: RequestGate, receive: Receive) -> None:
        self._gate = gate
        self._receive = receive
        self.num_bytes = 0
        self._num_held = 0

    def hold_only(self, num_bytes: int) -> None:
        """Counts at most `num_bytes` of the body from now on."""
        num_released = max(0, self._num_held - num_bytes)
        self._num_held -= num_released
        self._gate.release(num_released)

    async def receive(self) -> Message:
        message = await self._receive()
        num_new = len(message.get("body", b""))
        self.num_bytes += num_new
        self._num_held += num_new
        self._gate.admit(num_new, self.num_bytes)
        return message


def _is_json(path: str, headers: dict[bytes, bytes]) -> bool:
    """Returns whether the body's content type is JSON, or there is no body. Web pages may send a body without content
    type to any server, so that is not accepted."""
    media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if media_type == b"application/json" or takes_any_type(path):
        return True
    if media_type.startswith(b"application/") and media_type.endswith(b"+json"):
        return True
    return not headers.get(b"content-length", b"").strip(b"0") and b"transfer-encoding" not in headers


_TRACE_HEADERS = (b"traceparent", b"tracestate")


class TraceHeaders:
    """Stores the client's trace context for the spans of its requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            name.decode(): value.decode("latin-1") for name, value in scope.get("headers", ()) if name in _TRACE_HEADERS
        }
        trace_headers.set(headers or None)
        await self._app(scope, receive, send)


class SessionIds:
    """Stores the session that a client names, by which its requests get a replica."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session_id.set(session_of(scope.get("headers", ())))
        await self._app(scope, receive, send)


def with_sessions(app: ASGIApp, args: ServerArgs) -> ASGIApp:
    """Returns `app` behind `SessionIds`, where the server chooses replicas by sessions."""
    return SessionIds(app) if args.load_balance_method == PREFIX_AFFINITY else app
