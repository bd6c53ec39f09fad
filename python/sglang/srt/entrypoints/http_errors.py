"""Errors sent to clients: one exception type, the HTTP statuses, and the error shapes of the routes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestEntityTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_DECODE_ERROR = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<where>[^`]*)`)?", re.DOTALL)


class ApiError(Exception):
    """A refused or failed request: HTTP `status` and a `message` for the client.

    `code` is the machine-readable reason (the status if there is no better one), `param` the offending field.
    `details`: further fields that Anthropic's clients read.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.details = details

    def fields(self) -> dict[str, Any]:
        """Returns the five fields of an OpenAI-style error object."""
        return {
            "object": "error",
            "message": self.message,
            "type": _TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError"),
            "param": self.param,
            "code": self.status if self.code is None else self.code,
        }


def bad_request(message: str, param: str | None = None) -> ApiError:
    """Returns an ApiError with status 400."""
    return ApiError(400, message, param=param)


class ErrorShape(NamedTuple):
    """Format of errors on the routes that begin with `prefix`. `schema`: its name in `/openapi.json`."""

    prefix: str
    schema: str
    body: Callable[[ApiError], dict[str, Any]]
    event: Callable[[ApiError], dict[str, Any]]
    """Like `body`, for a failure after the first chunk was sent; written between `event_head` and `event_end`."""
    event_head: bytes = b"data: "
    event_end: bytes = b"\n\n"


def _native_body(error: ApiError) -> dict[str, Any]:
    """Returns the error's body for native routes. For server errors and timeouts (status 500 and above) the fields are
    at the top level, as SGLang's clients expect."""
    return error.fields() if error.status >= 500 else _native(error)


def _native(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": error.message}}


def _anthropic(error: ApiError) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = {} if error.details is None else {"details": error.details}
    return {"type": "error", "error": {"type": kind, "message": error.message, **details}}


def _ollama(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


_SHAPES = (
    ErrorShape("/v1/messages", "AnthropicError", _anthropic, _anthropic, b"event: error\ndata: "),
    ErrorShape("/v1/", "OpenAIError", ApiError.fields, lambda error: {"error": error.fields()}),
    ErrorShape("/api/", "OllamaError", _ollama, _ollama, b"", b"\n"),
    ErrorShape("", "NativeError", _native_body, _native),
)
"""Error shapes; the first whose prefix matches a path applies."""


def _shape(path: str) -> ErrorShape:
    return next(shape for shape in _SHAPES if path.startswith(shape.prefix))


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """Returns the JSON body of `error` on the route `path`."""
    return _UNAUTHORIZED if _is_plain_401(path, error.status) else _shape(path).body(error)


def error_schema_name(path: str, status: int) -> str:
    """Returns the name of `error_body`'s shape in `/openapi.json`."""
    if _is_plain_401(path, status):
        return "Unauthorized"
    shape = _shape(path)
    return "OpenAIError" if shape.body is _native_body and status >= 500 else shape.schema


_UNAUTHORIZED = {"error": "Unauthorized"}


def _is_plain_401(path: str, status: int) -> bool:
    """Returns whether this is a missing key, whose error looks the same on all routes but Anthropic's."""
    return status == 401 and _shape(path).body is not _anthropic


def error_response(path: str, error: ApiError) -> Response:
    """Returns the response to a request at `path` that failed."""
    return json_response(error_body(path, error), error.status)


def error_event(path: str, error: ApiError) -> bytes:
    """Returns the part of a stream that reports a failure after the first chunk was sent."""
    shape = _shape(path)
    return shape.event_head + msgspec.json.encode(shape.event(error)) + shape.event_end


def json_response(content: Any, status: int = 200) -> Response:
    """Returns a response with `content` as JSON."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def from_decode_error(error: Exception, inside: str = "") -> ApiError:
    """Describes broken JSON or a wrong field in one line. `inside` names the decoded field, if it is not the body."""
    match = _DECODE_ERROR.fullmatch(str(error))
    assert match is not None
    where = (
        inside + (match["where"] or "")
        if not inside or (match["where"] or "[").startswith("[")
        else (f"{inside}.{match['where']}")
    )
    what = match["what"].replace("`", "")
    what = what[:1].lower() + what[1:] if isinstance(error, msgspec.ValidationError) else what
    param = re.split(r"[.\[]", where)[0]
    return bad_request("Invalid request: " + (f"{where}: {what}" if where else what), param=param or None)
