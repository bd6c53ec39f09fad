"""`/v1/responses`: create, fetch, cancel, delete; count the tokens of an input."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.held_body import body_bytes, releases_body
from sglang.srt.entrypoints.http_errors import ApiError, json_response
from sglang.srt.entrypoints.http_request_id import rid_of
from sglang.srt.entrypoints.http_stream import until_disconnect
from sglang.srt.entrypoints.long_outputs import written
from sglang.srt.entrypoints.openai.chat_call import chat_call, count_prompt
from sglang.srt.entrypoints.openai.chat_output import ChatFormats, ChoiceOutput
from sglang.srt.entrypoints.openai.media_parts import media_of
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving import OpenAIService, collect, off_event_loop
from sglang.srt.entrypoints.output_stream import stream_events
from sglang.srt.entrypoints.responses import response_object as parts
from sglang.srt.entrypoints.responses.conversation import chat_request, tool_catalog
from sglang.srt.entrypoints.responses.protocol import ResponseContext, ResponsesRequest, read_items
from sglang.srt.entrypoints.responses.response_object import ResponseHead
from sglang.srt.entrypoints.responses.response_store import MAX_ENTRY_BYTES, HeldInput, ResponseStore, StoredResponse
from sglang.srt.entrypoints.responses.response_stream import ResponseStream
from sglang.srt.entrypoints.responses.tools import ToolCatalog, fill
from sglang.srt.entrypoints.responses.truncation import fit_context
from sglang.srt.function_call.events import collect as collect_events
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest, RequestError, refuse_aborted

logger = logging.getLogger(__name__)

MAX_BACKGROUND = 256
"""Answers that may be computed in the background at the same time."""
MAX_BACKGROUND_BYTES = MAX_ENTRY_BYTES // 2
"""Limit of a conversation with its request: the response that is kept meanwhile repeats much of it."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """One response in progress: its call, and where the result goes."""

    service: OpenAIService
    store: ResponseStore
    head: ResponseHead
    waiting: HeldInput | None
    """The conversation up to the answer, if that is to be stored."""
    call: GenerateRequest
    formats: ChatFormats
    num_bytes: int
    """Approximate size of the conversation."""

    def keep(self, response: dict[str, Any]) -> None:
        """Stores the final response, unless the client does not want that or the store has no room."""
        conversation = None if self.waiting is None else self.waiting.take_conversation(response["output"])
        if self.waiting is None or conversation is None:
            return
        encoded = msgspec.json.encode(response)
        self.store.put(self.head.id, StoredResponse(encoded, conversation, self.waiting.num_items))

    def response(self, output: GenerateOutput) -> dict[str, Any]:
        """Returns the response for the whole output. Raises RequestError 503 for an aborted one."""
        assert output.finish is not None
        refuse_aborted(output.finish)
        choice = ChoiceOutput(self.formats, self.service.tokenizer)
        parsed = collect_events(choice.push(output))
        status = parts.item_status(output.finish)
        items = [parts.reasoning_item(status, parts.thought_part(parsed.reasoning))] if parsed.reasoning else []
        if parsed.text or not (items or parsed.calls):
            items.append(parts.message_item(status, parts.text_part(parsed.text)))
        for number, call in enumerate(parsed.calls):
            item = self.head.call_item("completed", self.formats.call_id(call.name, number), call.name)
            fill(item, call.arguments)
            items.append(item)
        return self.head.ended(items, output.meta, output.finish)


async def create(service: OpenAIService, store: ResponseStore, body: ResponsesRequest, request: Request) -> Response:
    """Answers `POST /v1/responses`: whole, as a stream, or in the background."""
    making = _new_answer(service, store, body, request)
    del body  # the answer needs no more of it
    answer = await until_disconnect(request, making)
    if answer.head.background:
        return json_response(_start(answer, request))
    if answer.call.stream:
        choice = ChoiceOutput(answer.formats, service.tokenizer)
        writer = ResponseStream(answer.head, answer.formats, choice, answer.keep)
        return await stream_events(service.manager, request, answer.call, lambda _: writer, done=b"", fail=writer.fail)
    _, (output,) = await collect(service, request, answer.call)
    response = await written([output], lambda: answer.response(output))
    answer.keep(response)
    return json_response(response)


async def count_tokens(
    service: OpenAIService, store: ResponseStore, body: ResponseContext, request: Request
) -> Response:
    """Answers `POST /v1/responses/input_tokens`."""
    count = await until_disconnect(request, _count(service, store, body, body_bytes(request)))
    return json_response({"object": "response.input_tokens", "input_tokens": count})


async def _count(service: OpenAIService, store: ResponseStore, body: ResponseContext, num_bytes: int) -> int:
    previous = _previous(store, body)
    num_bytes += 0 if previous is None else previous.num_bytes
    chat = await off_event_loop(service, num_bytes, lambda: _translated(body, previous).request)
    return await count_prompt(service, chat, num_bytes, folds=True)


async def _new_answer(service: OpenAIService, store: ResponseStore, body: ResponsesRequest, http: Request) -> _Answer:
    """Returns the answer for a request, ready to run. Raises ApiError."""
    previous = _previous(store, body)
    num_bytes = body_bytes(http) + (0 if previous is None else previous.num_bytes)
    if body.background and num_bytes > MAX_BACKGROUND_BYTES:
        raise ApiError(413, f"a conversation answered in the background may have {MAX_BACKGROUND_BYTES} bytes")
    items, request, catalog = await off_event_loop(service, num_bytes, _translated, body, previous)
    if body.truncation == "auto":
        if await off_event_loop(service, num_bytes, media_of, request.messages):
            raise ApiError(400, "truncation auto is not supported with images; leave it out", param="truncation")
        context_len = service.manager.model_config.context_len
        await fit_context(
            request, context_len, lambda shorter: count_prompt(service, shorter, num_bytes, context_len, folds=True)
        )
    rid = rid_of(http)
    call, formats = await chat_call(service, request, num_bytes, rid, folds=True)
    echoed = await off_event_loop(service, num_bytes, parts.echoed_fields, body)
    num_echoed = sum(len(bytes(value)) for value in echoed.values())
    head = ResponseHead(
        f"resp_{rid}",
        int(time.time()),
        body.model or service.model_name,
        bool(body.background),
        catalog,
        service.report_cached_tokens,
        echoed,
        num_echoed,
    )
    call.kept_bytes += num_echoed
    waiting = None if body.store is False else await off_event_loop(service, num_bytes, _held, items)
    if waiting is not None and not body.background:
        store.hold(waiting)
    return _Answer(service, store, head, waiting, call, formats, num_bytes)


def _held(items: list[dict[str, Any]]) -> HeldInput:
    return HeldInput.of([item if "id" in item else {"id": parts.item_id("item"), **item} for item in items])


class _Translated(NamedTuple):
    """The items that the model will read, and the chat request and tools made from them."""

    items: list[dict[str, Any]]
    request: ChatCompletionRequest
    catalog: ToolCatalog


def _translated(body: ResponseContext, previous: StoredResponse | None) -> _Translated:
    """Converts the input, after that of the `previous` response. Raises ApiError 400."""
    items = body.items() if previous is None else previous.items() + body.items()
    read = read_items(items)
    catalog = tool_catalog(body, read)
    return _Translated(items, chat_request(body, read, catalog), catalog)


def _previous(store: ResponseStore, body: ResponseContext) -> StoredResponse | None:
    """Returns the response that is continued, if any. Raises ApiError 400."""
    if body.previous_response_id is None:
        return None
    previous = store.get(body.previous_response_id)
    if previous is None or previous.is_running:
        reason = "is not stored here (any more)" if previous is None else "has not ended yet"
        raise ApiError(
            400,
            f"the response {body.previous_response_id!r} {reason}; send the whole conversation as input",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return previous


# --- in the background ------------------------------------------------------------------------------------------------


def _start(answer: _Answer, request: Request) -> dict[str, Any]:
    """Returns the initial response, which a task then completes. Raises ApiError 503 if too many run."""
    if answer.store.num_running >= MAX_BACKGROUND:
        raise ApiError(503, f"{MAX_BACKGROUND} responses are computed in the background; try again later")
    response = answer.head.state("queued")
    entry = StoredResponse(msgspec.json.encode(answer.head.state("in_progress")), num_waiting_bytes=answer.num_bytes)
    if not answer.store.has_room(entry):
        raise ApiError(
            503, "the conversations of responses in the background leave no room for another; try again later"
        )
    releases_body(request, answer.call)
    entry.task = asyncio.create_task(_compute(answer))
    answer.store.put(answer.head.id, entry)
    return response


async def _compute(answer: _Answer) -> None:
    try:
        async with await answer.service.manager.submit(answer.call) as stream:
            (output,) = await stream.collect()
        assert output.finish is not None
        if output.finish.type == "abort":
            response = answer.head.state("cancelled")
        else:
            response = await written([output], lambda: answer.response(output))
    except RequestError as error:
        response = answer.head.failed(error.message)
    except Exception:
        logger.exception("a response in the background failed")
        response = answer.head.failed("internal server error; the server's log has the details")
    answer.keep(response)


# --- stored responses -------------------------------------------------------------------------------------------------


def stored(store: ResponseStore, response_id: str) -> StoredResponse:
    """Returns a stored response. Raises ApiError 404."""
    entry = store.get(response_id)
    if entry is None:
        raise ApiError(404, f"Response with id '{response_id[:64]}' not found.", param="response_id")
    return entry


async def cancel(service: OpenAIService, store: ResponseStore, response_id: str) -> Response:
    """Cancels a response that runs in the background; leaves one that has ended. Raises ApiError 404."""
    entry = stored(store, response_id)
    response = await off_event_loop(service, len(entry.response), entry.fields)
    if not response["background"]:
        raise ApiError(400, "only a response with background: true can be cancelled", param="response_id")
    if store.get(response_id) is not entry:  # it has ended meanwhile
        return Response(stored(store, response_id).response, media_type="application/json")
    if entry.is_running:
        response["status"] = "cancelled"
        store.discard(response_id)
        store.put(response_id, StoredResponse(msgspec.json.encode(response)))
    return json_response(response)


def delete(store: ResponseStore, response_id: str) -> Response:
    """Deletes a stored response. Raises ApiError 404."""
    stored(store, response_id)
    store.discard(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def input_items(
    service: OpenAIService, store: ResponseStore, response_id: str, limit: int, after: str | None, newest_first: bool
) -> Response:
    """Returns a page of the items that the model read, starting after the item with the id `after`. Raises ApiError 400
    or 404."""
    entry = stored(store, response_id)
    return await off_event_loop(service, entry.num_bytes, _page_of, entry, limit, after, newest_first)


def _page_of(entry: StoredResponse, limit: int, after: str | None, newest_first: bool) -> Response:
    items = entry.items()[: entry.num_inputs]
    if newest_first:
        items.reverse()
    if after is not None:
        position = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if position is None:
            raise ApiError(400, f"after: there is no item {after[:64]!r}", param="after")
        items = items[position + 1 :]
    page = [parts.typed_item(item) for item in items[:limit]]
    ids = [item["id"] for item in page] or [""]
    return json_response(
        {"object": "list", "data": page, "first_id": ids[0], "last_id": ids[-1], "has_more": len(items) > limit}
    )
