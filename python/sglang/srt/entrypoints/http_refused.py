"""SGLang's routes that this server does not have: each refusal says what to do instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.http_errors import json_response
from sglang.srt.upstream_interface import REFUSED_ROUTES

router = APIRouter(include_in_schema=False)


def _refuse(path: str, reason: str) -> Callable[[Request], Awaitable[Response]]:
    message = f"{path} is not implemented in sm120-sglang: {reason}."
    content = {"success": False, "message": message, "error_message": message, "error": {"message": message}}

    async def refuse(request: Request) -> Response:
        """Says so under every name where a client of SGLang looks for it."""
        return json_response(content, 400)

    return refuse


for _path, _reason in REFUSED_ROUTES.items():
    router.add_api_route(_path, _refuse(_path, _reason), methods=["GET", "POST"], name=_path)
