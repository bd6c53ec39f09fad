"""Responses that can be fetched again and continued: in memory, bounded in number and bytes, the oldest go first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20
"""The limit of all responses and their conversations, as JSON."""
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


class ResponseStore:
    """The kept responses by id, the least recently written first. Those that run stay until they have ended."""

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
        while self._num_bytes > self._max_bytes or len(self._entries) > self._max_responses:
            ended = next((name for name, other in self._entries.items() if not other.is_running), None)
            if ended is None:
                break
            self._remove(ended)

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
