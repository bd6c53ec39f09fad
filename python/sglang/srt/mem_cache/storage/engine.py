"""Threads that move pages between main memory and a store, so that the scheduler never waits for the store.

A job is a look-up, a read, a write or a removal of one prefix. Failures of the store and invalid entries count as
misses; they never reach a request.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar

import numpy as np
import torch

from sglang.srt.mem_cache.cache_tier import CopyState, Pages
from sglang.srt.mem_cache.radix_node import Keys
from sglang.srt.mem_cache.storage.entry import HEADER_BYTES, new_entry, problem, seal
from sglang.srt.mem_cache.storage.prefix_names import PrefixNames, block_tokens
from sglang.srt.mem_cache.storage.store import PrefixStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

READERS = 2
MAX_ENDS_ASKED = 1 << 14
"""Ends of prefixes for which one look-up asks the store, about as many as the blocks of a million tokens."""
RETRY_S = 60.0
"""Seconds for which a store that has failed is not asked again, for reads and writes separately."""


class HostPool(Protocol):
    """One pool of main memory."""

    page_bytes: int
    host: torch.Tensor
    """[pages, page_bytes] uint8: row i is page i + 1."""


@dataclass(frozen=True, slots=True)
class PrefixPages:
    """Pages of main memory that hold a prefix of whole pages; 0 stands for no page."""

    keys: Keys
    namespace: str | None
    tokens: Pages
    """[pages of the prefix]"""
    windows: Sequence[Pages] = ()
    """For each window, the pages from `WindowTable.first_kept` to the end."""
    state: int = 0


@dataclass(slots=True, eq=False)
class StorageJob:
    """A job for a thread. `stopping`: it ends as soon as it can and no longer touches main memory, even while a call of
    the store still blocks it."""

    keys: Keys
    namespace: str | None
    state: CopyState = CopyState.UNDER_WAY
    stopping: bool = False
    has_thread: bool = False
    begun: float = field(default_factory=time.monotonic)
    moving: threading.Lock = field(default_factory=threading.Lock)
    """Held while pages of main memory are read or written, and to change the fields above."""

    def enter(self) -> bool:
        """Marks the job as taken by a thread. Returns False if it was stopped before."""
        with self.moving:
            self.has_thread = not self.stopping
            return self.has_thread

    def stop(self) -> None:
        """Stops the job: after this returns, its pages may be reused. A job that no thread has taken fails at once."""
        with self.moving:
            self.stopping = True
            if not self.has_thread and self.state is CopyState.UNDER_WAY:
                self.state = CopyState.FAILED


@dataclass(slots=True, eq=False)
class Lookup(StorageJob):
    """Finds how far the store has a prefix whose first `start` tokens (whole blocks) are in main memory."""

    start: int = 0
    least: int = 0
    """Shorter results and results of this length do not count."""
    end: int = 0
    """The result: the number of tokens from which a request can go on; 0: none."""


@dataclass(slots=True, eq=False)
class Read(StorageJob):
    """Brings a prefix's pages other than 0 to main memory, from the token `start` on."""

    pages: PrefixPages | None = None
    start: int = 0
    """Tokens that main memory has."""
    end: int = 0
    """The result: leading tokens that are in main memory now, if more than `start`."""
    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class Write(StorageJob):
    """Writes a prefix's pages of main memory to the store."""

    pages: PrefixPages | None = None
    has_end: bool = False
    """Requests can go on from the end of the prefix, not only from the end of a block."""
    num_tokens: int = 0
    """Results: the tokens and bytes that the store did not have, whichever rank wrote them."""
    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class Removal(StorageJob):
    """Deletes every entry of a prefix."""


class StorageJobs(Protocol):
    """The interface through which a tier uses a store: jobs that are submitted and end some time later."""

    block: int
    """Tokens of an entry."""
    has_ends: bool
    """A request cannot go on from the end of every block, because there are windows or states."""
    num_failures: int
    """Failed calls of the store on this rank, and invalid entries."""
    num_corrupt: int

    @property
    def writes(self) -> bool:
        """Returns whether the store is written; for a while after a failed write it is not."""

    def submit(self, job: StorageJob) -> None:
        """Queues a job; its fields show the progress."""

    def stop_reading(self) -> None:
        """Stops reading the store for good, because it has entries that must not be used."""

    def close(self) -> None:
        """Ends all jobs and the threads."""


class StoreFailed(Exception):
    """Raised when a call of the store has failed."""


