"""10,000 random operations over the caches of models that are described here, with every group accounted after each."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest

from sglang.srt.mem_cache.kv_table import KVTable
from sglang.srt.mem_cache.memory_pool import CachePools
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.radix_node import Node
from sglang.srt.plan.cache_spec import PER_REQUEST, CacheSpec, CacheTensor, Window, key_value_cache, latent_cache
from sglang.srt.plan.caches import CacheGroup, group_caches
from sglang.srt.plan.pool_sizes import PoolSizes, plan_pools, sized_cost

OPERATIONS = 1200
CONTEXT, REQUESTS, CHUNK = 120, 5, 16

LATENT = latent_cache("latent", 12, 8, "bfloat16")
INDEX = CacheSpec("index", (CacheTensor("k", (1, 4), "fp8_e4m3"), CacheTensor("scale", (1,), "float32")))
FULL = key_value_cache("kv", 2, 8, 8, "bfloat16")
WINDOW = key_value_cache("kv", 2, 4, 4, "bfloat16", Window(13))
CHUNKS = key_value_cache("kv", 2, 4, 4, "bfloat16", Window(14, chunked=True))
STATE = CacheSpec("state", (CacheTensor("state", (2, 4, 4), "float32"),), lifetime=PER_REQUEST)


def compressed(rate: int) -> tuple[CacheSpec, ...]:
    """A window, entries of several tokens with an indexer beside them, and tokens that are not a whole entry yet."""
    window = latent_cache("kv", 8, 8, "bfloat16", lifetime=Window(9))
    entries = latent_cache("compressed", 8, 8, "bfloat16", Fraction(1, rate))
    index = CacheSpec("index", (CacheTensor("k", (1, 4), "bfloat16"),), Fraction(1, rate))
    pending = CacheSpec("pending", (CacheTensor("values", (rate, 8), "float32"),), lifetime=PER_REQUEST)
    return (window, entries, index, pending)


MODELS: dict[str, tuple[list[tuple[CacheSpec, ...]], int]] = {
    "MLA": ([(LATENT,)] * 3, 1),
    "MLA + indexer": ([(LATENT, INDEX), (LATENT,)], 4),
    "window + full": ([(WINDOW,), (FULL,)] * 2, 4),
    "chunks + full": ([(CHUNKS,), (FULL,)] * 2, 4),
    "gated delta + full": ([(STATE,), (STATE,), (FULL,)], 1),
    "V4": ([compressed(4), compressed(16)[:2] + compressed(16)[3:]], 16),
}


@dataclass(eq=False)
class Sequence:
    """Implements CachedRequest."""

    tokens: list[int]
    namespace: str | None = None
    slot: int = 0
    kv_len: int = 0
    reserved_len: int = 0
    state_is_exact: bool = True
    num_cached: int = 0
    node: Node | None = None
    state: int = 0

    def cache_keys(self, length: int) -> np.ndarray:
        return np.array(self.tokens[:length], np.int32)

    def matchable_len(self) -> int:
        return len(self.tokens) - 1


class Machine:
    """What a scheduler does to the table. States are checksums of all tokens so far, in rows as the device has them."""

    def __init__(self, groups: tuple[CacheGroup, ...], page: int, seed: int) -> None:
        self.random = random.Random(seed)
        cost = sized_cost(groups, page, REQUESTS, CONTEXT, CHUNK)
        memory = cost.pool_bytes(24 * page if page > 1 else 300)
        pools = plan_pools(cost, memory, page, max_tokens=1 << 20)
        has_states = cost.state_bytes > 0
        checkpoints = 4 if has_states else 0
        self.sizes = PoolSizes(pools.tokens - page, page, REQUESTS, CONTEXT, pools.windows, has_states, checkpoints)
        allocated = CachePools(groups, self.sizes, "cpu").size_bytes()
        assert allocated <= pools.token_bytes + pools.window_bytes + cost.state_bytes * self.sizes.state_rows
        self.kv = KVTable(self.sizes)
        self.rows = np.full(self.sizes.state_rows, -1, np.int64)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.hits = self.evictions = self.now = 0

    def prompt(self) -> list[int]:
        start = [self.random.randrange(3)] * self.random.randrange(1, 50)
        return start + [self.random.randrange(4) for _ in range(self.random.randrange(1, 40))]

    def room_for(self, seq: Sequence, count: int) -> bool:
        page = self.sizes.page_size
        new = (-(-(seq.kv_len + count) // page) + -seq.kv_len // page) * page
        tables = (self.kv, *self.kv.windows)
        return all(table.available_size() >= new for table in tables) and seq.kv_len + count <= CONTEXT

    def compute(self, seq: Sequence, count: int, decodes: bool) -> None:
        """A step with one request, behind the copies that wait for it."""
        slots, old = np.array([seq.slot]), np.array([seq.kv_len], np.int32)
        self.kv.leave_windows(slots, old)
        self.kv.grow(slots, old, old + count, int(decodes))
        update = self.kv.take_update()
        if update is not None:
            self.rows[update.state_targets] = self.rows[update.state_sources]
        before = int(self.rows[seq.slot]) if seq.kv_len else 0
        new = seq.cache_keys(seq.kv_len + count)[seq.kv_len :]
        self.rows[seq.slot] = zlib.crc32(new.tobytes(), before)
        seq.kv_len += count
        if self.sizes.has_states:
            assert self.rows[seq.slot] == zlib.crc32(seq.cache_keys(seq.kv_len).tobytes()), "a state of other tokens"

    def admit(self) -> None:
        if not self.kv.num_free_rows():
            return
        seq = self.waiting.pop() if self.waiting else Sequence(self.prompt())
        prefix = self.kv.match(seq)
        self.kv.lock(prefix.node)
        if self.random.random() < 0.1:  # it does not fit after all
            self.kv.unlock(prefix.node)
            self.waiting.append(seq)
            return
        self.kv.place(seq, prefix.node)
        self.hits += prefix.length > 0
        self.running.append(seq)

    def advance(self) -> None:
        """A chunk of a prompt, or a token."""
        if not self.running:
            return
        seq = self.random.choice(self.running)
        left = len(seq.tokens) - seq.kv_len
        page = self.sizes.page_size
        if left > 0:
            chunk = max(page, CHUNK // page * page)
            count = min(left, chunk)
            if self.room_for(seq, count):
                self.compute(seq, count, decodes=False)
                self.kv.commit(seq)
            return
        for _ in range(self.random.randrange(1, 20)):
            if not self.room_for(seq, 1):
                return
            seq.tokens.append(self.random.randrange(4))
            self.compute(seq, 1, decodes=True)

    def end(self) -> None:
        if self.running:
            seq = self.running.pop(self.random.randrange(len(self.running)))
            self.kv.release(seq, keep=self.random.random() < 0.8)

    def retract(self) -> None:
        if self.running:
            seq = self.running.pop(self.random.randrange(len(self.running)))
            self.kv.release(seq)
            if len(seq.tokens) < CONTEXT:
                self.waiting.append(seq)

    def evict(self) -> None:
        table = self.random.choice((self.kv.tree, *self.kv.windows))
        self.evictions += table.evict(self.random.randrange(1, 80)) > 0

    def keep(self) -> None:
        node = self.random.choice(self.running).node if self.running else None
        if node is not None and node.depth:
            self.kv.tree.keep(node, self.now + self.random.randrange(1, 9))

    def expire(self) -> None:
        self.now += self.random.randrange(4)
        self.kv.tree.expire(self.now)

    def flush(self) -> None:
        if not self.running and self.random.random() < 0.2:
            self.kv.reset()

    def check(self) -> None:
        self.kv.check(self.running)
        page = self.sizes.page_size
        held = sum(-(-seq.kv_len // page) * page - seq.num_cached for seq in self.running)
        usage = self.kv.usage()
        assert usage["free"] + usage["cached"] + held == usage["total"]
        for window in self.kv.windows:
            counts = window.usage()
            assert counts["free"] + counts["cached"] + counts["held"] == counts["total"]
            for seq in self.running:
                kept = -(-seq.kv_len // page) * page - int(window.start[seq.slot])
                assert kept <= window.max_prompt_tokens(CHUNK), "a request has more than its window and a chunk"


def forget_attempts(tree: RadixCache) -> None:
    """Lets the next use of each path try to merge its chains, however few nodes have been added."""
    for node in tree.nodes():
        node.tried = 0


@pytest.mark.parametrize("name", MODELS)
def test_every_group_is_accounted_after_every_operation(name: str) -> None:
    layers, page = MODELS[name]
    machine = Machine(group_caches(layers), page, seed=zlib.crc32(name.encode()))
    operations = (
        [machine.admit] * 4
        + [machine.advance] * 8
        + [machine.end, machine.retract, machine.evict, machine.flush, machine.keep, machine.expire]
    )
    for number in range(OPERATIONS):
        machine.kv.tree.max_path = number // 50 % 3  # chains are merged on every path, or on longer ones
        if number % 2:
            forget_attempts(machine.kv.tree)
        machine.random.choice(operations)()
        machine.check()
    assert machine.hits > OPERATIONS // 100 and machine.evictions > OPERATIONS // 100, "nothing was tried"
    for seq in machine.running:
        machine.kv.release(seq)
    machine.running.clear()
    machine.kv.reset()
    machine.check()
    assert machine.kv.available_size() == machine.kv.size


@pytest.mark.parametrize("name", ["MLA", "MLA + indexer", "gated delta + full"])
def test_merged_chains_change_nothing_for_requests(name: str) -> None:
    """Two tables, one of which merges nothing, do the same things. Where windows are evicted, which of two equally old
    ones goes first may differ."""
    layers, page = MODELS[name]
    plain, merging = (Machine(group_caches(layers), page, seed=zlib.crc32(name.encode())) for _ in range(2))
    plain.kv.tree.max_path, merging.kv.tree.max_path = 1 << 30, 0
    num_nodes = [0, 0]
    for _ in range(OPERATIONS // 2):
        for i, machine in enumerate((plain, merging)):
            operations = [machine.admit, machine.advance, machine.advance, machine.end, machine.retract, machine.evict]
            forget_attempts(machine.kv.tree)
            machine.random.choice(operations)()
            num_nodes[i] += sum(1 for _ in machine.kv.tree.nodes())
        assert plain.kv.usage() == merging.kv.usage()
        for one, other in zip(plain.running, merging.running, strict=True):
            assert (one.tokens, one.kv_len, one.num_cached) == (other.tokens, other.kv_len, other.num_cached)
    assert 10 * num_nodes[1] < 9 * num_nodes[0], "hardly anything was merged"
