"""Responses that can be fetched again and continued: in memory, bounded in number and bytes, the oldest dropped
first."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20
"""Limit of all responses and their conversations as JSON, including those of answers in progress."""
MAX_ENTRY_BYTES = 16 << 20
"""Limit of one response and its conversation, which a short request can make the model read again."""


@dataclass(slots=True)
class StoredResponse:
    """One response. `response` and `conversation` are JSON; the conversation has the answer's items after `num_inputs`
    others, and is empty until the response has ended."""

    response: bytes
    conversation: bytes = b"[]"
    num_inputs: int = 0
    task: asyncio.Task[None] | None = None
    """The task that computes the answer in the background."""
    num_waiting_bytes: int = 0
    """Approximate size of the conversation that the task holds."""

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that the entry takes."""
        return len(self.response) + len(self.conversation) + self.num_waiting_bytes

    @property
    def is_running(self) -> bool:
        """Returns whether the response is still being generated."""
        return self.task is not None and not self.task.done()

    def items(self) -> list[dict[str, Any]]:
        """Returns the conversation."""
        items: list[dict[str, Any]] = msgspec.json.decode(self.conversation)
        return items

    def fields(self) -> dict[str, Any]:
        """Returns the response."""
        fields: dict[str, Any] = msgspec.json.decode(self.response)
        return fields


@dataclass(slots=True, weakref_slot=True)
class HeldInput:
    """The `num_items` items before an answer in progress, as a JSON list; None: the answer will not be stored."""

    items: bytes | None
    num_items: int

    @classmethod
    def of(cls, items: list[dict[str, Any]]) -> HeldInput:
        """Returns the input items, encoded."""
        return cls(msgspec.json.encode(items), len(items))

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that the items take; 0 once they were dropped."""
        return 0 if self.items is None else len(self.items)

    def conversation(self, output: list[dict[str, Any]]) -> bytes:
        """Returns the items followed by those of the answer, as JSON."""
        assert self.items is not None and self.num_items
        ending = msgspec.json.encode(output)[1:]
        return b"".join((self.items[:-1], b"," if output else b"", ending))


class ResponseStore:
    """Stored responses by id, the least recently written first. Running ones stay until they have ended. Inputs held
    for answers in progress count too; after ended responses, the oldest of these inputs are dropped."""

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_entry_bytes: int = MAX_ENTRY_BYTES,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_entry_bytes = min(max_bytes, max_entry_bytes)
        self._num_bytes = 0
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self._held: weakref.WeakValueDictionary[int, HeldInput] = weakref.WeakValueDictionary()
        """In the order in which they came. Each goes with the answer that has it."""
        self._held_numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_running(self) -> int:
        """Returns the number of responses that are still being generated."""
        return sum(entry.is_running for entry in self._entries.values())

    def has_room(self, entry: StoredResponse) -> bool:
        """Returns whether one more running response can be kept besides the present ones."""
        running = [other.num_bytes for other in self._entries.values() if other.is_running]
        return len(running) < self._max_responses and sum(running) + entry.num_bytes <= self._max_bytes

    def get(self, response_id: str) -> StoredResponse | None:
        """Returns a stored response; None if there is none with this id."""
        return self._entries.get(response_id)

    def put(self, response_id: str, entry: StoredResponse) -> None:
        """Stores a response, replacing one of the same id; does not keep one that is too large."""
        self._remove(response_id)
        if entry.num_bytes > self._max_entry_bytes:
            return
        self._entries[response_id] = entry
        self._num_bytes += entry.num_bytes
        self._make_room()

    def hold(self, waiting: HeldInput) -> None:
        """Counts the input as long as anything refers to it. If it is too large, its items are dropped, and so are the
        oldest inputs if there is no room."""
        if waiting.num_bytes > self._max_entry_bytes:
            waiting.items = None
            return
        self._held[next(self._held_numbers)] = waiting
        self._make_room()

    def _make_room(self) -> None:
        waiting = [entry for entry in self._held.values() if entry.items is not None]
        num_held = sum(entry.num_bytes for entry in waiting)
        while self._num_bytes + num_held > self._max_bytes or len(self._entries) > self._max_responses:
            ended = next((name for name, other in self._entries.items() if not other.is_running), None)
            if ended is not None:
                self._remove(ended)
            elif waiting:
                oldest = waiting.pop(0)
                num_held -= oldest.num_bytes
                oldest.items = None
            else:
                break

    def discard(self, response_id: str) -> bool:
        """Forgets a response, cancelling a running one. Returns False if there is none."""
        entry = self._remove(response_id)
        if entry is not None and entry.task is not None and entry.task is not asyncio.current_task():
            entry.task.cancel()
        return entry is not None

    def _remove(self, response_id: str) -> StoredResponse | None:
        entry = self._entries.pop(response_id, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes
        return entry
