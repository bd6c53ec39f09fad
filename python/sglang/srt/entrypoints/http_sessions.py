"""`/open_session`, `/close_session`, and calls of `/generate` with `session_params`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from fastapi import APIRouter
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.http_body import Body, body_schema, read_body
from sglang.srt.entrypoints.http_errors import bad_request, json_response
from sglang.srt.entrypoints.http_state import engine_of, state_of
from sglang.srt.entrypoints.http_stream import Events
from sglang.srt.entrypoints.long_outputs import is_long, written
from sglang.srt.entrypoints.native_answer import Keep, whole_answer
from sglang.srt.entrypoints.openai.protocol import Int, Positive
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest, RequestError
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.managers.front.media.expansion import moved, whole_items
from sglang.srt.managers.front.media.media_tokens import MediaTokens
from sglang.srt.managers.front.native_events import NativeEvents
from sglang.srt.managers.front.native_output import is_list
from sglang.srt.managers.front.sessions import SessionStore, Turn
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.managers.wire.io_struct import MediaItem
from sglang.srt.managers.wire.token_ids import Ids

router = APIRouter(tags=["native"])

MAX_TIMEOUT_S = 1e9


class OpenSessionBody(Body, kw_only=True):
    """`capacity_of_str_len`: the longest sequence; a token counts as one. `streaming`: each request goes on from the
    last one. `timeout`: seconds without a request after which the session is closed."""

    capacity_of_str_len: Positive
    session_id: str | None = None
    streaming: bool | None = False
    timeout: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None


class CloseSessionBody(Body, kw_only=True):
    session_id: str


class SessionParams(msgspec.Struct):
    """The session `id` and its request `rid` to go on from; without one the session's beginning. A streaming session
    goes on from its last request, whatever `rid` is, and takes none of the other fields.

    `offset`: how many tokens of that are kept; 0 or none: all. `replace`: what went on from there before is dropped.
    `drop_previous_output`: only the prompt of that request is gone on from. Without an `id` there is no session.
    """

    id: str = ""
    rid: str | None = None
    offset: Int | None = None
    replace: bool | None = False
    drop_previous_output: bool | None = False


BODIES = (OpenSessionBody, CloseSessionBody)


@router.post("/open_session", openapi_extra=body_schema(OpenSessionBody))
async def open_session(request: Request) -> Response:
    engine_of(request)
    body = await read_body(request, OpenSessionBody)
    state = state_of(request)
    if body.streaming and not state.args.enable_streaming_session:
        message = "streaming sessions are switched off; relaunch with --enable-streaming-session"
        raise bad_request(message, param="streaming")
    session_id = state.sessions.open(body.capacity_of_str_len, body.session_id, bool(body.streaming), body.timeout)
    return json_response(session_id)


@router.post("/close_session", openapi_extra=body_schema(CloseSessionBody))
async def close_session(request: Request) -> Response:
    engine_of(request)
    state_of(request).sessions.close((await read_body(request, CloseSessionBody)).session_id)
    return Response(status_code=200)


@asynccontextmanager
async def _turn(
    manager: TokenizerManager, store: SessionStore, call: GenerateRequest, params: SessionParams
) -> AsyncGenerator[Keep, None]:
    """Begins a turn of the session. Yields what keeps the output ids with the last output; a turn without one is
    forgotten."""
    turn = await begin_turn(manager, store, call, params)
    rolls_back = store.is_streaming(params.id)

    def keep(stream: GenerationStream, output: GenerateOutput, output_ids: list[int]) -> None:
        if is_list(stream):  # server or model defaults may set n > 1
            raise RequestError("session_params needs a single sample: a request has one output to go on from.")
        finish = output.finish
        if finish is not None and not (rolls_back and finish.type == "abort"):
            store.end(params.id, turn, output_ids)

    try:
        yield keep
    finally:
        if not turn.ended:
            store.forget(params.id, turn.rid)


async def session_events(
    manager: TokenizerManager, store: SessionStore, call: GenerateRequest, params: SessionParams, incremental: bool
) -> AsyncGenerator[Events, None]:
    """Yields the events of a request that continues one of the session's, in pieces where they are long."""
    async with _turn(manager, store, call, params) as keep, await manager.submit(call) as stream:
        events, output_ids = NativeEvents(manager, call, stream, incremental), list[int]()
        async for output in stream:
            output_ids.extend(output.new_ids)
            keep(stream, output, output_ids)
            pieces = await written([output], partial(events.write, output))
            yield pieces if is_long(output) else b"".join(pieces)


