"""SGLang's routes that this server does not have: what they ask for, and what to do instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.http_errors import json_response

router = APIRouter(include_in_schema=False)

_MEMORY = "memory is kept until the server ends; start it with a smaller --mem-fraction-static, or end it"
_WEIGHTS = "weights are loaded once; start a server with the other --model-path, and end this one"
_LORA = "there are no LoRA adapters; merge the adapter into the weights and serve those"

REFUSED_ROUTES: Mapping[str, str] = {
    **dict.fromkeys(("/release_memory_occupation", "/resume_memory_occupation"), _MEMORY),
    **dict.fromkeys(
        (
            "/update_weights_from_disk",
            "/update_weights_from_tensor",
            "/update_weights_from_distributed",
            "/init_weights_update_group",
        ),
        _WEIGHTS,
    ),
    **dict.fromkeys(("/load_lora_adapter", "/unload_lora_adapter", "/load_lora_adapter_from_tensors"), _LORA),
}


def _refuse(path: str, reason: str) -> Callable[[Request], Awaitable[Response]]:
    message = f"{path} is not implemented in sm120-sglang: {reason}."
    content = {"success": False, "message": message, "error_message": message, "error": {"message": message}}

    async def refuse(request: Request) -> Response:
        """Says so under every name where a client of SGLang looks for it."""
        return json_response(content, 400)

    return refuse


for _path, _reason in REFUSED_ROUTES.items():
    router.add_api_route(_path, _refuse(_path, _reason), methods=["GET", "POST"], name=_path)
