"""Reading JSON bodies: validated here, so that every mistake becomes a 400 in the route's own error shape."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from sglang.srt.entrypoints.http_errors import bad_request, from_validation

M = TypeVar("M", bound=BaseModel)


async def read_body(request: Request, model: type[M]) -> M:
    """The request's body as `model`. The content type does not matter. Raises ApiError 400."""
    raw = await request.body()
    if not raw:
        raise bad_request("the request has no body; send a JSON object")
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from None


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a body that `read_body` reads."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def body_definitions(*models: type[BaseModel]) -> dict[str, Any]:
    """The nested schemas that `body_schema` refers to."""
    definitions: dict[str, Any] = {}
    for model in models:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        definitions.update(schema.get("$defs", {}))
    return definitions
