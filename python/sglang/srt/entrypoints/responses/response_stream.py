"""A streamed response: named server-sent events with sequence numbers, with one output item open at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.long_outputs import copied
from sglang.srt.entrypoints.openai.chat_output import ChatFormats, ChoiceOutput
from sglang.srt.entrypoints.responses import response_object as parts
from sglang.srt.entrypoints.responses.response_object import ResponseHead
from sglang.srt.entrypoints.responses.tools import CALL_ITEMS, fill
from sglang.srt.function_call.events import ArgumentsDelta, CallEnd, CallStart, Event, ReasoningDelta, TextDelta
from sglang.srt.managers.front.generate_request import GenerateOutput, refuse_aborted

_CONTENT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
"""Prefixes of the events of an item's text, by the item's type."""
_CALLS = {form.type: form for form in CALL_ITEMS.values()}
_STREAMED = "function_call"
"""Type of the calls whose arguments are sent while the model writes them. Those of others are in a JSON form unknown to
clients."""


class ResponseStream:
    """Writes the events of one answer. `on_end` gets the final response."""

    def __init__(
        self,
        head: ResponseHead,
        formats: ChatFormats,
        output: ChoiceOutput,
        on_end: Callable[[dict[str, Any]], None],
    ) -> None:
        self._head = head
        self._formats = formats
        self._output = output
        self._on_end = on_end
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        self._text: list[str] | None = None
        """The pieces of the item that is open, which is the last one; None: none is."""

    def write(self, output: GenerateOutput) -> bytes:
        """Returns the events of a further part of the output."""
        pieces = self._output.push(output)
        events = [] if self._num_events else [self._begin()]
        events += map(self._piece, pieces)
        finish = output.finish
        if finish is not None:
            refuse_aborted(finish)
            events.append(self._close(parts.item_status(finish)))
            response = self._head.ended(self._items, output.meta, finish)
            self._on_end(response)
            events.append(self._sse(f"response.{response['status']}", response=response))
        return b"".join(events)

    def num_held(self, index: int) -> int:
        return self._output.num_held + copied(self._head.num_echoed_bytes)

    def end(self) -> bytes:
        """Returns no bytes: the last part of the output has ended the response."""
        return b""

    def fail(self, error: ApiError) -> bytes:
        """Returns the events of a failure after the first event."""
        events = self._close("incomplete")
        response = self._head.failed(error.message, self._items)
        self._on_end(response)
        return events + self._sse("response.failed", response=response)

    def _begin(self) -> bytes:
        response = self._head.state("in_progress")
        return self._sse("response.created", response=response) + self._sse("response.in_progress", response=response)

    def _sse(self, event: str, /, **fields: Any) -> bytes:
        data = msgspec.json.encode({"type": event, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: %s\ndata: %s\n\n" % (event.encode(), data)

    def _piece(self, piece: Event) -> bytes:
        match piece:
            case TextDelta(text):
                return self._within("message") + self._delta(text)
            case ReasoningDelta(text):
                return self._within("reasoning") + self._delta(text)
            case CallStart(call, name):
                closed = self._close()
                self._items.append(self._head.call_item("in_progress", self._formats.call_id(name, call), name))
                return closed + self._open()
            case ArgumentsDelta(_, text):
                return self._delta(text)
            case CallEnd(_, complete, _):
                return self._close("completed" if complete else "incomplete")

    def _within(self, kind: str) -> bytes:
        """Opens an item unless one of its kind is open. Returns the events."""
        if self._text is not None and self._items[-1]["type"] == kind:
            return b""
        closed = self._close()
        new = parts.message_item if kind == "message" else parts.reasoning_item
        self._items.append(new("in_progress"))
        return (
            closed + self._open() + self._item_event("response.content_part.added", part=_part(kind), content_index=0)
        )

    def _open(self) -> bytes:
        self._text = []
        return self._sse("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])

    def _item_event(self, event: str, /, **fields: Any) -> bytes:
        """Returns an event about the open item."""
        return self._sse(event, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _delta(self, text: str) -> bytes:
        assert self._text is not None
        self._text.append(text)
        kind = self._items[-1]["type"]
        if kind in _CALLS:
            return self._item_event(f"{_CALLS[kind].events}.delta", delta=text) if kind == _STREAMED else b""
        name, fields = _content_event(kind)
        return self._item_event(name + ".delta", delta=text, **fields)

    def _close(self, status: str = "completed") -> bytes:
        if self._text is None:
            return b""
        item, text, self._text = self._items[-1], "".join(self._text), None
        item["status"] = status
        if item["type"] in _CALLS:
            events = self._end_call(item, text)
        else:
            name, fields = _content_event(item["type"])
            part = _part(item["type"], text)
            item["content"] = [part]
            events = self._item_event(name + ".done", text=text, **fields)
            events += self._item_event("response.content_part.done", part=part, content_index=0)
        return events + self._sse("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _end_call(self, item: dict[str, Any], arguments: str) -> bytes:
        """Returns the events that end a call, before the one with the whole item."""
        fill(item, arguments)
        form = _CALLS[item["type"]]
        if form.events is None:
            return b""
        text = item[form.field]
        if item["type"] == _STREAMED:
            return self._item_event(f"{form.events}.done", arguments=text, name=item["name"])
        delta = self._item_event(f"{form.events}.delta", delta=text) if text else b""
        return delta + self._item_event(f"{form.events}.done", input=text)


def _part(kind: str, text: str = "") -> dict[str, Any]:
    return parts.text_part(text) if kind == "message" else parts.thought_part(text)


def _content_event(kind: str) -> tuple[str, dict[str, Any]]:
    """Returns the name of the text events of such an item, without `.delta` and `.done`, and their further fields."""
    return _CONTENT_EVENTS[kind], {"content_index": 0, **({"logprobs": []} if kind == "message" else {})}