class StorageEngine:
    """Runs jobs in threads. Implements StorageJobs. Reading jobs have threads of their own, so that they do not wait
    for writing ones."""

    def __init__(
        self,
        store: PrefixStore,
        pools: Sequence[HostPool],
        fingerprint: bytes,
        page_size: int,
        num_windows: int,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """pools: tokens, each window, and states if there are any. share: number of this rank and count of the ranks
        that have equal caches and get the same jobs: each writes a part of the entries."""
        self.store, self.pools, self.share = store, list(pools), share
        self._key: bytes = getattr(store, "key", b"")
        self.fingerprint = hmac.digest(self._key, fingerprint, "sha256") if self._key else fingerprint
        """Entries under another key have other names: two users of a store do not remove each other's."""
        self.page_size, self.num_windows = page_size, num_windows
        self.block = block_tokens(page_size)
        self.has_ends = len(self.pools) > 1
        self.num_failures = self.num_corrupt = 0
        self._off_until = {"read": 0.0, "written": 0.0}
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        """Of the warnings and the counts."""
        self._reads: SimpleQueue[StorageJob | None] = SimpleQueue()
        self._writes: SimpleQueue[StorageJob | None] = SimpleQueue()
        """None ends a thread."""
        self._num_threads = READERS + 1
        for queue, count in ((self._reads, READERS), (self._writes, 1)):
            for _ in range(count):
                threading.Thread(target=self._work, args=(queue,), name="cache-storage", daemon=True).start()

    @property
    def writes(self) -> bool:
        """Returns whether entries are written: not for a while after writes have failed."""
        return time.monotonic() >= self._off_until["written"]

    def submit(self, job: StorageJob) -> None:
        """Queues a job. The tier bounds the queues: at most MAX_PREFETCHES look-ups and reads, one write and
        MAX_REMOVED_TOKENS of removals are under way."""
        (self._reads if isinstance(job, Lookup | Read) else self._writes).put(job)

    def close(self) -> None:
        """Ends the threads after the submitted jobs; the last one closes the store."""
        for queue, count in ((self._reads, READERS), (self._writes, 1)):
            for _ in range(count):
                queue.put(None)

    @torch.inference_mode()
    def _work(self, queue: SimpleQueue[StorageJob | None]) -> None:
        while (job := queue.get()) is not None:
            if not job.enter():
                continue
            try:
                self.run(job)
                job.state = CopyState.DONE
            except StoreFailed:
                self._failed(job)
            except Exception:  # a failing store must not stop the server: the tokens are computed instead
                logger.exception("Cached prefixes could not be moved to or from the store")
                self._failed(job)
        with self._lock:
            self._num_threads -= 1
            is_last = not self._num_threads
        if is_last:
            self._close_store()

    def _close_store(self) -> None:
        close = getattr(self.store, "close", None)
        try:
            if close is not None:
                close()
        except Exception:  # a store may raise anything
            logger.warning("The store of cached prefixes could not be closed", exc_info=True)

    def _failed(self, job: StorageJob) -> None:
        if isinstance(job, Removal):
            self.stop_reading()
        job.state = CopyState.FAILED

    def stop_reading(self) -> None:
        self._off_until["read"] = float("inf")
        self._warn("removal", "Entries that must not be used cannot be removed: the store is not read any more")

    def run(self, job: StorageJob) -> None:
        """Does a job and sets its results."""
        names = PrefixNames(self.fingerprint, job.keys, job.namespace, self.block)
        if isinstance(job, Lookup):
            self._look_up(job, names)
        elif isinstance(job, Read):
            self._read(job, names)
        elif isinstance(job, Write):
            self._write(job, names)
        elif isinstance(job, Removal):
            self._remove(job, names)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def _look_up(self, job: Lookup, names: PrefixNames) -> None:
        first, count = job.start // self.block, len(job.keys) // self.block
        there = self._ask("read", partial(self.store.contains, [names.block(i) for i in range(first, count)]))
        run = first + next((i for i, has in enumerate(there) if not has), len(there))
        if self.has_ends:
            job.end = self._deepest_end(job, names, run)
        elif run * self.block > job.least:
            job.end = run * self.block

    def _deepest_end(self, job: Lookup, names: PrefixNames, run: int) -> int:
        """Returns the longest stored prefix from which a request can go on. Searches from the back, where most ends
        are, and asks for at most MAX_ENDS_ASKED: a prompt that leaves a long stored one may have none."""
        num_asked = 0
        for index in range(run, -1, -1):
            last = min((index + 1) * self.block - self.page_size, len(job.keys))
            depths = [d for d in range(index * self.block, last + 1, self.page_size) if d > job.least]
            num_asked += len(depths)
            if not depths or job.stopping or num_asked > MAX_ENDS_ASKED:
                return 0
            names_of_ends = [names.end(depth) for depth in depths]
            there = self._ask("read", partial(self.store.contains, names_of_ends))
            if any(there):
                return max(depth for depth, has in zip(depths, there, strict=True) if has)
        return 0

    def _read(self, job: Read, names: PrefixNames) -> None:
        """Reads block by block. After a failure the whole blocks read so far count."""
        assert job.pages is not None
        length = len(job.keys)
        for index in range(job.start // self.block, length // self.block):
            if job.stopping or not self._fetch(names.block(index), self._parts_of_block(job.pages, index), job):
                return
            end = (index + 1) * self.block
            job.end = end if end < length or not self.has_ends else job.end
        if self.has_ends and not job.stopping and self._fetch(names.end(length), self._parts_of_end(job.pages), job):
            job.end = length

    def _write(self, job: Write, names: PrefixNames) -> None:
        assert job.pages is not None
        count = len(job.keys) // self.block
        entries = [names.block(i) for i in range(count)]
        there = self._ask("written", partial(self.store.contains, entries))
        for index in (i for i, has in enumerate(there) if not has):
            if job.stopping:
                return
            if self._put(index, entries[index], self._parts_of_block(job.pages, index), job):
                job.num_tokens += self.block
        if job.has_end:
            name = names.end(len(job.keys))
            if not job.stopping and not self._ask("written", partial(self.store.contains, [name]))[0]:
                if self._put(count, name, self._parts_of_end(job.pages), job):
                    job.num_tokens += len(job.keys) - count * self.block
        if job.num_bytes:  # the store should keep the beginning of a chain longest
            self._ask("written", partial(self.store.contains, entries))

    def _remove(self, job: Removal, names: PrefixNames) -> None:
        blocks = [names.block(i) for i in range(len(job.keys) // self.block)]
        ends = [names.end(d) for d in range(self.page_size, len(job.keys) + 1, self.page_size)] if self.has_ends else []
        for name in (*blocks, *ends):
            self.store.delete(name)

    # --- entries ------------------------------------------------------------------------------------------------------

    def _parts_of_block(self, pages: PrefixPages, index: int) -> list[Pages]:
        """Returns the block's pages of each pool."""
        count = self.block // self.page_size
        return [pages.tokens[index * count : (index + 1) * count]]

    def _parts_of_end(self, pages: PrefixPages) -> list[Pages]:
        first = len(pages.keys) // self.block * (self.block // self.page_size)
        parts = [pages.tokens[first:], *pages.windows]
        if len(self.pools) > 1 + self.num_windows:
            parts.append(np.array([pages.state], np.int64))
        return parts

    def _size(self, parts: Sequence[Pages]) -> int:
        return sum(len(part) * pool.page_bytes for part, pool in zip(parts, self.pools, strict=False))

    def _put(self, index: int, name: str, parts: Sequence[Pages], job: Write) -> bool:
        """Writes entry `index` of a prefix, unless another rank does. Returns whether it is written by any; a stopped
        job writes nothing."""
        rank, count = self.share
        if index % count != rank:
            job.num_bytes += HEADER_BYTES + self._size(parts)
            return True
        entry = new_entry(self._size(parts))
        content = torch.frombuffer(entry, dtype=torch.uint8)[HEADER_BYTES:]
        with job.moving:
            if job.stopping:
                return False
            for part, pool in zip(parts, self.pools, strict=False):
                if not len(part):
                    continue
                assert part.all(), "a page that is not in main memory cannot be stored"
                size = len(part) * pool.page_bytes
                torch.index_select(pool.host, 0, torch.from_numpy(part - 1), out=content[:size].view(len(part), -1))
                content = content[size:]
        seal(name, entry, self._key)
        self._ask("written", partial(self.store.write, name, entry))
        job.num_bytes += len(entry)
        return True

    def _fetch(self, name: str, parts: Sequence[Pages], job: Read) -> bool:
        """Returns whether the entry existed and was valid; its pages are then in main memory, unless the job has been
        stopped."""
        data = self._ask("read", partial(self.store.read, name))
        if data is None:
            return False
        entry = data if isinstance(data, bytearray) else bytearray(data)
        size = self._size(parts)
        what = problem(name, entry, size, self._key)
        if what is not None:
            self.num_corrupt += 1
            self._warn("corrupt", f"An entry of the store of cached prefixes {what}, and is removed: {name}")
            self._ask("written", partial(self.store.delete, name))
            return False
        content = torch.frombuffer(entry, dtype=torch.uint8)[HEADER_BYTES:]
        with job.moving:
            if job.stopping:
                return False
            for part, pool in zip(parts, self.pools, strict=False):
                wanted = np.flatnonzero(part)
                rows = content[: len(part) * pool.page_bytes].view(len(part), pool.page_bytes)
                content = content[len(part) * pool.page_bytes :]
                if len(wanted):
                    pool.host.index_copy_(0, torch.from_numpy(part[wanted] - 1), rows[torch.from_numpy(wanted)])
        job.num_bytes += len(entry)
        return True

    # --- failures -----------------------------------------------------------------------------------------------------

    def _ask(self, purpose: str, call: Callable[[], T]) -> T:
        """Calls the store, unless such a call failed lately. Raises StoreFailed."""
        if time.monotonic() < self._off_until[purpose]:
            raise StoreFailed
        try:
            return call()
        except Exception as error:  # a store may raise anything
            self.num_failures += 1
            self._off_until[purpose] = time.monotonic() + RETRY_S
            self._warn(
                purpose,
                f"The store of cached prefixes cannot be {purpose} ({error!r}); it is tried again every {RETRY_S:g} s,"
                " without further warnings",
            )
            raise StoreFailed from error

    def _warn(self, kind: str, text: str) -> None:
        """Logs each kind of warning once."""
        with self._lock:
            is_new = kind not in self._warned
            self._warned.add(kind)
        if is_new:
            logger.warning("%s", text)
