"""Cached prefixes in a store beyond main memory: when they are written there and read again. Host side only.

A prefix is written after it has been copied to main memory. When a request enters the queue, its prefix is looked up;
the part that the store has is read to main memory while the request waits, and loaded from there. All ranks decide
alike: in each step they agree on what their threads have done, and the least that any of them has read counts for all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from sglang.srt.configs.storage_backend import StorageConfig
from sglang.srt.mem_cache.cache_tier import (
    Arrival,
    CachedPrefix,
    CacheTier,
    CopyState,
    PinnedPrefix,
    common_length,
    namespace_of,
    pages_of,
    resumable_end,
)
from sglang.srt.mem_cache.radix_node import Keys, Node
from sglang.srt.mem_cache.storage.engine import READERS, Lookup, PrefixPages, Read, Removal, StorageJobs, Write

MAX_PREFETCHES = 16
"""Look-ups and reads at a time; other requests are looked up when one of them has ended."""
MAX_OFFERS = 1024
"""Prefixes that wait to be written; beyond that the oldest is dropped."""
MAX_REMOVED_TOKENS = 1 << 24
"""Tokens of all removals under way (128 MiB of keys). Beyond that the store is not read any more."""
GRACE_S = 0.25
"""Seconds that a stopped job gets to end. After that it is given up."""
HANG_S = 30.0
"""A job that has a thread and makes no progress for this many seconds is stopped."""
CLOSE_S = 10.0
"""Time that removals get before the store is left."""
IN_TIME, OVERDUE, GIVEN_UP = 0, 1, 2


class StoredRequest(Protocol):
    """The fields of a request that the tier reads and writes."""

    rid: str
    namespace: str | None
    looked_up: bool
    """Whether the store was asked for its prefix since it entered the queue."""
    num_stored: int
    """Tokens that were read from the store for it."""

    @property
    def finish(self) -> object:
        """Returns None until the request has ended."""

    def cache_keys(self, length: int) -> Keys:
        """Returns the keys of the first `length` tokens."""

    def matchable_len(self) -> int:
        """Returns how many leading tokens may come from a cache."""


@dataclass(slots=True, eq=False, kw_only=True)
class WatchedJob:
    """Watches a job that may never end: it is stopped when it is late, and given up soon after."""

    job: Lookup | Read | Write
    deadline: float = math.inf
    stopped: float = 0.0
    seen: tuple[int, int] = (0, 0)
    seen_at: float = field(default_factory=time.monotonic)
    """The time of the last progress, which is in `seen`."""

    def stop(self, at_once: bool = False) -> None:
        """Stops the job. at_once: gives it no time to end."""
        if not self.job.stopping:
            self.job.stop()
            self.stopped = time.monotonic()
        if at_once:
            self.stopped = -math.inf

    def lateness(self, has_threads: bool) -> int:
        """Returns IN_TIME; OVERDUE if the job should be stopped now; or GIVEN_UP if it was stopped and has had its time
        to end. has_threads: a thread will take the job, so it is not late while it waits for one."""
        now = time.monotonic()
        if self.job.stopping:
            return GIVEN_UP if now > self.stopped + GRACE_S else IN_TIME
        if self.progress != self.seen or (has_threads and not self.job.has_thread):
            self.seen, self.seen_at = self.progress, now
        return OVERDUE if now > self.deadline or now > self.seen_at + HANG_S else IN_TIME

    @property
    def progress(self) -> tuple[int, int]:
        """Returns the leading tokens that a job has found, read or written so far, and the bytes."""
        if isinstance(self.job, Lookup):
            return self.job.end, 0
        return self.job.num_tokens if isinstance(self.job, Write) else self.job.end, self.job.num_bytes


@dataclass(slots=True, eq=False, kw_only=True)
class Prefetch(WatchedJob):
    """A look-up, or the read that follows it."""

    job: Lookup | Read
    reqs: list[StoredRequest] = field(default_factory=list)
    """Requests that wait for it."""
    least: int
    """Tokens that the waiting requests have without this job."""
    arrival: Arrival | None = None
    """Room in main memory for a read."""


@dataclass(slots=True, eq=False, kw_only=True)
class Backup(WatchedJob):
    """A write under way."""

    job: Write
    departure: PinnedPrefix


@dataclass(slots=True)
class StorageCounts:
    """Totals of reads and writes since the start."""

    read_tokens: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    unfulfilled_tokens: int = 0
    """Tokens that a look-up had found and that were not read, or not in time."""
    written_tokens: int = 0
    written_bytes: int = 0
    written_seconds: float = 0.0
    dropped_tokens: int = 0
    """Tokens that were to be written and were not."""


class StorageTier:
    """The tier of the store, next to that of main memory."""

    def __init__(
        self,
        config: StorageConfig,
        engine: StorageJobs,
        device: CacheTier,
        host: CacheTier,
        agree: Callable[[Sequence[int]], list[int]],
    ) -> None:
        """agree: returns the minimum over the ranks of each value."""
        self.config, self.engine, self.counts = config, engine, StorageCounts()
        self._device, self._host, self._agree = device, host, agree
        self._prefetches: list[Prefetch] = []
        self._awaited: dict[str, Prefetch] = {}
        """By the id of a request that waits for it."""
        self._later: set[str] = set()
        """Ids of requests that are looked up once one of the prefetches has ended: it had nothing for them, and no
        other may begin."""
        self._offers: dict[Node, None] = {}
        """Nodes of main memory's tree whose prefixes are to be written, the oldest first."""
        host.tree.is_remembered = lambda node: node in self._offers
        self._backup: Backup | None = None
        self._removals: list[Removal] = []
        self._hung: list[Lookup | Read | Write] = []
        """Jobs that were given up and whose threads have not come back, on some rank."""

    # --- reading ------------------------------------------------------------------------------------------------------

    def look_up(self, req: StoredRequest) -> None:
        """Looks up whether the store has more of the prefix of a request that has entered the queue."""
        if req.looked_up or req.rid in self._later or self._removals or not self._has_readers:
            return
        page = self._host.page_size
        keys = req.cache_keys(req.matchable_len() // page * page)
        if len(self._prefetches) >= MAX_PREFETCHES and not any(self._may_share(p, req, keys) for p in self._prefetches):
            self._later.add(req.rid)
            return
        host, device = self._host.prefix(keys, req.namespace), self._device.prefix(keys, req.namespace)
        minimum = resumable_end(host, device, 0) + self.config.prefetch_threshold - 1
        if len(keys) <= minimum:
            req.looked_up = True
            return
        for prefetch in self._prefetches:
            job = prefetch.job
            if job.namespace == req.namespace and common_length(job.keys, keys) > minimum and not job.stopping:
                self._wait_for(prefetch, req)
                return
        if len(self._prefetches) >= MAX_PREFETCHES:
            self._later.add(req.rid)
            return
        start = host.length // self.engine.block * self.engine.block
        lookup = Lookup(keys, req.namespace, start=start, least=minimum)
        prefetch = Prefetch(job=lookup, deadline=self._deadline(lookup.begun, 0), least=minimum)
        self._prefetches.append(prefetch)
        self._wait_for(prefetch, req)
        self.engine.submit(lookup)

    def _may_share(self, prefetch: Prefetch, req: StoredRequest, keys: Keys) -> bool:
        """Returns whether a prefetch may bring a request enough to wait for. Compares only the first keys."""
        job, least = prefetch.job, self.config.prefetch_threshold
        return job.namespace == req.namespace and np.array_equal(job.keys[:least], keys[:least]) and not job.stopping

    @property
    def _has_readers(self) -> bool:
        """Returns whether a thread is free for further reading jobs."""
        return sum(not isinstance(job, Write) for job in self._hung) < READERS

    def _deadline(self, begun: float, num_tokens: int) -> float:
        forever = self.config.prefetch_policy == "wait_complete"
        return math.inf if forever else begun + self.config.timeout(num_tokens)

    def _wait_for(self, prefetch: Prefetch, req: StoredRequest) -> None:
        req.looked_up = True
        prefetch.reqs.append(req)
        self._awaited[req.rid] = prefetch

    def waits(self, req: StoredRequest) -> bool:
        """Returns whether a request that could enter the next step waits for the store instead."""
        self.look_up(req)
        prefetch = self._awaited.get(req.rid)
        if prefetch is None:
            return False
        if self.config.prefetch_policy == "best_effort":
            prefetch.stop()
        return True

    def _forget_waiters(self, prefetch: Prefetch) -> None:
        """Forgets the requests that wait for a job."""
        for req in prefetch.reqs:
            self._awaited.pop(req.rid, None)
        prefetch.reqs.clear()

    def _end_prefetch(self, prefetch: Prefetch, end: int, num_bytes: int) -> None:
        """Ends a job that has ended on all ranks, each of which has got at least to `end` and has read at least
        `num_bytes`."""
        job = prefetch.job
        if isinstance(job, Read):
            self._end_read(prefetch, job, end, num_bytes)
        elif end > prefetch.least and not job.stopping and self._begin_read(prefetch, job, end):
            return
        self._prefetches.remove(prefetch)
        self._later.clear()
        self._forget_waiters(prefetch)

    def _begin_read(self, prefetch: Prefetch, lookup: Lookup, end: int) -> bool:
        """Begins to read what the look-up found. Returns False if main memory has no room."""
        keys = lookup.keys[:end]
        host = self._host.prefix(keys, lookup.namespace)
        if host.length // self.engine.block * self.engine.block < lookup.start:
            return False  # the beginning of the prefix has been evicted from main memory
        arrival = Arrival.begin(host, keys, lookup.namespace)
        pages = self._reserve(arrival, host)
        if pages is None:
            arrival.end(0)
            return False
        read = Read(keys, lookup.namespace, pages=pages, start=arrival.had)
        prefetch.job, prefetch.arrival = read, arrival
        prefetch.deadline = self._deadline(lookup.begun, end - arrival.had)
        self.engine.submit(read)
        return True

    def _reserve(self, arrival: Arrival, host: CachedPrefix) -> PrefixPages | None:
        """Reserves states and windows first, as transfers do."""
        end, page = len(arrival.keys), self._host.page_size
        windows = []
        if self._host.checkpoints is not None and host.state_at(end) is None and not arrival.take_row():
            return None
        for window in self._host.windows:
            first = int(window.first_kept(np.array([end], np.int32))[0])
            here = host.window(window.index, first, end)
            arrival.keep_window(window, here)
            if not arrival.take_window(window, first, here == 0):
                return None
            windows.append(pages_of(arrival.windows[-1][first:], page))
        if not arrival.take_tokens():
            return None
        tokens = np.concatenate((np.zeros(arrival.had // page, np.int64), pages_of(arrival.slots, page)))
        return PrefixPages(arrival.keys, arrival.namespace, tokens, windows, arrival.row)

    def _end_read(self, prefetch: Prefetch, job: Read, end: int, num_bytes: int) -> None:
        arrival, counts = prefetch.arrival, self.counts
        assert arrival is not None
        num_tokens = max(0, end - arrival.had)
        arrival.end(end)
        counts.read_tokens += num_tokens
        counts.read_bytes += num_bytes
        counts.read_seconds += time.monotonic() - job.begun
        counts.unfulfilled_tokens += len(job.keys) - arrival.had - num_tokens
        for req in prefetch.reqs:
            req.num_stored = num_tokens

    # --- writing ------------------------------------------------------------------------------------------------------

    def offer(self, node: Node) -> None:
        """Queues the prefix up to `node`, which is new in main memory, to be written."""
        if not node.depth:
            return
        self._offers[node] = None
        if len(self._offers) > MAX_OFFERS:
            self._drop(next(iter(self._offers)))

    def _drop(self, node: Node) -> None:
        del self._offers[node]
        self.counts.dropped_tokens += node.key.size

    def launch(self) -> None:
        """Begins to write the oldest offered prefix, unless a write is under way."""
        if self._backup is not None or not self._offers:
            return
        hangs = any(isinstance(job, Write) for job in self._hung)
        if hangs or not self._agree([int(self.engine.writes)])[0]:
            for node in list(self._offers):
                self._drop(node)
            return
        node = next(iter(self._offers))
        if node.parent is None:
            self._drop(node)
            return
        del self._offers[node]
        path = CachedPrefix(self._host, self._host.tree.path(node)[::-1])
        self._backup = self._begin_write(path)
        self.engine.submit(self._backup.job)

    def _begin_write(self, path: CachedPrefix) -> Backup:
        keys, page, end = np.concatenate([n.key for n in path.nodes]), self._host.page_size, path.length
        departure, windows, has_end = PinnedPrefix.begin(path), [], self.engine.has_ends
        for window in self._host.windows:
            first = int(window.first_kept(np.array([end], np.int32))[0])
            slots = path.window(window.index, first, end)
            has_end = has_end and bool(slots.all())
            departure.keep_window(window, slots)
            windows.append(pages_of(slots, page))
        if self._host.checkpoints is not None:
            node = path.state_at(end)
            has_end = has_end and node is not None and departure.keep_state(node)
        pages = PrefixPages(keys, namespace_of(path.nodes), pages_of(path.slots(0, end), page), windows, departure.row)
        return Backup(job=Write(keys, pages.namespace, pages=pages, has_end=has_end), departure=departure)

    def _end_write(self, backup: Backup, num_tokens: int, num_bytes: int) -> None:
        """Ends a write that has ended on all ranks, each of which has written at least this much."""
        counts, self._backup = self.counts, None
        backup.departure.end()
        counts.written_tokens += num_tokens
        counts.written_bytes += num_bytes
        counts.written_seconds += time.monotonic() - backup.job.begun

    def remove(self, keys: Keys, namespace: str | None) -> None:
        """Removes the entries of these tokens, which must not be read again. Look-ups pause until that is done."""
        self.drain()
        if sum(len(removal.keys) for removal in self._removals) + len(keys) > MAX_REMOVED_TOKENS:
            self.engine.stop_reading()
            return
        removal = Removal(keys, namespace)
        self._removals.append(removal)
        self.engine.submit(removal)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Returns whether any job runs or waits."""
        return bool(self._prefetches or self._backup or self._offers or self._removals)

    def _waits(self) -> list[WatchedJob]:
        return [*self._prefetches, *([] if self._backup is None else [self._backup])]

    def finish(self) -> None:
        """Ends the jobs that have ended on every rank. A collective while there are any."""
        waits, removals, hung = self._waits(), self._removals, self._hung
        if not waits and not removals and not hung:
            return
        values: list[Sequence[int]] = [(w.job.state, *w.progress, w.lateness(self._has_readers)) for w in waits]
        values += [(job.state,) for job in (*removals, *hung)]
        numbers = iter(self._agree([number for of_job in values for number in of_job]))
        agreed = iter([next(numbers) for _ in of_job] for of_job in values)
        outcomes = [next(agreed) for _ in waits]
        self._removals = [job for job in removals if next(agreed)[0] == CopyState.UNDER_WAY]
        self._hung = [job for job in hung if next(agreed)[0] == CopyState.UNDER_WAY]
        for wait, outcome in zip(waits, outcomes, strict=True):
            self._finish_wait(wait, *outcome)

    def _finish_wait(self, wait: WatchedJob, state: int, progress: int, num_bytes: int, lateness: int) -> None:
        is_wanted = not isinstance(wait, Prefetch) or any(req.finish is None for req in wait.reqs)
        if lateness == OVERDUE or not is_wanted:
            wait.stop()
        if state == CopyState.UNDER_WAY:
            if lateness != GIVEN_UP:
                return
            self._hung.append(wait.job)
        if isinstance(wait, Prefetch):
            self._end_prefetch(wait, progress, num_bytes)
        elif isinstance(wait, Backup):
            self._end_write(wait, progress, num_bytes)

    def drain(self) -> None:
        """Stops all jobs. What they have done so far counts. A collective while there are any."""
        self._offers.clear()
        for wait in self._waits():
            wait.stop(at_once=True)
        self.finish()
        assert not self._prefetches and self._backup is None, "a job goes on that was stopped"

    def close(self) -> None:
        """Ends everything, removals included if the store answers, and the threads. A collective."""
        self.drain()
        until = time.monotonic() + CLOSE_S
        while self._removals and self._agree([int(time.monotonic() < until)])[0]:
            self.wait()
            self.finish()
        if self._removals:
            self.engine.stop_reading()
        self.engine.close()

    @staticmethod
    def wait() -> None:
        """Sleeps a moment."""
        time.sleep(0.0005)
