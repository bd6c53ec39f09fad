"""Errors that leave the server: one exception type, one table of HTTP statuses, and the error shapes of the routes."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestEntityTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
_OPENAI_PREFIX = "/v1/"
_MAX_LISTED_PROBLEMS = 5


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


def error_response(path: str, error: ApiError) -> Response:
    return json_response(error_body(path, error), error.status)


def sse_error(path: str, error: ApiError) -> bytes:
    """A server-sent event for a failure after the first chunk has left."""
    fields = error.fields() if path.startswith(_OPENAI_PREFIX) else {"message": error.message}
    return b"data: " + msgspec.json.encode({"error": fields}) + b"\n\n"


def json_response(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def from_validation(error: ValidationError) -> ApiError:
    """Broken JSON or wrong field types, said in one line."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    lines = []
    for problem in problems[:_MAX_LISTED_PROBLEMS]:
        where = ".".join(str(part) for part in problem["loc"])
        lines.append(f"{where}: {problem['msg']}" if where else str(problem["msg"]))
    if len(problems) > _MAX_LISTED_PROBLEMS:
        lines.append(f"and {len(problems) - _MAX_LISTED_PROBLEMS} more problems")
    location = problems[0]["loc"] if problems else ()
    return bad_request("Invalid request: " + "; ".join(lines), param=str(location[0]) if location else None)
