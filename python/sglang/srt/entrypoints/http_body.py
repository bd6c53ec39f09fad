"""Reading and validation of JSON bodies, so that every mistake becomes a 400 in the route's own error shape.

Bodies are msgspec structs: decoding stops at the first mistake and builds nothing for undeclared fields, so the cost of
a body is bounded by its size.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.requests import Request

from sglang.srt.entrypoints.held_body import BODY_BYTES
from sglang.srt.entrypoints.http_errors import ApiError, bad_request, from_decode_error
from sglang.srt.entrypoints.unsupported_fields import refuse_unsupported
from sglang.srt.upstream_interface import Unsupported
from sglang.srt.utils.json_nesting import (
    NESTED_TOO_DEEPLY,
    count_brackets,
    count_commas,
    has_more_names,
    nests_too_deeply,
)

MAX_BRACKETS = 1 << 19
"""Lists and objects in a body, counted as opening brackets anywhere: each costs a hundred bytes or more."""
MAX_COMMAS = 1 << 22
"""Values in a body, counted as commas anywhere."""
MAX_NAMES = 1 << 18
"""Names in the objects of a body, twice the entries of a logit bias over a large vocabulary. The decoder takes up to a
microsecond for each, in which no other thread runs."""
LONG_BODY_BYTES = 1 << 20
"""Size from which a body is decoded in a thread. The decoder holds the interpreter's lock, so other requests wait for
one of its passes over the body at a time, not for all of them."""


class Body(msgspec.Struct, kw_only=True):
    """A request's JSON object. Unknown fields are ignored, as clients send many, except those of `unsupported`."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {}


B = TypeVar("B", bound=Body)


async def read_body(request: Request, model: type[B]) -> B:
    """Reads the request's body as `model`. Raises ApiError 400, or 413 for too many values."""
    raw = await _take_body(request)
    if not raw:
        raise bad_request("the request has no body; send a JSON object")
    return await _parsed(request, raw, model)


async def read_optional_body(request: Request, model: type[B]) -> B:
    """Reads the body like `read_body`; a request without a body gets the defaults."""
    raw = await _take_body(request)
    return await _parsed(request, raw, model) if raw else model()


async def _parsed(request: Request, raw: bytes, model: type[B]) -> B:
    engine = request.app.state.server.engine if len(raw) >= LONG_BODY_BYTES else None
    if engine is None:  # a short body, or a server that starts and refuses requests anyway
        return parse_body(raw, model)
    body: B = await engine.manager.text.in_thread(len(raw), parse_body, raw, model)
    return body


async def _take_body(request: Request) -> bytes:
    """Returns the body once. `Request.body` would keep it until the answer has ended."""
    raw = b"".join([part async for part in request.stream() if part])
    request.scope[BODY_BYTES] = len(raw)
    return raw


def parse_body(raw: bytes, model: type[B]) -> B:
    """Decodes a body. Raises ApiError."""
    num_brackets = count_brackets(raw)
    if num_brackets > MAX_BRACKETS or count_commas(raw) > MAX_COMMAS:
        raise ApiError(413, f"the body has more than {MAX_BRACKETS} brackets or {MAX_COMMAS} commas; send less at once")
    if has_more_names(raw, MAX_NAMES):
        raise ApiError(413, f"the objects of the body have more than {MAX_NAMES} names; send less at once")
    if nests_too_deeply(raw, num_brackets):
        raise bad_request(f"Invalid request: the JSON is {NESTED_TOO_DEEPLY}")
    try:
        body = _decoder(model).decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise from_decode_error(error) from None
    refuse_unsupported(raw, model.unsupported)
    return body


@functools.cache
def _decoder(model: type[B]) -> msgspec.json.Decoder[B]:
    """Returns a lenient decoder: it reads `"0.5"` as a number and `1` as a boolean, as some clients send them."""
    return msgspec.json.Decoder(model, strict=False)


def body_schema(model: type[Body], required: bool = True) -> dict[str, Any]:
    """Returns the OpenAPI description of a body; `body_definitions` has the schemas that it refers to."""
    schema = {"$ref": _REF.format(name=model.__name__)}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def body_definitions(models: Sequence[type[msgspec.Struct]]) -> dict[str, Any]:
    """Returns the named schemas of these structs and of all that they contain."""
    _, definitions = msgspec.json.schema_components(models, ref_template=_REF)
    return definitions


_REF = "#/components/schemas/{name}"
