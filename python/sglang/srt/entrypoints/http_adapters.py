"""Routes that load and unload LoRA adapters: SGLang's, and vLLM's below `/v1`."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from sglang.srt.entrypoints.http_body import Body, body_schema, read_body
from sglang.srt.entrypoints.http_errors import ApiError, bad_request, json_response
from sglang.srt.entrypoints.http_state import engine_of, state_of
from sglang.srt.managers.front.adapters import ServedAdapters
from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.sent_weights import problem_of_sender
from sglang.srt.utils.sent_tensors import sent_file

_HEADER_SIZE = 8
"""Bytes of a safetensors file before its header, a JSON object."""
_REFUSED_FIELDS = {
    "added_tokens_config": "tokens are not added to the vocabulary",
    "load_format": "the tensors are those of a safetensors file",
    "expected_checksums": "leave it out; the adapter is known by a hash of all its bytes",
}

router = APIRouter(tags=["native"])


class LoadAdapterBody(Body, kw_only=True):
    lora_name: str
    lora_path: str
    pinned: bool | None = False
    """It keeps its place on the GPU."""
    load_inplace: bool | None = False
    """It replaces one that has its name."""


class SentAdapterBody(Body, kw_only=True):
    lora_name: str
    config_dict: dict[str, Any]
    """The object of adapter_config.json."""
    serialized_named_tensors: list[str]
    """In base64 the bytes of adapter_model.safetensors, or a handle of sent tensors; once, or for each rank."""
    pinned: bool | None = False
    """It keeps its place on the GPU."""
    added_tokens_config: dict[str, Any] | None = None
    """Refused unless empty: tokens are not added to the vocabulary."""
    load_format: str | None = None
    """Refused: the tensors are those of a safetensors file."""
    expected_checksums: Any = None
    """Refused: the adapter is known by a hash of its bytes."""


class UnloadAdapterBody(Body, kw_only=True):
    lora_name: str


BODIES = (LoadAdapterBody, SentAdapterBody, UnloadAdapterBody)


def _adapters(request: Request) -> ServedAdapters:
    adapters = engine_of(request).manager.adapters
    if adapters is None:
        raise bad_request("this server takes no LoRA adapters; start it with --enable-lora")
    return adapters


def _allowed_directory(request: Request) -> str | None:
    """Returns the directory that clients may load from; None: any, for holders of a key. Raises ApiError 403 where
    there is neither."""
    args = state_of(request).args
    if args.api_key is not None or args.admin_api_key is not None:
        return None
    if args.allowed_local_lora_path is None:
        raise ApiError(
            403,
            "adapters are loaded by holders of the server's key: start it with --admin-api-key or --api-key, with"
            " --allowed-local-lora-path, or with --lora-paths",
        )
    return args.allowed_local_lora_path


async def _load(request: Request, adapters: ServedAdapters) -> LoadAdapterBody:
    below = _allowed_directory(request)
    body = await read_body(request, LoadAdapterBody)
    await adapters.load(body.lora_name, body.lora_path, bool(body.pinned), below, bool(body.load_inplace))
    return body


def _sent_weights(body: SentAdapterBody) -> bytes:
    """Returns the safetensors bytes of a body. Raises ApiError 400 for other forms: a pickle could run code."""
    contents = {_sent_content(each) for each in dict.fromkeys(body.serialized_named_tensors)}
    for field, reason in _REFUSED_FIELDS.items():
        if getattr(body, field):
            raise bad_request(f"{field} is not supported: {reason}", param=field)
    if len(contents) != 1:
        raise bad_request("serialized_named_tensors needs one file, or the same for each rank: ranks take their shares")
    weights = contents.pop()
    if weights[_HEADER_SIZE : _HEADER_SIZE + 1] != b"{":
        raise bad_request(
            "serialized_named_tensors must hold the bytes of a safetensors file (safetensors.torch.save) in base64;"
            " pickles, which SGLang's serializer makes, could run code and are not read",
            param="serialized_named_tensors",
        )
    return weights


def _sent_content(serialized: str) -> bytes:
    """Returns the bytes of an entry: its own, or those of the file that its handle names, which is removed. Raises
    ApiError 400."""
    try:
        content = base64.b64decode(serialized, validate=True)
    except ValueError:
        raise bad_request("serialized_named_tensors is no base64", param="serialized_named_tensors") from None
    try:
        path = sent_file(content)
    except ValueError as error:
        raise bad_request(f"serialized_named_tensors holds a handle, but {error}") from None
    if path is None:
        return content
    try:
        return path.read_bytes()
    finally:
        path.unlink(missing_ok=True)


def _result(adapters: ServedAdapters, error: str = "", status: int = 200) -> Response:
    loaded = {name: adapter.path for name, adapter in adapters.loaded.items()}
    said = {"error_message": error, "message": error, "error": {"message": error}} if error else {"error_message": ""}
    return json_response({"success": not error, **said, "loaded_adapters": loaded}, status)


@router.post("/load_lora_adapter", openapi_extra=body_schema(LoadAdapterBody))
async def load_lora_adapter(request: Request) -> Response:
    """Loads an adapter from a directory of the server. Requests may name it once this has answered."""
    adapters = _adapters(request)
    try:
        await _load(request, adapters)
    except RequestError as error:
        return _result(adapters, error.message, error.status_code)
    return _result(adapters)


@router.post("/load_lora_adapter_from_tensors", openapi_extra=body_schema(SentAdapterBody))
async def load_lora_adapter_from_tensors(request: Request) -> Response:
    """Loads an adapter that the body holds, or of which it has a handle: that needs no key."""
    adapters = _adapters(request)
    body = await read_body(request, SentAdapterBody)
    if problem_of_sender(body.serialized_named_tensors, "contents"):
        _allowed_directory(request)
    weights = await asyncio.to_thread(_sent_weights, body)
    try:
        await adapters.load_sent(body.lora_name, body.config_dict, weights, bool(body.pinned))
    except RequestError as error:
        return _result(adapters, error.message, error.status_code)
    return _result(adapters)


@router.post("/unload_lora_adapter", openapi_extra=body_schema(UnloadAdapterBody))
async def unload_lora_adapter(request: Request) -> Response:
    """Unloads an adapter once the requests that have it have ended; new ones are refused from now on."""
    adapters = _adapters(request)
    body = await read_body(request, UnloadAdapterBody)
    try:
        await adapters.unload(body.lora_name)
    except RequestError as error:
        return _result(adapters, error.message, 400 if error.status_code == 404 else error.status_code)
    return _result(adapters)


@router.post("/v1/load_lora_adapter", openapi_extra=body_schema(LoadAdapterBody))
async def load_adapter_of_vllm(request: Request) -> Response:
    """As /load_lora_adapter, with vLLM's answers."""
    body = await _load(request, _adapters(request))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", openapi_extra=body_schema(UnloadAdapterBody))
async def unload_adapter_of_vllm(request: Request) -> Response:
    """As /unload_lora_adapter, with vLLM's answers."""
    adapters = _adapters(request)
    body = await read_body(request, UnloadAdapterBody)
    await adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
