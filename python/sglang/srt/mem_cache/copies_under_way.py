"""Copies between the GPU's prefixes and those of main memory that have begun and not ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from sglang.srt.mem_cache.cache_tier import CopyState, Transfer
from sglang.srt.mem_cache.kv_table import CachedRequest
from sglang.srt.mem_cache.layerwise_load import LayerwiseLoad
from sglang.srt.mem_cache.radix_node import Keys
from sglang.srt.mem_cache.storage.tier import StoredRequest


class CopyHandle(Protocol):
    """State of a submitted copy; `layers` is set for a load layer by layer."""

    @property
    def state(self) -> CopyState:
        """Returns whether the copy is running, done or failed."""

    @property
    def layers(self) -> LayerwiseLoad | None:
        """Returns what steps wait for if the copy goes layer by layer; None if it does not."""


class LoadingRequest(CachedRequest, StoredRequest, Protocol):
    """The fields of a request that the tier reads and writes."""

    @property
    def may_be_stale(self) -> bool:
        """Returns whether its steps may be computed again if a load fails."""

    num_loads: int
    """Loads that were begun for it since it entered the queue."""
    num_loaded: int
    """Tokens that the last load brought."""


@dataclass(slots=True, eq=False)
class Copy:
    """A transfer that was begun. `req`: the request that waits for a load; None for a save."""

    transfer: Transfer
    req: LoadingRequest | None
    keep_until: float = 0.0
    """The time of the offer from which a save was made."""
    begun: float = field(default_factory=time.monotonic)
    handle: CopyHandle | None = None
    by_layer: bool = False
    """The tree has the loaded nodes already; steps wait for them layer by layer."""


class CopiesUnderWay:
    """Copies in the order in which they were begun. Loads are found by their request and by the first page of their
    prefix, because each waiting request asks for them in each step."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._copies: dict[Copy, None] = {}
        self._load_of: dict[LoadingRequest, Copy] = {}
        self._loads_by_start: dict[tuple[str | None, bytes], list[Copy]] = {}

    def __iter__(self) -> Iterator[Copy]:
        return iter(self._copies)

    def __len__(self) -> int:
        return len(self._copies)

    def __contains__(self, copy: Copy) -> bool:
        return copy in self._copies

    def add(self, copy: Copy) -> None:
        """Adds a copy that has begun."""
        self._copies[copy] = None
        if copy.req is not None:
            self._load_of[copy.req] = copy
            self._loads_by_start.setdefault(self._start_of(copy), []).append(copy)

    def remove(self, copy: Copy) -> None:
        """Removes a copy that has ended."""
        del self._copies[copy]
        if copy.req is None:
            return
        if self._load_of.get(copy.req) is copy:
            del self._load_of[copy.req]
        start = self._start_of(copy)
        self._loads_by_start[start].remove(copy)
        if not self._loads_by_start[start]:
            del self._loads_by_start[start]

    def load_of(self, req: LoadingRequest) -> Copy | None:
        """Returns the load for this request; None if there is none."""
        return self._load_of.get(req)

    def loads_like(self, req: CachedRequest, keys: Keys) -> list[Copy]:
        """Returns the loads of prefixes that begin with the same page as `keys`, which are the request's."""
        return self._loads_by_start.get((req.namespace, self._first_page(keys)), [])

    def _start_of(self, copy: Copy) -> tuple[str | None, bytes]:
        return copy.transfer.namespace, self._first_page(copy.transfer.keys)

    def _first_page(self, keys: Keys) -> bytes:
        return keys[: self._page_size].tobytes()
