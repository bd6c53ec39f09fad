"""Cached prefixes in main memory: when they are copied there (saves) and back to the GPU (loads). Host side only.

A save begins after the step that computes what it reads. A request whose prefix is being loaded stays in the queue, and
others pass it. All ranks decide alike, because they agree in each step on which copies have ended, and how; a failed
copy is forgotten on all ranks, and its tokens are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
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
from sglang.srt.mem_cache.copies_under_way import CopiesUnderWay, Copy, CopyHandle, LoadingRequest
from sglang.srt.mem_cache.kv_table import CachedRequest, KVTable
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.radix_node import Keys, Node
from sglang.srt.mem_cache.storage.engine import StorageJobs
from sglang.srt.mem_cache.storage.tier import StorageTier
from sglang.srt.mem_cache.window_table import WindowTable
from sglang.srt.plan.host_cache import HostCachePlan
from sglang.srt.plan.pool_sizes import PoolSizes

MIN_GAIN = 64
"""Fewest tokens that a load must save a request: computing fewer costs no more than waiting."""
MAX_LOADS = 3
"""Loads that a request may wait for; after these it is computed, since others may evict what was loaded for it."""
MAX_OFFERS = 4096
"""Prefixes that wait to be saved; beyond that the oldest is given up."""
ASK_EVERY = 32
"""Steps between two collective checks whether main memory is ready, which may take a minute."""
KERNEL_LOSS = 0.15
"""Predicted share by which a load takes longer by the kernel, layer by layer, than by the copy engine in whole pages
(0.85 of a pinned copy against about 0.97)."""
SAVED_A_STEP = 2
"""Most tokens of a save per token that the step computes meanwhile. With fewer, saves would fall ever further behind a
long prompt; a save of this size takes a tenth of such a step (predicted)."""
POLL_S = 0.0005
READY_POLL_S = 0.02
"""Seconds between two steps of an idle server whose main memory is not ready yet."""


class Admission(Enum):
    """Decision on when a waiting request may enter the batch."""

    NOW = "now"
    LATER = "later"
    LONGER = "now, behind a longer prefix than was matched before"


class CopyEngine(Protocol):
    """Moves pages between the GPU's pools and those of main memory, without waiting."""

    @property
    def ready(self) -> bool:
        """Returns whether main memory can take copies."""

    @property
    def broken(self) -> bool:
        """Returns whether main memory will never be able to take copies."""

    @property
    def page_bytes(self) -> Sequence[int]:
        """Returns the bytes of a page of each pool on this rank: of tokens, of each window, and of a state."""

    @property
    def loads_layers(self) -> bool:
        """Returns whether loads can be made layer by layer. Once true it stays true."""

    def start(self) -> None:
        """Begins to prepare main memory; called after CUDA graph capture."""

    def submit(self, moves: Sequence[PageMoves], to_host: bool) -> CopyHandle:
        """Copies pages of each pool as soon as all steps launched so far have run."""

    def submit_layers(self, moves: Sequence[PageMoves]) -> CopyHandle:
        """Submits a load that the next steps wait for layer by layer."""

    def pace(self, rate: float | None) -> None:
        """Limits copies to `rate` bytes a second from now on; None: no limit."""


@dataclass(slots=True)
class HostCounts:
    """Totals of saves and loads since the start."""

    saved_tokens: int = 0
    saved_bytes: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    layered_loads: int = 0
    """Loads whose prompt began before they had ended."""
    layered_bytes: int = 0
    """Bytes of those of these loads that succeeded; the same holds for the seconds."""
    layered_seconds: float = 0.0
    dropped_tokens: int = 0
    """Tokens that were to be saved and were not: the GPU's copy was evicted first, or main memory had no room."""
    failed_copies: int = 0
    saving_seconds: float = 0.0
    loading_seconds: float = 0.0


def host_tables(sizes: PoolSizes) -> CacheTier:
    """Returns an empty tier for main memory, without requests."""
    windows = tuple(WindowTable(index, sizes) for index in range(len(sizes.windows)))
    checkpoints = CheckpointTable(1, sizes.checkpoints) if sizes.has_states else None
    allocator = TokenAllocator(sizes.tokens, sizes.page_size)
    tree = RadixCache(allocator, sizes.page_size, windows=windows, checkpoints=checkpoints)
    return CacheTier(tree, windows, checkpoints)