async def session_answer(
    manager: TokenizerManager, store: SessionStore, call: GenerateRequest, params: SessionParams
) -> Response:
    """Returns the whole answer to a request that continues one of the session's."""
    async with _turn(manager, store, call, params) as keep:
        return await whole_answer(manager, call, keep)


async def begin_turn(
    manager: TokenizerManager, store: SessionStore, call: GenerateRequest, params: SessionParams
) -> Turn:
    """Prepends the session's tokens to `call`, which then has token ids only. Raises RequestError."""
    if call.is_batch or isinstance(call.rid, list):
        raise RequestError("session_params needs a single prompt.")
    previous = _previous(store, params)
    new = await _new_ids(manager, call, begins=previous is None)
    try:
        return await _begun(manager, store, call, params, previous, new)
    finally:
        _release(manager, new.media)  # the turn holds them by now


class _New(NamedTuple):
    """What a call adds to its session: token ids, and images, whose places count the `dropped` tokens before the ids,
    too."""

    ids: Ids
    media: list[MediaItem]
    dropped: int


def _media_tokens(manager: TokenizerManager) -> MediaTokens | None:
    return None if manager.media is None else manager.media.tokens


def _release(manager: TokenizerManager, media: list[MediaItem]) -> None:
    if manager.media is not None:
        manager.media.files.release(media)


async def _begun(
    manager: TokenizerManager,
    store: SessionStore,
    call: GenerateRequest,
    params: SessionParams,
    previous: Turn | None,
    new: _New,
) -> Turn:
    kept = np.empty(0, np.int32)
    if previous is not None:
        kept = previous.tokens[: previous.prompt_len] if params.drop_previous_output else previous.tokens
        kept = kept[: params.offset or None]
    old_media = [] if previous is None else whole_items(previous.media, len(kept))
    call.text, call.input_ids = None, await manager.preparer.input_ids(np.concatenate((kept, new.ids)))
    if _previous(store, params) is not previous:
        raise RequestError(f"The session {params.id!r} went on meanwhile; send this again.")
    new_media = moved(new.media, len(kept) - new.dropped, _media_tokens(manager))
    call.media, call.media_items = None, [*old_media, *new_media]
    rid = call.rid = str(call.rid or uuid.uuid4().hex)
    parent = None if previous is None else previous.rid
    turn = Turn(rid, parent, call.input_ids, len(call.input_ids), media=call.media_items)
    call.replica = manager.replica_for(call.input_ids, store.replica(params.id))
    dropped = store.begin(params.id, turn, replaces=bool(params.replace))
    store.bind(params.id, call.replica)
    if params.replace and previous is not None and not previous.ended:
        dropped.append(previous.rid)
    for each in dropped:
        manager.abort(each)
    return turn


def _previous(store: SessionStore, params: SessionParams) -> Turn | None:
    """Returns the turn to continue; None: the session's beginning. Raises RequestError."""
    if store.is_streaming(params.id):
        given = [name for name in _REWRITING if getattr(params, name)]
        if given:
            raise RequestError(f"A streaming session only goes on: {given[0]} is not supported; leave it out.")
        return store.last_turn(params.id)
    previous = store.turn(params.id, params.rid)
    if previous is not None and not params.replace and not previous.ended:
        raise RequestError(f"The request {previous.rid!r} of the session has not ended yet.")
    return previous


_REWRITING = ("replace", "drop_previous_output", "offset")


async def _new_ids(manager: TokenizerManager, call: GenerateRequest, begins: bool) -> _New:
    """Returns the token ids of the given prompt, without a BOS token unless it begins the text, and its images, which
    the caller must release."""
    ids, media = await manager.preparer.prompt_ids(call, add_special_tokens=begins)
    bos = None if manager.tokenizer is None else manager.tokenizer.bos_token_id
    dropped = 0 if begins or ids[0] != bos else 1
    return _New(ids[dropped:], media, dropped)
