"""Cached prefixes in main memory: when they are copied there (saves) and back to the GPU (loads). Host side only.

A save begins behind the step that computes what it reads. A request whose prefix is being loaded stays in the queue;
others go ahead. Ranks decide alike, because they agree in each step on which copies have ended, and how; a failed copy
is forgotten on all ranks, and its tokens are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from sglang.srt.configs.storage_backend import StorageConfig
from sglang.srt.mem_cache.allocator import TokenAllocator
from sglang.srt.mem_cache.cache_tier import (
    CachedPrefix,
    CacheTier,
    CopyState,
    PageMoves,
    Transfer,
    common_length,
    namespace_of,
    resumable_end,
)
from sglang.srt.mem_cache.checkpoint_table import CheckpointTable
from sglang.srt.mem_cache.kv_table import CachedRequest, KVTable
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.radix_node import Keys, Node
from sglang.srt.mem_cache.storage.engine import StorageEngine
from sglang.srt.mem_cache.storage.tier import StorageTier, StoredRequest
from sglang.srt.mem_cache.window_table import WindowTable
from sglang.srt.plan.host_cache import HostCachePlan
from sglang.srt.plan.pool_sizes import PoolSizes

LEAST_GAIN = 64
"""Fewest tokens that a load must spare a request: below that computing them costs no more than waiting."""
MOST_LOADS = 3
"""Loads that a request may wait for before it is computed: others may take the memory of what was loaded for it."""
MOST_OFFERS = 4096
"""Prefixes that wait to be saved; beyond that the oldest is given up."""
POLL_S = 0.0005


class CopyHandle(Protocol):
    @property
    def state(self) -> CopyState: ...


class CopyEngine(Protocol):
    """Moves pages between the GPU's pools and those of main memory, without waiting."""

    @property
    def ready(self) -> bool:
        """Returns whether main memory can take copies."""

    @property
    def page_bytes(self) -> Sequence[int]:
        """Bytes of a page of each pool, on this rank: of tokens, of each window, and of a state."""

    def submit(self, moves: Sequence[PageMoves], to_host: bool) -> CopyHandle:
        """Copies pages of each pool as soon as all steps launched so far have run."""


class LoadingRequest(CachedRequest, StoredRequest, Protocol):
    num_loads: int
    """Loads that were begun for it since it entered the queue."""
    num_loaded: int
    """Tokens that the last of them brought."""


@dataclass(slots=True, eq=False)
class Copy:
    """A transfer that was begun. `req`: of a load, the request that waits for it."""

    transfer: Transfer
    req: LoadingRequest | None
    keep_until: float = 0.0
    """Of a save, as of its offer."""
    begun: float = field(default_factory=time.monotonic)
    handle: CopyHandle | None = None


@dataclass(slots=True)
class HostCounts:
    """Totals since the start."""

    saved_tokens: int = 0
    saved_bytes: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    dropped_tokens: int = 0
    """Tokens that were to be saved and were not: the GPU's copy was evicted first, or main memory had no room."""
    failed_copies: int = 0
    saving_seconds: float = 0.0
    loading_seconds: float = 0.0


def host_tables(sizes: PoolSizes) -> CacheTier:
    """An empty tier without requests."""
    windows = tuple(WindowTable(index, sizes) for index in range(len(sizes.windows)))
    checkpoints = CheckpointTable(1, sizes.checkpoints) if sizes.has_states else None
    allocator = TokenAllocator(sizes.tokens, sizes.page_size)
    tree = RadixCache(allocator, sizes.page_size, windows=windows, checkpoints=checkpoints)
    return CacheTier(tree, windows, checkpoints)


