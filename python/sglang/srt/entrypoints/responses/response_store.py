"""Stores responses that clients can fetch again and continue. They are in memory, limited in number and bytes; the
oldest are dropped first."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20
"""Limit of all responses and their conversations together, as JSON, including conversations of answers in progress."""
MAX_ENTRY_BYTES = 16 << 20
"""Limit of one response with its conversation. A short request that continues it makes the server read all of it."""


@dataclass(slots=True)
class StoredResponse:
    """One response. `response` is a JSON object, `conversation` a JSON list: `num_inputs` input items, then the items
    of the answer. The list is empty until the response has ended."""

    response: bytes
    conversation: bytes = b"[]"
    num_inputs: int = 0
    task: asyncio.Task[None] | None = None
    """The task that computes the answer in the background; None for an answer that its client waited for."""
    num_waiting_bytes: int = 0
    """Approximate size of the conversation that the task holds, which is not in `conversation` yet."""

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that the entry takes."""
        return len(self.response) + len(self.conversation) + self.num_waiting_bytes

    @property
    def is_running(self) -> bool:
        """Returns whether the response is still being generated."""
        return self.task is not None and not self.task.done()

    def items(self) -> list[dict[str, Any]]:
        """Returns the items of the conversation, decoded."""
        items: list[dict[str, Any]] = msgspec.json.decode(self.conversation)
        return items

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the response, decoded."""
        fields: dict[str, Any] = msgspec.json.decode(self.response)
        return fields


@dataclass(slots=True, weakref_slot=True)
class HeldInput:
    """The input of an answer in progress. `items` is a JSON list of `num_items` items; None once they were dropped, and
    then the answer will not be stored."""

    items: bytes | None
    num_items: int
    on_drop: Callable[[int], None] | None = None
    """Called once with the bytes of the items when they are dropped, or with the whole object."""

    @classmethod
    def of(cls, items: list[dict[str, Any]]) -> HeldInput:
        """Returns a held input with `items` encoded."""
        return cls(msgspec.json.encode(items), len(items))

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that the items take; 0 once they were dropped."""
        return 0 if self.items is None else len(self.items)

    def drop(self) -> bytes | None:
        """Drops the items and returns them; None if they were dropped already."""
        items, self.items = self.items, None
        if items is not None and self.on_drop is not None:
            self.on_drop(len(items))
        return items

    def __del__(self) -> None:
        self.drop()

    def take_conversation(self, output: list[dict[str, Any]]) -> bytes | None:
        """Drops the items and returns them, followed by those of `output`, as a JSON list; None if they were dropped
        already. Must not be called for empty input."""
        items = self.drop()
        if items is None:
            return None
        assert self.num_items
        ending = msgspec.json.encode(output)[1:]
        return b"".join((items[:-1], b"," if output else b"", ending))


class ResponseStore:
    """Stored responses by id, the least recently written first. Held inputs count against the limit of bytes. If there
    is no room, the oldest ended responses are dropped first, and then the items of the oldest held inputs; running
    responses stay. `put` may be called in any thread, as the last events of a long answer are written in one."""

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_entry_bytes: int = MAX_ENTRY_BYTES,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_entry_bytes = min(max_bytes, max_entry_bytes)
        self._lock = threading.RLock()
        """Reentrant, as an input may be collected while its thread holds it."""
        self._num_bytes = 0
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self._held: weakref.WeakValueDictionary[int, HeldInput] = weakref.WeakValueDictionary()
        """In the order of `hold`. An input leaves when the answer that refers to it has ended."""
        self._held_numbers = itertools.count()
        self._num_held_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_running(self) -> int:
        """Returns the number of responses that are still being generated."""
        with self._lock:
            return sum(entry.is_running for entry in self._entries.values())

    def has_room(self, entry: StoredResponse) -> bool:
        """Returns whether `entry`, a response that will run, fits beside the running ones. Ended ones do not matter,
        because they would be dropped."""
        with self._lock:
            running = [other.num_bytes for other in self._entries.values() if other.is_running]
        return len(running) < self._max_responses and sum(running) + entry.num_bytes <= self._max_bytes

    def get(self, response_id: str) -> StoredResponse | None:
        """Returns a stored response; None if there is none with this id."""
        return self._entries.get(response_id)

    def put(self, response_id: str, entry: StoredResponse) -> None:
        """Stores a response in place of the one with the same id, if any. If `entry` is larger than one may be, neither
        is kept."""
        with self._lock:
            self._remove(response_id)
            if entry.num_bytes > self._max_entry_bytes:
                return
            self._entries[response_id] = entry
            self._num_bytes += entry.num_bytes
            self._make_room()

    def hold(self, waiting: HeldInput) -> None:
        """Counts the input against the limit of bytes for as long as anything else refers to it. Drops its items if
        they are larger than one response may be; otherwise makes room for them."""
        if waiting.num_bytes > self._max_entry_bytes:
            waiting.drop()
            return
        with self._lock:
            self._held[next(self._held_numbers)] = waiting
            waiting.on_drop = self._end_hold
            num_bytes = waiting.num_bytes
            self._num_held_bytes += num_bytes
            self._make_room()

    def _end_hold(self, num_bytes: int) -> None:
        with self._lock:
            self._num_held_bytes -= num_bytes

    def _make_room(self) -> None:
        """Drops ended responses, then items of held inputs, until the limits are kept or only running ones are left."""
        while self._num_bytes + self._num_held_bytes > self._max_bytes or len(self._entries) > self._max_responses:
            ended = next((name for name, other in self._entries.items() if not other.is_running), None)
            if ended is not None:
                self._remove(ended)
                continue
            number, oldest = next(iter(self._held.items()), (0, None))
            if oldest is None:
                break
            oldest.drop()
            del self._held[number]

    def discard(self, response_id: str) -> bool:
        """Removes a response and cancels its task, unless that is the caller. Returns False if there is none with this
        id."""
        with self._lock:
            entry = self._remove(response_id)
        if entry is not None and entry.task is not None and entry.task is not asyncio.current_task():
            entry.task.cancel()
        return entry is not None

    def _remove(self, response_id: str) -> StoredResponse | None:
        entry = self._entries.pop(response_id, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes
        return entry
