"""Routes that replace, name and compare the weights of the running server."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.http_body import Body, body_schema, read_body, read_optional_body
from sglang.srt.entrypoints.http_errors import ApiError, bad_request, json_response
from sglang.srt.entrypoints.http_origins import refuse_other_pages
from sglang.srt.entrypoints.http_state import engine_of, state_of
from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.sent_weights import BUCKET, LOAD_FORMATS, problem_of_sender, received
from sglang.srt.managers.front.weight_updates import UpdateOptions, WeightUpdates

router = APIRouter(tags=["native"])

NEEDS_KEY = (
    "weights are replaced by holders of the server's key: start it with --admin-api-key or --api-key, use sglang.Engine"
    " in the trainer's process, or start it with --weight-updates-without-key for clients that send no key"
)
Name = Annotated[str, Meta(max_length=512)]
Selector = Literal["target", "draft", "all"]


class _UpdateBody(Body, kw_only=True):
    flush_cache: bool | None = True
    abort_all_requests: bool | None = False
    weight_version: Name | None = None
    torch_empty_cache: bool | None = False
    """Accepted; memory of an update is given back in any case."""

    def how(self) -> UpdateOptions:
        """Returns what these fields ask for."""
        flush = self.flush_cache is not False
        return UpdateOptions(
            flush, bool(self.abort_all_requests), self.weight_version, getattr(self, "selector", "all")
        )


class FromDiskBody(_UpdateBody, kw_only=True):
    model_path: Annotated[str, Meta(max_length=4096)]
    load_format: Literal["auto", "safetensors"] | None = None
    keep_pause: bool | None = False
    """Generation stays paused behind the update, until /continue_generation."""
    is_async: bool | None = False
    recapture_cuda_graph: bool | None = False
    """Not needed: the weights keep their addresses."""
    token_step: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = 0
    manifest: Any = None
    """Refused: every tensor is checked without it."""


class FromTensorBody(_UpdateBody, kw_only=True):
    serialized_named_tensors: Annotated[list[str], Meta(min_length=1, max_length=256)]
    """Safetensors files in base64: one, or one for each rank of tensor parallelism."""
    load_format: str | None = None
    selector: Selector = "all"


class FromDistributedBody(_UpdateBody, kw_only=True):
    names: list[Name]
    dtypes: list[Name]
    shapes: list[list[Annotated[int, Meta(ge=0, le=2**40)]]]
    group_name: Name = "weight_update_group"
    load_format: str | None = None
    selector: Selector = "all"


class InitGroupBody(Body, kw_only=True):
    master_address: Name
    master_port: Annotated[int, Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, Meta(ge=0, le=65535)]
    world_size: Annotated[int, Meta(ge=2, le=65536)]
    group_name: Name = "weight_update_group"
    backend: Literal["nccl", "gloo"] = "nccl"


class DestroyGroupBody(Body, kw_only=True):
    group_name: Name = "weight_update_group"


class BracketBody(Body, kw_only=True):
    selector: Selector = "all"


class VersionBody(Body, kw_only=True):
    new_version: Name
    abort_all_requests: bool | None = True


class ByNameBody(Body, kw_only=True):
    name: Name
    truncate_size: Annotated[int, Meta(ge=0, le=100_000)] = 100


class CheckerBody(Body, kw_only=True):
    action: Literal["checksum", "snapshot", "reset_tensors", "compare"]
    selector: Selector = "all"
    skip_tensor_list: list[Name] | None = None
    allow_quant_error: bool | None = False
    """Refused: tensors are compared bit by bit."""


BODIES = (
    FromDiskBody, FromTensorBody, FromDistributedBody, InitGroupBody, DestroyGroupBody, BracketBody, VersionBody,
    ByNameBody, CheckerBody,
)  # fmt: skip


def _updates(request: Request, problem: str = NEEDS_KEY) -> WeightUpdates:
    """Returns the updates of the engine. problem: why clients without a key may not do this; "" if they may. Raises
    ApiError 403 on a server without a key: whoever writes weights decides what all clients read."""
    refuse_other_pages(request)
    args = state_of(request).args
    has_key = args.api_key is not None or args.admin_api_key is not None
    if problem and not (has_key or args.weight_updates_without_key):
        raise ApiError(403, problem)
    return engine_of(request).manager.weights


async def _answer(work: Awaitable[str], **more: Any) -> Response:
    try:
        said = await work
    except RequestError as error:
        status = 400 if error.status_code == 400 else error.status_code
        content = {"success": False, "message": error.message, "error": {"message": error.message}, **more}
        return json_response(content, status)
    return json_response({"success": True, "message": said, **more})


@router.post("/update_weights_from_disk", openapi_extra=body_schema(FromDiskBody))
async def update_weights_from_disk(request: Request) -> Response:
    """Replaces all weights by those of a directory. If that fails, the old ones serve on."""
    updates, body = _updates(request), await read_body(request, FromDiskBody)
    if body.manifest is not None:
        raise bad_request("manifest is not supported: every tensor is checked without it", param="manifest")
    how = msgspec.structs.replace(body.how(), keep_pause=bool(body.keep_pause))
    paused = 0

    async def update() -> str:
        nonlocal paused
        said, paused = await updates.from_disk(body.model_path, body.load_format, how)
        return said

    answer = await _answer(update(), num_paused_requests=0)
    return (
        answer
        if not paused
        else json_response({"success": True, "message": "The weights were replaced.", "num_paused_requests": paused})
    )


@router.post("/update_weights_from_tensor", openapi_extra=body_schema(FromTensorBody))
async def update_weights_from_tensor(request: Request) -> Response:
    """Writes tensors, in the names of the checkpoint."""
    body = await read_body(request, FromTensorBody)
    _check_format(body.load_format)
    updates = _updates(request, problem_of_sender(body.serialized_named_tensors, NEEDS_KEY))

    async def update() -> str:
        async with received(body.serialized_named_tensors, body.load_format) as sent:
            return await updates.from_files(sent.files, sent.bucket, body.how())

    return await _answer(update())


@router.post("/update_weights_from_distributed", openapi_extra=body_schema(FromDistributedBody))
async def update_weights_from_distributed(request: Request) -> Response:
    """Receives tensors that rank 0 of a group broadcasts, one after the other."""
    updates, body = _updates(request), await read_body(request, FromDistributedBody)
    _check_format(body.load_format)
    if body.load_format == BUCKET:
        raise bad_request("a group broadcasts tensor by tensor here; leave load_format out", param="load_format")
    if not len(body.names) == len(body.dtypes) == len(body.shapes):
        raise bad_request("names, dtypes and shapes must be lists of one length", param="names")
    tensors = list(zip(body.names, body.dtypes, body.shapes, strict=True))
    return await _answer(updates.from_group(body.group_name, tensors, body.how()))


@router.post("/init_weights_update_group", openapi_extra=body_schema(InitGroupBody))
async def init_weights_update_group(request: Request) -> Response:
    """Connects all ranks with a trainer, which is rank 0; the first rank here is `rank_offset`."""
    updates, body = _updates(request), await read_body(request, InitGroupBody)
    return await _answer(updates.init_group(msgspec.structs.asdict(body)))


@router.post("/destroy_weights_update_group", openapi_extra=body_schema(DestroyGroupBody, required=False))
async def destroy_weights_update_group(request: Request) -> Response:
    updates, body = _updates(request), await read_optional_body(request, DestroyGroupBody)
    return await _answer(updates.destroy_group(body.group_name))


@router.post("/begin_weight_update", openapi_extra=body_schema(BracketBody, required=False))
async def begin_weight_update(request: Request) -> Response:
    """Begins an update in several calls. Older clients leave it out; each call is then an update."""
    updates, body = _updates(request), await read_optional_body(request, BracketBody)
    return await _answer(updates.begin(body.selector))


@router.post("/end_weight_update", openapi_extra=body_schema(BracketBody, required=False))
async def end_weight_update(request: Request) -> Response:
    """Ends an update in several calls; quantized weights are replaced now."""
    updates = _updates(request)
    await read_optional_body(request, BracketBody)
    return await _answer(updates.end())


@router.post("/update_weight_version", openapi_extra=body_schema(VersionBody))
async def update_weight_version(request: Request) -> Response:
    """Gives the served weights another name in replies."""
    updates, body = _updates(request), await read_body(request, VersionBody)
    work = updates.set_version(body.new_version, body.abort_all_requests is not False)
    return await _answer(work, new_version=body.new_version)


@router.get("/get_weights_by_name", include_in_schema=False)
@router.post("/get_weights_by_name", openapi_extra=body_schema(ByNameBody))
async def get_weights_by_name(request: Request) -> Response:
    """Returns the first values of a tensor of the first rank; with several replicas a list of each."""
    updates, body = _updates(request), await read_body(request, ByNameBody)
    return json_response(await updates.by_name(body.name, body.truncate_size))


@router.get("/weights_checker", include_in_schema=False)
@router.post("/weights_checker", openapi_extra=body_schema(CheckerBody))
async def weights_checker(request: Request) -> Response:
    """Hashes the weights, keeps the hashes, compares with them, or zeroes the weights to see that an update reaches
    all of them."""
    updates, body = _updates(request), await read_body(request, CheckerBody)
    if body.allow_quant_error:
        raise bad_request("tensors are compared bit by bit; leave allow_quant_error out", param="allow_quant_error")
    more: dict[str, Any] = {}

    async def check() -> str:
        more.update(await updates.check(body.action, body.selector, body.skip_tensor_list or []))
        return "Success."

    answer = await _answer(check())
    return answer if not more else json_response({"success": True, "message": "Success.", **more})


def _check_format(load_format: str | None) -> None:
    if load_format not in LOAD_FORMATS:
        raise bad_request(
            f"load_format must be left out, or be direct or {BUCKET}: code of clients is not loaded",
            param="load_format",
        )
