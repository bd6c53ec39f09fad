"""Errors that leave the server: one exception type, one table of HTTP statuses, and the error shapes of the routes."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.responses import Response

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestEntityTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
_OPENAI_PREFIX = "/v1/"
_DECODE_ERROR = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<where>[^`]*)`)?", re.DOTALL)


class ApiError(Exception):
    """A refused or failed request: HTTP `status` and a `message` for the client.

    `code` is the machine-readable reason (the status when there is no better one), `param` the offending field.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    def fields(self) -> dict[str, Any]:
        """The five fields of an OpenAI-style error object."""
        return {
            "object": "error",
            "message": self.message,
            "type": _TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError"),
            "param": self.param,
            "code": self.status if self.code is None else self.code,
        }


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """The JSON body of `error` on the route `path`: flat on OpenAI routes, `{"error": {"message"}}` elsewhere."""
    if path.startswith(_OPENAI_PREFIX):
        return error.fields()
    return {"error": {"message": error.message}}


def error_schema_name(path: str) -> str:
    """The name that `/openapi.json` gives to the shape of `error_body`."""
    return "OpenAIError" if path.startswith(_OPENAI_PREFIX) else "NativeError"


def error_response(path: str, error: ApiError) -> Response:
    return json_response(error_body(path, error), error.status)


def sse_error(path: str, error: ApiError) -> bytes:
    """A server-sent event for a failure after the first chunk has left."""
    fields = error.fields() if path.startswith(_OPENAI_PREFIX) else {"message": error.message}
    return b"data: " + msgspec.json.encode({"error": fields}) + b"\n\n"


def json_response(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def from_decode_error(error: Exception, inside: str = "") -> ApiError:
    """Broken JSON or a wrong field, said in one line. `inside` names the field that was decoded, if not the body."""
    if isinstance(error, RecursionError):
        return bad_request("Invalid request: the JSON is nested too deeply", param=inside or None)
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
