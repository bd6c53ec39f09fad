"""Accounting of request bodies in memory: the whole body until the call is submitted, then the parts that the answer
needs."""

from __future__ import annotations

from typing import Protocol

from starlette.requests import Request

from sglang.srt.managers.front.generate_request import GenerateRequest

HELD_BODY = "sglang.held_body"
"""Scope key of the HeldBody that counts towards the limit of all bodies; absent if the request passed no gate."""
BODY_BYTES = "sglang.body_bytes"
"""Scope key of the number of bytes that the body had when it was read."""
SMALL_REST = 4096
"""Bytes of a body that an answer may hold uncounted, such as the model's name and short tools."""


class HeldBody(Protocol):
    """A body that counts towards the limit of all bodies."""

    def hold_only(self, num_bytes: int) -> None:
        """Counts at most `num_bytes` of the body from now on."""


def body_bytes(request: Request) -> int:
    """Returns the size of the body, which `read_body` must have read."""
    num_bytes: int = request.scope[BODY_BYTES]
    return num_bytes


def releases_body(request: Request, call: GenerateRequest) -> GenerateRequest:
    """Returns the call, prepared to end the accounting of the request's body when it is submitted. The caller must hold
    nothing of the body by then."""
    body: HeldBody | None = request.scope.get(HELD_BODY)

    def release(num_kept: int) -> None:
        if body is not None:
            body.hold_only(num_kept if num_kept > SMALL_REST else 0)

    call.on_submitted = release
    return call
