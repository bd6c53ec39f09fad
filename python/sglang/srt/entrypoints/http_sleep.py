"""Routes that give the GPU's memory back and take it again: SGLang's, and vLLM's."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.http_body import Body, body_schema, read_optional_body
from sglang.srt.entrypoints.http_errors import bad_request, json_response
from sglang.srt.entrypoints.http_origins import refuse_other_pages
from sglang.srt.entrypoints.http_state import engine_of, state_of
from sglang.srt.managers.front.sleeper import ABORT, MODES, Sleeper

router = APIRouter(tags=["native"])

LEVELS = ("1", "2")


class MemoryBody(Body, kw_only=True):
    tags: list[str] | None = None
    """weights, kv_cache, cuda_graph; all if there are none."""


BODIES = (MemoryBody,)


def _parameter(name: str, text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": text, "schema": schema}


_SLEEP = {
    "parameters": [
        _parameter(
            "level",
            "1: weights stay in main memory; 2: they are sent or read again",
            {"type": "string", "enum": [*LEVELS], "default": "1"},
        ),
        _parameter("mode", "What happens to requests that run", {"type": "string", "enum": [*MODES], "default": ABORT}),
    ]
}
_TAGS = {
    "parameters": [
        _parameter("tags", "Which memory wakes; all if not given", {"type": "array", "items": {"type": "string"}})
    ]
}


def _sleeper(request: Request) -> Sleeper:
    refuse_other_pages(request)
    sleeper = engine_of(request).manager.sleeper
    if sleeper is None:
        raise bad_request("this server keeps its memory; start it with --enable-memory-saver")
    return sleeper


@router.get("/release_memory_occupation", include_in_schema=False)
@router.post("/release_memory_occupation", openapi_extra=body_schema(MemoryBody, required=False))
async def release_memory_occupation(request: Request) -> Response:
    """Gives memory back once the requests that run have ended. The weights are kept in main memory with
    --enable-weights-cpu-backup; without it they are sent or read again."""
    sleeper = _sleeper(request)
    body = await read_optional_body(request, MemoryBody)
    await sleeper.sleep(body.tags, state_of(request).args.enable_weights_cpu_backup)
    return json_response(None)


@router.get("/resume_memory_occupation", include_in_schema=False)
@router.post("/resume_memory_occupation", openapi_extra=body_schema(MemoryBody, required=False))
async def resume_memory_occupation(request: Request) -> Response:
    """Takes memory again."""
    sleeper = _sleeper(request)
    await sleeper.wake((await read_optional_body(request, MemoryBody)).tags)
    return json_response(None)


@router.post("/sleep", openapi_extra=_SLEEP)
async def sleep(request: Request) -> Response:
    """Gives all memory back."""
    sleeper, query = _sleeper(request), request.query_params
    level, mode = query.get("level", "1"), query.get("mode", ABORT)
    if level not in LEVELS:
        said = "level is 1 or 2; what level 0 does elsewhere is /pause_generation here"
        raise bad_request(said, param="level")
    if mode not in MODES:
        raise bad_request(f"mode is one of {', '.join(MODES)}", param="mode")
    await sleeper.sleep(None, level == LEVELS[0], mode)
    return json_response({"status": "sleeping", "level": int(level)})


@router.post("/wake_up", openapi_extra=_TAGS)
async def wake_up(request: Request) -> Response:
    """Takes memory again, and lets requests go on that were kept."""
    sleeper, tags = _sleeper(request), request.query_params.getlist("tags")
    await sleeper.wake(tags)
    return json_response({"status": "sleeping" if sleeper.state.asleep else "awake", "tags": tags})


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """Says whether any memory is given back."""
    return json_response({"is_sleeping": bool(engine_of(request).manager.state.asleep)})
