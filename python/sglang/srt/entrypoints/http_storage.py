"""Routes that attach a store of cached prefixes to a running server, and detach it.

A store is a directory, or a class that is imported: a client that names one may write files and run code here. So
routes that change something require a key, and importing a class requires the administrator's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.http_body import Body, body_schema, read_body
from sglang.srt.entrypoints.http_errors import ApiError, bad_request, json_response
from sglang.srt.entrypoints.http_state import engine_of, state_of
from sglang.srt.managers.front.control_calls import Undo

router = APIRouter(tags=["native"])

MAX_CONFIG_CHARS = 1 << 16
ATTACH_LIMIT_S = 120.0
"""Seconds to hash a checkpoint's list of files and to reach a store."""


class StorageBackendBody(Body, kw_only=True):
    hicache_storage_backend: Literal["file", "nixl", "mooncake", "lmcache", "dynamic"]
    hicache_storage_backend_extra_config_json: Annotated[str, Meta(max_length=MAX_CONFIG_CHARS)] | None = None
    """As --hicache-storage-backend-extra-config, but no file is read."""
    hicache_storage_prefetch_policy: Literal["best_effort", "wait_complete", "timeout"] | None = None
    hicache_write_policy: Literal["write_through", "write_through_selective", "write_back"] | None = None


BODIES = (StorageBackendBody,)


async def _ask(
    request: Request, kind: str, args: dict[str, Any] | None = None, undo: Undo | None = None
) -> dict[str, Any]:
    reply = await engine_of(request).manager.control(kind, args, ATTACH_LIMIT_S, undo)
    if not reply.ok:
        raise bad_request(reply.message)
    return reply.data


def _refuse_without_key(request: Request) -> None:
    """Refuses on servers without a key; the request's own key was checked before."""
    args = state_of(request).args
    if args.api_key is None and args.admin_api_key is None:
        raise ApiError(
            403,
            "a store is attached and detached by holders of the server's key: start it with --admin-api-key, with"
            " --api-key, or with --hicache-storage-backend",
        )


@router.get("/hicache/storage-backend")
async def storage_backend(request: Request) -> Response:
    """Names the store in use. Its own settings, which may have a password among them, are not shown."""
    return json_response(await _ask(request, "storage_backend"))


@router.put("/hicache/storage-backend", openapi_extra=body_schema(StorageBackendBody))
async def attach_storage_backend(request: Request) -> Response:
    """Keeps prefixes of main memory in a store from now on. Nothing may run or wait."""
    _refuse_without_key(request)
    body = await read_body(request, StorageBackendBody)
    if body.hicache_storage_backend == "dynamic" and state_of(request).args.admin_api_key is None:
        raise ApiError(
            403,
            "a store of the backend dynamic is code that is loaded: it is attached by holders of the administrator's"
            " key only. Start the server with --admin-api-key, or with --hicache-storage-backend dynamic",
        )
    extra = body.hicache_storage_backend_extra_config_json
    if extra is not None and extra.lstrip().startswith("@"):
        raise bad_request("files of the server are not read for clients; send the JSON itself")
    await _ask(
        request,
        "attach_storage",
        {
            "backend": body.hicache_storage_backend,
            "extra": extra,
            "prefetch_policy": body.hicache_storage_prefetch_policy,
            "write_policy": body.hicache_write_policy,
        },
        undo=Undo("detach_storage", {"undo": True}),  # all replicas attach it or none
    )
    return json_response({"success": True, "message": f"The store {body.hicache_storage_backend} is attached."})


@router.delete("/hicache/storage-backend")
async def detach_storage_backend(request: Request) -> Response:
    """Leaves the store as it is. Nothing may run or wait."""
    _refuse_without_key(request)
    await _ask(request, "detach_storage")
    return json_response({"success": True, "message": "The store is detached; what it holds is still there."})