class HostTier:
    """The tier in main memory beside the GPU's. All it does depends only on the calls and on the results of `agree`."""

    def __init__(
        self,
        kv: KVTable,
        plan: HostCachePlan,
        engine: CopyEngine,
        agree: Callable[[Sequence[int]], list[int]],
        storage: StorageJobs | None,
    ) -> None:
        """agree: returns the minimum over the ranks of each value. storage: jobs of a store beyond main memory, if
        there is one."""
        self.plan, self.counts = plan, HostCounts()
        self.device = CacheTier(kv.tree, kv.windows, kv.checkpoints)
        self.host = host_tables(plan.sizes)
        self._engine, self._agree = engine, agree
        self.storage: StorageTier | None = None
        self.write_policy = self._policy_before = plan.write_policy
        """When prefixes are copied to main memory, now and before the store was attached."""
        if storage is not None and plan.storage is not None:
            self.attach(plan.storage, storage)
        self._ready = self._broken = False
        """Of every rank, and of any rank."""
        self._offers: dict[Node, float] = {}
        """Nodes of the GPU's tree whose prefixes are to be saved, the oldest offer first, and until when they are to be
        kept there before others; 0: they are not."""
        kv.tree.is_remembered = lambda node: node in self._offers
        self._copies = CopiesUnderWay(self.device.page_size)
        """Begun and not ended. Those without a handle wait for the step to be launched."""
        self._wrong: list[Transfer] = []
        """Loads that have failed, though steps read what they were to bring."""
        self._loads_layers = False
        self._launches = 0
        self.use_policy(plan.write_policy)
        engine.start()

    def use_policy(self, write_policy: str) -> None:
        """Copies prefixes to main memory at the times of `write_policy`, a key of `plan.host_cache.COPIED`, from now
        on."""
        self.write_policy = write_policy
        writes_back = self.write_back if write_policy == "write_back" else None
        for table in (self.device.tree, *self.device.windows, self.device.checkpoints):
            if table is not None:
                table.before_eviction = writes_back

    def attach(self, config: StorageConfig, storage: StorageJobs) -> None:
        """Writes prefixes of main memory to a store from now on. Call it only while no request waits."""
        self._policy_before = self.write_policy
        self.storage = StorageTier(config, storage, self.device, self.host, self._agree)

    def detach(self, undo: bool = False) -> None:
        """Waits for jobs under way and drops the store. undo: goes back to the write policy of before, too. Call it
        only while no request waits. A collective."""
        storage, self.storage = self.storage, None
        if storage is not None:
            storage.close()
            if undo:
                self.use_policy(self._policy_before)

    # --- what the scheduler says --------------------------------------------------------------------------------------

    def queued(self, req: LoadingRequest) -> None:
        """Notes that a request has entered the queue. A collective until main memory can take copies."""
        if self.storage is not None and self._becomes_ready():
            self.storage.look_up(req)

    def _becomes_ready(self) -> bool:
        """Returns whether main memory can take copies on every rank. A collective until it can or is known to be
        broken."""
        if not self._ready and not self._broken:
            engine = self._engine
            ready, layers, works = self._agree([int(engine.ready), int(engine.loads_layers), int(not engine.broken)])
            self._ready, self._loads_layers = bool(ready), bool(ready and layers)
            if not works:
                self._broken = True
                self._offers.clear()
        return self._ready

    def placed(self, req: LoadingRequest) -> None:
        """Notes that a request goes on from a cached prefix, which makes that prefix worth saving."""
        req.num_loads = 0
        if self.write_policy != "write_back":
            self._offer(req.node)

    def committed(self, req: CachedRequest) -> None:
        """Notes that the tokens a request has computed are in the tree."""
        if self.write_policy == "write_through":
            self._offer(req.node)

    def keep(self, node: Node, until: float) -> None:
        """Copies a prefix as soon as it is computed, and keeps it in main memory before others until `until`."""
        self._offer(node, until)

    def _offer(self, node: Node | None, until: float = 0.0) -> None:
        if node is None or not node.depth or self._broken:
            return
        self._offers[node] = max(until, self._offers.get(node, 0.0))
        if len(self._offers) > MAX_OFFERS:
            self._drop(next(iter(self._offers)))

    def _drop(self, node: Node) -> None:
        del self._offers[node]
        self.counts.dropped_tokens += node.key.size

    def admission(
        self,
        req: LoadingRequest,
        length: int,
        has_room: Callable[[Sequence[int]], bool],
        is_first: bool = False,
        others_wait: bool = True,
    ) -> Admission:
        """Decides when a request enters of which the GPU has a prefix of `length` tokens, and begins to load more of
        the prefix from main memory if that pays. has_room: whether the request could enter the next step while a load
        takes this many tokens of each window. is_first: no other request enters before it in the next step, and nothing
        else may read that step's beginning. others_wait: other requests get tokens in the next step."""
        load = self._copies.load_of(req)
        if load is not None and not load.by_layer:
            return Admission.LATER
        keys = req.cache_keys(req.matchable_len() // self.device.page_size * self.device.page_size)
        shared = [(copy, common_length(copy.transfer.keys, keys)) for copy in self._copies.loads_like(req, keys)]
        if any(copy.by_layer and common > copy.transfer.arrival.had for copy, common in shared):
            return Admission.NOW if req.may_be_stale else Admission.LATER
        minimum = length + max(MIN_GAIN, self.device.page_size) - 1
        if len(keys) <= minimum or not self._ready:
            return Admission.NOW
        if self.storage is not None and self.storage.waits(req):
            return Admission.LATER
        if any(common > minimum for _, common in shared):
            return Admission.LATER
        if req.num_loads >= MAX_LOADS:
            return Admission.NOW
        transfer = self._begin_load(req, keys, minimum, has_room)
        if transfer is None:
            return Admission.NOW
        req.num_loads += 1
        copy = Copy(transfer, req)
        self._copies.add(copy)
        may = is_first and req.may_be_stale and self._loads_layers and transfer.arrival.can_be_revoked
        if not may or not self._layers_pay(transfer, req.matchable_len() + 1 - len(transfer.keys), others_wait):
            return Admission.LATER
        transfer.arrival.adopt()
        copy.by_layer = True
        req.num_loaded = transfer.num_tokens
        self.counts.layered_loads += 1
        return Admission.LONGER

    def _begin_load(
        self, req: LoadingRequest, keys: Keys, minimum: int, has_room: Callable[[Sequence[int]], bool]
    ) -> Transfer | None:
        """Returns a load after which the request has more than `minimum` tokens of a prefix; None if there is none."""
        host, device = self.host.prefix(keys, req.namespace), self.device.prefix(keys, req.namespace)
        end = resumable_end(host, device, minimum)
        if not end:
            return None
        keys = keys[:end]
        host, device = self.host.prefix(keys, req.namespace), self.device.prefix(keys, req.namespace)
        windows = [window.max_prompt_tokens(0) for window in self.device.windows]
        return Transfer.begin(host, device, keys, req.namespace) if has_room(windows) else None

    def _layers_pay(self, transfer: Transfer, rest: int, others_wait: bool) -> bool:
        """Returns whether computing the `rest` of the prompt while layers arrive saves more time than the copy engine
        does, which moves whole pages faster than the kernel moves layers. Other requests would get their tokens only
        after the load. The answer is the same on all ranks."""
        moved = self.plan.copied_bytes(transfer.num_tokens, transfer.arrival.row > 0)
        return not others_wait and moved * KERNEL_LOSS < self.plan.hidden_bytes(rest)

    # --- loads by layers ----------------------------------------------------------------------------------------------

    @property
    def layered(self) -> list[Copy]:
        """Returns loads that have not ended and whose nodes the tree already has."""
        return [copy for copy in self._copies if copy.by_layer]

    def start_layers(self) -> list[Copy]:
        """Starts loads by layers before the step that reads them is launched. Returns all loads that a step launched
        now must wait for."""
        for copy in self.layered:
            if copy.handle is None:
                copy.handle = self._engine.submit_layers(copy.transfer.all_moves())
        return self.layered

    def finish(self, copies: Sequence[Copy]) -> None:
        """Waits until `copies` have ended on every rank. A collective."""
        while any(copy in self._copies for copy in copies):
            self.wait()
            self.end_copies()

    def wrong_nodes(self) -> set[Node]:
        """Returns the nodes of the GPU's tree that a failed load was to fill, and those computed from them."""
        return {node for transfer in self._wrong for node in transfer.arrival.adopted_nodes()}

    def forget_wrong(self) -> None:
        """Removes `wrong_nodes` from the tree once nobody uses them."""
        for transfer in self._wrong:
            transfer.arrival.revoke()
        self._wrong.clear()

    def discard(self, keys: Keys, namespace: str | None) -> None:
        """Discards the entries of these tokens, which must not be used again. Waits for copies that may read them."""
        self.drain()
        nodes = self.host.tree.follow(keys, namespace)
        if nodes:
            self.host.tree.discard(nodes[-1])
        if self.storage is not None:
            self.storage.remove(keys, namespace)

    def reset(self) -> None:
        """Forgets everything except what is stored, before the GPU's tree is emptied."""
        self.drain()
        self._offers.clear()
        self.host.tree.reset()

    def leave_device(self) -> None:
        """Copies to main memory what is to be saved, and keeps what is there, before the GPU's tree is emptied."""
        if self.write_policy == "write_back":
            self.write_back(list(self.device.tree.nodes()))
        left = -1
        while self._ready and len(self._offers) + self.counts.saved_tokens != left:
            left = len(self._offers) + self.counts.saved_tokens
            self.launch()
            self.drain()
        self.drain()
        self._offers.clear()

    # --- copies -------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Returns whether copies are under way, or prefixes wait until main memory is ready: a server without requests
        would otherwise not check that again."""
        return self._moving or (bool(self._offers) and not self._ready)

    @property
    def _moving(self) -> bool:
        return bool(self._copies) or (self.storage is not None and self.storage.busy)

    def launch(self, decoding: bool = False, num_tokens: int = 0) -> None:
        """Starts the chosen copies; call it after the launch of a step of `num_tokens` tokens. decoding: requests wait
        for tokens, so copies are paced where ranks all-reduce or experts come over the same bus."""
        self._launches += 1
        if not self._ready and (self._launches % ASK_EVERY != 1 or not self._becomes_ready()):
            return
        self._engine.pace(self.plan.paced_rate if decoding else None)
        if self._offers and all(copy.req is not None and not copy.by_layer for copy in self._copies):
            page = self.device.page_size
            self._begin_save(max(self.plan.save_tokens, SAVED_A_STEP * num_tokens // page * page))
        if self.storage is not None:
            self.storage.launch()
        self.start_layers()
        for copy in self._copies:
            if copy.handle is None and not copy.by_layer:
                copy.handle = self._engine.submit(copy.transfer.all_moves(), to_host=copy.req is None)

    def _begin_save(self, maximum: int) -> None:
        """Begins a save of at most `maximum` tokens, one at a time: loads and steps share the bus."""
        for node in list(self._offers):
            if node.parent is None:
                self._drop(node)
                continue
            until = self._offers.pop(node)
            path, saved, keys, namespace = self._both(node)
            end = min(len(keys), saved.length + maximum)
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
                self._copies.add(Copy(transfer, None, until))
                return

    def _both(self, node: Node) -> tuple[CachedPrefix, CachedPrefix, Keys, str | None]:
        """Returns the GPU's and main memory's parts of the prefix that ends with `node` of the GPU's tree, its keys and
        its namespace."""
        path = CachedPrefix(self.device, self.device.tree.path(node)[::-1])
        keys = np.concatenate([n.key for n in path.nodes])
        namespace = namespace_of(path.nodes)
        return path, self.host.prefix(keys, namespace), keys, namespace

    def write_back(self, nodes: Sequence[Node]) -> None:
        """Copies the prefixes that end with these nodes of the GPU's tree, which are about to be evicted in part, and
        waits for the copies. A collective if main memory lacks any of them."""
        while nodes and self._ready:
            begun, later = list[Copy](), list[Node]()
            copied = set[tuple[Node, str | None, bytes]]()
            """For each copy of tokens that main memory lacks: where its own part ends, and the first page behind it."""
            for node in nodes:
                path, saved, keys, namespace = self._both(node)
                next_page = keys[saved.length : saved.length + self.device.page_size].tobytes()
                start = saved.last, namespace, next_page
                if start in copied:
                    later.append(node)  # its beginning is being copied
                elif (copy := self._written_back(path, saved, keys, namespace)) is not None:
                    begun.append(copy)
                    if next_page:
                        copied.add(start)
            self._engine.pace(None)
            for copy in begun:
                copy.handle = self._engine.submit(copy.transfer.all_moves(), to_host=True)
            while unended := [copy for copy in begun if copy in self._copies]:
                time.sleep(POLL_S)
                self._finish(unended)
            nodes = later

    def _written_back(self, path: CachedPrefix, saved: CachedPrefix, keys: Keys, namespace: str | None) -> Copy | None:
        """Returns a transfer of what main memory lacks; None if it lacks nothing or has no room."""
        transfer = Transfer.begin(path, saved, keys, namespace)
        if transfer is None:
            self.counts.dropped_tokens += len(keys) - saved.length
            return None
        if transfer.is_empty:
            transfer.end(False)
            return None
        copy = Copy(transfer, None)
        self._copies.add(copy)
        return copy

    def _keep_in_host(self, node: Node, until: float) -> None:
        if until and node.depth:
            self.host.tree.keep(node, until)

    def end_copies(self) -> None:
        """Ends the copies that have ended on every rank. A collective while there are any."""
        if self.storage is not None:
            self.storage.finish()
        self._finish([copy for copy in self._copies if copy.handle is not None])

    def _finish(self, started: Sequence[Copy]) -> None:
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
        num_tokens, num_bytes = transfer.num_tokens, self._num_bytes(transfer)
        if copy.by_layer and not ok:
            transfer.departure.end()
            self._wrong.append(transfer)
        else:
            transfer.end(ok)
        if not ok:
            counts.failed_copies += 1
            if req is not None:
                req.num_loads = MAX_LOADS
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
            counts.layered_bytes += num_bytes * copy.by_layer
            counts.layered_seconds += seconds * copy.by_layer

    def _num_bytes(self, transfer: Transfer) -> int:
        return sum(len(m) * size for m, size in zip(transfer.all_moves(), self._engine.page_bytes, strict=True))

    def drain(self, loads: bool = True) -> None:
        """Waits for all copies, or for saves alone; gives up those that were not started."""
        if self.storage is not None and loads:
            self.storage.drain()
        self.start_layers()
        for copy in [copy for copy in self._copies if copy.handle is None and (loads or copy.req is None)]:
            self._copies.remove(copy)
            copy.transfer.end(False)
        while any(loads or copy.req is None for copy in self._copies):
            self.wait()
            self.end_copies()

    def wait(self) -> None:
        """Sleeps a moment if it is busy."""
        if self.busy:
            time.sleep(POLL_S if self._moving else READY_POLL_S)

    # --- sizes --------------------------------------------------------------------------------------------------------

    def loading_size(self) -> int:
        """Returns the tokens of the GPU's pool that loads are writing."""
        return sum(copy.transfer.num_tokens for copy in self._copies if copy.req is not None and not copy.by_layer)

    def usage(self) -> dict[str, object]:
        """Returns the use of main memory's pools; tokens missing from the sum are being written."""
        tree = self.host.tree
        usage: dict[str, object] = {
            "ready": self._ready,
            "free": tree.allocator.available_size(),
            "cached": tree.total_size(),
            "total": tree.allocator.size,
            "windows": [{"window": window.window, **window.usage()} for window in self.host.windows],
        }
        if self.host.checkpoints is not None:
            usage["checkpoints"] = self.host.checkpoints.usage()
        return usage

    def check(self) -> None:
        """Raises AssertionError if the tier is inconsistent. Call it while no copy is under way. Slow: for tests."""
        assert not self._copies, "copies are under way"
        assert not self._wrong, "failed loads are in the tree"
        self.host.tree.check()
        nodes = list(self.host.tree.nodes())
        for window in self.host.windows:
            window.check(nodes, {})
        if self.host.checkpoints is not None:
            self.host.checkpoints.check(nodes)
        tree = self.host.tree
        assert tree.protected_size() == 0, "prefixes in main memory are locked"
        assert tree.allocator.available_size() + tree.total_size() == tree.allocator.size, "host slots are lost"
