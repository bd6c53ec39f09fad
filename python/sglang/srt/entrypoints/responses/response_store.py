"""Responses that can be fetched again and continued: in memory, bounded in number and bytes, the oldest go first."""

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
"""The limit of all responses and their conversations, also those of answers on their way, as JSON."""
MAX_ENTRY_BYTES = 16 << 20
"""The limit of one response and its conversation, which a short request can have read again."""


@dataclass(slots=True)
class StoredResponse:
    """`response` and `conversation`: JSON. The conversation is the items of the answer behind `num_inputs` others;
    empty until the response has ended."""

    response: bytes
    conversation: bytes = b"[]"
    num_inputs: int = 0
    task: asyncio.Task[None] | None = None
    """The task that computes the answer in the background."""
    num_waiting_bytes: int = 0
    """About the size of the conversation that the task holds."""

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.conversation) + self.num_waiting_bytes

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done()

    def items(self) -> list[dict[str, Any]]:
        """The conversation."""
        items: list[dict[str, Any]] = msgspec.json.decode(self.conversation)
        return items

    def fields(self) -> dict[str, Any]:
        """The response."""
        fields: dict[str, Any] = msgspec.json.decode(self.response)
        return fields


@dataclass(slots=True, weakref_slot=True)
class HeldInput:
    """The `num_items` items before an answer on its way, as a JSON list; None: the answer will not be stored."""

    items: bytes | None
    num_items: int

    @classmethod
    def of(cls, items: list[dict[str, Any]]) -> HeldInput:
        return cls(msgspec.json.encode(items), len(items))

    @property
    def num_bytes(self) -> int:
        return 0 if self.items is None else len(self.items)

    def conversation(self, output: list[dict[str, Any]]) -> bytes:
        """The items with those of the answer behind them, as JSON."""
        assert self.items is not None and self.num_items
        ending = msgspec.json.encode(output)[1:]
        return b"".join((self.items[:-1], b"," if output else b"", ending))


class ResponseStore:
    """The kept responses by id, the least recently written first. Those that run stay until they have ended. What is
    held for answers on their way counts, and gives way behind the responses that have ended: the oldest goes first."""

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
        return sum(entry.is_running for entry in self._entries.values())

    def has_room(self, entry: StoredResponse) -> bool:
        """Returns whether one more that runs can be kept beside those that do."""
        running = [other.num_bytes for other in self._entries.values() if other.is_running]
        return len(running) < self._max_responses and sum(running) + entry.num_bytes <= self._max_bytes

    def get(self, response_id: str) -> StoredResponse | None:
        return self._entries.get(response_id)

    def put(self, response_id: str, entry: StoredResponse) -> None:
        """Replaces what has this id. What is too large is not kept."""
        self._remove(response_id)
        if entry.num_bytes > self._max_entry_bytes:
            return
        self._entries[response_id] = entry
        self._num_bytes += entry.num_bytes
        self._make_room()

    def hold(self, waiting: HeldInput) -> None:
        """Counts the input as long as anything refers to it. One that is too large loses its items, and so do the
        oldest where there is no room."""
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
        """Forget a response; one that runs is cancelled. False: there is none."""
        entry = self._remove(response_id)
        if entry is not None and entry.task is not None and entry.task is not asyncio.current_task():
            entry.task.cancel()
        return entry is not None

    def _remove(self, response_id: str) -> StoredResponse | None:
        entry = self._entries.pop(response_id, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes
        return entry