class HostTier:
    """The tier in main memory beside the GPU's. Everything it does depends on calls and on what `agree` returns."""

    def __init__(
        self,
        kv: KVTable,
        plan: HostCachePlan,
        engine: CopyEngine,
        agree: Callable[[Sequence[int]], list[int]],
        storage: StorageEngine | None = None,
    ) -> None:
        """agree: the least of the ranks' values at each position. storage: of a store beyond main memory."""
        self.plan, self.counts = plan, HostCounts()
        self.write_through = plan.write_through
        """Whether what is computed is copied at once, and not only when it is used again."""
        self.device = CacheTier(kv.tree, kv.windows, kv.checkpoints)
        self.host = host_tables(plan.sizes)
        self._engine, self._agree = engine, agree
        self.storage: StorageTier | None = None
        if storage is not None and plan.storage is not None:
            self.attach(plan.storage, storage)
        self._ready = False
        self._offers: dict[Node, float] = {}
        """Nodes of the GPU's tree whose prefixes are to be saved, the oldest offer first, and until when they are to be
        kept there before others; 0: they are not."""
        self._copies: list[Copy] = []
        """Begun and not ended. Those without a handle wait for the step to be launched."""

    def attach(self, config: StorageConfig, storage: StorageEngine) -> None:
        """Keeps prefixes of main memory in a store from now on. No request waits."""
        self.storage = StorageTier(config, storage, self.device, self.host, self._agree)

    def detach(self) -> None:
        """Waits for what is under way, and goes on without the store. No request waits. A collective."""
        storage, self.storage = self.storage, None
        if storage is not None:
            storage.close()

    # --- what the scheduler says --------------------------------------------------------------------------------------

    def queued(self, req: LoadingRequest) -> None:
        """A request has entered the queue. A collective until main memory can take copies."""
        if self.storage is not None and self._becomes_ready():
            self.storage.look_up(req)

    def _becomes_ready(self) -> bool:
        """Returns whether main memory can take copies on every rank. A collective until it can."""
        if not self._ready:
            self._ready = bool(self._agree([int(self._engine.ready)])[0])
        return self._ready

    def placed(self, req: LoadingRequest) -> None:
        """A request goes on from a cached prefix, which that proves useful."""
        req.num_loads = 0
        self._offer(req.node)

    def committed(self, req: CachedRequest) -> None:
        """What a request has computed is in the tree."""
        if self.write_through:
            self._offer(req.node)

    def keep(self, node: Node, until: float) -> None:
        """A prefix is copied as soon as it is computed, and stays in main memory before others."""
        self._offer(node, until)

    def _offer(self, node: Node | None, until: float = 0.0) -> None:
        if node is None or not node.depth:
            return
        self._offers[node] = max(until, self._offers.get(node, 0.0))
        if len(self._offers) > MOST_OFFERS:
            self._drop(next(iter(self._offers)))

    def _drop(self, node: Node) -> None:
        del self._offers[node]
        self.counts.dropped_tokens += node.key.size

    def waits(self, req: LoadingRequest, length: int, has_room: Callable[[Sequence[int]], bool]) -> bool:
        """Returns whether a request, of which the GPU has a prefix of `length` tokens, waits for more of it from main
        memory. has_room: whether it could enter the next step, while a load takes so many tokens of each window."""
        keys = req.cache_keys(req.matchable_len() // self.device.page_size * self.device.page_size)
        least = length + max(LEAST_GAIN, self.device.page_size) - 1
        if len(keys) <= least or not self._ready:
            return False
        if self.storage is not None and self.storage.waits(req):
            return True
        if any(
            copy.transfer.namespace == req.namespace and common_length(copy.transfer.keys, keys) > least
            for copy in self._copies
            if copy.req is not None
        ):
            return True
        if req.num_loads >= MOST_LOADS:
            return False
        host, device = self.host.prefix(keys, req.namespace), self.device.prefix(keys, req.namespace)
        end = resumable_end(host, device, least)
        if not end:
            return False
        keys = keys[:end]
        host, device = self.host.prefix(keys, req.namespace), self.device.prefix(keys, req.namespace)
        windows = [window.most_of_prompt(0) for window in self.device.windows]
        if not has_room(windows):
            return False
        transfer = Transfer.begin(host, device, keys, req.namespace)
        if transfer is None:
            return False
        req.num_loads += 1
        self._copies.append(Copy(transfer, req))
        return True

    def discard(self, keys: Keys, namespace: str | None) -> None:
        """These tokens' entries must not be used again. Waits for copies that may read them."""
        self.drain()
        nodes = self.host.tree.follow(keys, namespace)
        if nodes:
            self.host.tree.discard(nodes[-1])
        if self.storage is not None:
            self.storage.remove(keys, namespace)

    def reset(self) -> None:
        """Forget everything but what is stored, before the GPU's tree is emptied."""
        self.drain()
        self._offers.clear()
        self.host.tree.reset()

    # --- copies -------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Returns whether copies are under way."""
        return bool(self._copies) or (self.storage is not None and self.storage.busy)

    def launch(self) -> None:
        """Starts the copies that were chosen; behind the launch of a step."""
        if not self._becomes_ready():
            return
        if self._offers and all(copy.req is not None for copy in self._copies):
            self._begin_save()
        if self.storage is not None:
            self.storage.launch()
        for copy in self._copies:
            if copy.handle is None:
                copy.handle = self._engine.submit(copy.transfer.all_moves(), to_host=copy.req is None)

    def _begin_save(self) -> None:
        """One at a time, of at most `save_tokens`: loads and steps share the link."""
        for node in list(self._offers):
            if node.parent is None:
                self._drop(node)
                continue
            until = self._offers.pop(node)
            path = CachedPrefix(self.device, self.device.tree.path(node)[::-1])
            keys = np.concatenate([n.key for n in path.nodes])
            namespace = namespace_of(path.nodes)
            saved = self.host.prefix(keys, namespace)
            end = min(len(keys), saved.length + self.plan.save_tokens)
            if self.device.checkpoints is not None and node.checkpoint and saved.state_at(node.depth) is None:
                if not self.device.checkpoints.is_readable(node):
                    self._offers[node] = until  # the next step writes it
                    continue
            transfer = Transfer.begin(path, saved, keys[:end], namespace)
            if transfer is None:
                self.counts.dropped_tokens += end - saved.length
            elif transfer.is_empty:
                transfer.end(False)
                self._keep_in_host(saved.last, until)
            else:
                if end < len(keys):
                    self._offers = {node: until, **self._offers}
                self._copies.append(Copy(transfer, None, until))
                return

    def _keep_in_host(self, node: Node, until: float) -> None:
        if until and node.depth:
            self.host.tree.keep(node, until)

    def settle(self) -> None:
        """Ends the copies that have ended on every rank. A collective while there are any."""
        if self.storage is not None:
            self.storage.settle()
        started = [copy for copy in self._copies if copy.handle is not None]
        if not started:
            return
        states = self._agree([copy.handle.state for copy in started if copy.handle is not None])
        for copy, state in zip(started, states, strict=True):
            if state != CopyState.UNDER_WAY:
                self._copies.remove(copy)
                self._end(copy, state == CopyState.DONE)

    def _end(self, copy: Copy, ok: bool) -> None:
        transfer, counts, req = copy.transfer, self.counts, copy.req
        seconds = time.monotonic() - copy.begun
        num_tokens = transfer.num_tokens
        num_bytes = sum(len(m) * size for m, size in zip(transfer.all_moves(), self._engine.page_bytes, strict=True))
        transfer.end(ok)
        if not ok:
            counts.failed_copies += 1
            if req is not None:
                req.num_loads = MOST_LOADS
        elif req is None:
            counts.saved_tokens += num_tokens
            counts.saved_bytes += num_bytes
            counts.saving_seconds += seconds
            self._keep_in_host(transfer.arrival.node, copy.keep_until)
            if self.storage is not None:
                self.storage.offer(transfer.arrival.node)
        else:
            req.num_loaded = num_tokens
            counts.loaded_tokens += num_tokens
            counts.loaded_bytes += num_bytes
            counts.loading_seconds += seconds

    def drain(self, loads: bool = True) -> None:
        """Waits for all copies, or for saves alone; those that were not started are given up."""
        if self.storage is not None and loads:
            self.storage.drain()
        for copy in [copy for copy in self._copies if copy.handle is None and (loads or copy.req is None)]:
            self._copies.remove(copy)
            copy.transfer.end(False)
        while any(loads or copy.req is None for copy in self._copies):
            self.wait()
            self.settle()

    def wait(self) -> None:
        """Sleeps a moment while copies are under way."""
        if self.busy:
            time.sleep(POLL_S)

    # --- sizes --------------------------------------------------------------------------------------------------------

    def loading_size(self) -> int:
        """Tokens of the GPU's pool that loads write at the moment."""
        return sum(copy.transfer.num_tokens for copy in self._copies if copy.req is not None)

    def usage(self) -> dict[str, object]:
        """The use of main memory's pools; what is missing in a sum is being written."""
        tree = self.host.tree
        usage: dict[str, object] = {
            "free": tree.allocator.available_size(),
            "cached": tree.total_size(),
            "total": tree.allocator.size,
            "windows": [{"window": window.window, **window.usage()} for window in self.host.windows],
        }
        if self.host.checkpoints is not None:
            usage["checkpoints"] = self.host.checkpoints.usage()
        return usage

    def check(self) -> None:
        """Raises AssertionError, with what is wrong, while no copy is under way. Slow: for tests."""
        assert not self._copies, "copies are under way"
        self.host.tree.check()
        nodes = list(self.host.tree.nodes())
        for window in self.host.windows:
            window.check(nodes, {})
        if self.host.checkpoints is not None:
            self.host.checkpoints.check(nodes)
        tree = self.host.tree
        assert tree.protected_size() == 0, "prefixes in main memory are locked"
        assert tree.allocator.available_size() + tree.total_size() == tree.allocator.size, "host slots are lost"
