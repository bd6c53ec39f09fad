"""RadixCache against a dictionary of prefixes, and request life cycles against a count of every slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang.srt.mem_cache import radix_cache
from sglang.srt.mem_cache.allocator import Slots, TokenAllocator
from sglang.srt.mem_cache.node_chains import MAX_MERGED, MAX_PATH, chains
from sglang.srt.mem_cache.radix_cache import RadixCache, Tokens
from sglang.srt.mem_cache.radix_node import Node

NAMESPACES = (None, "a", "")


def matched(cache: RadixCache, tokens: list[int], namespace: str | None = None) -> list[int]:
    """The slots of the longest cached prefix."""
    return cache.slots_to(cache.match_prefix(tokens, namespace).node).tolist()


def insert(cache: RadixCache, tokens: list[int], slots: Slots, namespace: str | None = None) -> int:
    """Give whole pages to the tree. Returns how many tokens it had already; their duplicates are freed."""
    done = cache.commit(tokens, slots, cache.root, 0, namespace)
    cache.unlock(done.node)
    return int((done.indices != slots).sum())


def release(
    cache: RadixCache,
    tokens: list[int],
    indices: Slots,
    node: Node,
    num_cached: int,
    namespace: str | None = None,
    keep: bool = True,
) -> None:
    """End a request."""
    if keep:
        done = cache.commit(tokens, indices, node, num_cached, namespace)
        indices, node, num_cached = done.indices, done.node, done.num_cached
    cache.allocator.free(indices[num_cached:])
    cache.unlock(node)


@dataclass(eq=False)
class Request:
    tokens: list[int]
    namespace: str | None
    node: Node
    indices: Slots
    num_cached: int = 0


class RadixMachine(RuleBasedStateMachine):
    """Requests with a small alphabet (so that prefixes collide) run through match, lock, alloc, commit, release.

    The model: `content` says which (namespace, prefix) the KV slot of each page was computed for. A slot in a wrong
    place of the tree, or one that is reused while cached, shows as a prefix that does not match its content.
    """

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        pages=st.integers(6, 40),
        enabled=st.integers(0, 9),
        max_path=st.sampled_from([0, 1, 2, MAX_PATH]),
    )
    def start(self, page_size: int, pages: int, enabled: int, max_path: int) -> None:
        self.page_size = page_size
        self.allocator = TokenAllocator(page_size * pages, page_size)
        self.cache = RadixCache(self.allocator, page_size, enabled=enabled > 0)
        self.cache.max_path = max_path
        self.content: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        self.remembered: dict[tuple[str | None, tuple[int, ...]], Node] = {}
        self.running: list[Request] = []

    def compute(self, req: Request, upto: int) -> bool:
        """Allocates and 'computes' tokens up to `upto`, evicting as needed. False if there is no room."""
        old = len(req.indices)
        last = req.indices[-1] if old else -1
        slots = self.allocator.alloc([old], [upto], [last])
        if slots is None:
            wanted = (-(-upto // self.page_size) + (-old // self.page_size)) * self.page_size
            missing = wanted - self.allocator.available_size()
            evictable = self.cache.evictable_size()
            freed = self.cache.evict(missing)
            assert freed == min(-(-missing // self.page_size) * self.page_size, evictable)
            slots = self.allocator.alloc([old], [upto], [last])
            if slots is None:
                assert freed < missing
                return False
        req.indices = np.concatenate((req.indices, slots))
        for position in range(old, upto):
            self.content[int(req.indices[position])] = (req.namespace, tuple(req.tokens[: position + 1]))
        return True

    def holds(self, req: Request, count: int) -> None:
        for position in range(count):
            expected = (req.namespace, tuple(req.tokens[: position + 1]))
            assert self.content[int(req.indices[position])] == expected

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=50),
        repeat=st.sampled_from([1, 4, 16]),
        namespace=st.sampled_from(NAMESPACES),
    )
    def admit(self, tokens: list[int], repeat: int, namespace: str | None) -> None:
        tokens = [t for t in tokens for _ in range(repeat)][:64]
        match = self.cache.match_prefix(np.array(tokens, np.int32), namespace)
        assert match.length % self.page_size == 0
        req = Request(tokens, namespace, match.node, self.cache.slots_to(match.node), match.length)
        self.holds(req, req.num_cached)
        self.cache.lock(match.node)
        self.running.append(req)
        if not self.compute(req, len(tokens)):
            self.running.remove(req)
            release(self.cache, tokens, req.indices, req.node, req.num_cached, namespace, keep=False)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def decode(self, data: st.DataObject, more: list[int]) -> None:
        req = data.draw(st.sampled_from(self.running))
        tokens = req.tokens
        req.tokens = tokens + more
        if not self.compute(req, len(req.tokens)):
            req.tokens = tokens

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        req = data.draw(st.sampled_from(self.running))
        upto = data.draw(st.integers(req.num_cached, len(req.tokens)))
        result = self.cache.commit(req.tokens[:upto], req.indices, req.node, req.num_cached, req.namespace)
        assert len(result.indices) == len(req.indices)
        expected = upto // self.page_size * self.page_size if self.cache.enabled else 0
        assert result.num_cached == max(expected, req.num_cached)
        req.indices, req.node, req.num_cached = result.indices, result.node, result.num_cached
        self.holds(req, len(req.tokens))
        if self.cache.enabled:
            again = self.cache.match_prefix(req.tokens, req.namespace)
            assert again.length >= req.num_cached
            slots = self.cache.slots_to(again.node)
            assert slots[: req.num_cached].tolist() == req.indices[: req.num_cached].tolist()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans(), in_flight=st.booleans())
    def release(self, data: st.DataObject, keep: bool, in_flight: bool) -> None:
        req = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        done = len(req.tokens) - (1 if in_flight and len(req.tokens) > req.num_cached else 0)
        release(self.cache, req.tokens[:done], req.indices, req.node, req.num_cached, req.namespace, keep)
        if keep and self.cache.enabled:
            match = self.cache.match_prefix(req.tokens[:done], req.namespace)
            assert match.length == done // self.page_size * self.page_size

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        req = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        path = list(self.cache._path(req.node))
        release(self.cache, req.tokens, req.indices, req.node, req.num_cached, req.namespace, keep=False)
        self.cache.discard(req.node)
        for node in path:
            in_tree = node.parent is not None
            assert in_tree == bool(node.lock_ref or node.children), (
                "a node that somebody needs, or one that nobody does"
            )

    @precondition(lambda self: self.running)
    @rule(data=st.data(), until=st.integers(1, 9))
    def keep(self, data: st.DataObject, until: int) -> None:
        node = data.draw(st.sampled_from(self.running)).node
        if node.parent is not None:
            self.cache.keep(node, until)

    @rule(now=st.integers(0, 10))
    def expire(self, now: int) -> None:
        self.cache.expire(now)
        assert all(node.kept_until == 0 or node.kept_until > now for node in self.cache.nodes())

    @rule(amount=st.integers(1, 100))
    def evict(self, amount: int) -> None:
        free = self.allocator.available_size()
        evictable = self.cache.evictable_size()
        freed = self.cache.evict(amount)
        assert freed == min(-(-amount // self.page_size) * self.page_size, evictable)
        assert self.allocator.available_size() == free + freed

    @rule(tokens=st.lists(st.integers(0, 2), max_size=48), namespace=st.sampled_from(NAMESPACES))
    def remember(self, tokens: list[int], namespace: str | None) -> None:
        self.remembered[namespace, tuple(tokens)] = self.cache.match_prefix(tokens, namespace).node

    @rule()
    def match_again_from_what_is_remembered(self) -> None:
        for (namespace, tokens), known in self.remembered.items():
            again = self.cache.match_prefix(tokens, namespace, known)
            assert again == self.cache.match_prefix(tokens, namespace)
            self.remembered[namespace, tokens] = again.node

    @precondition(lambda self: not self.running)
    @rule()
    def flush(self) -> None:
        self.cache.reset()
        assert self.allocator.available_size() == self.allocator.size

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        if self.cache.max_path == 0:  # every path is tried again, however few nodes have been added
            for node in self.cache.nodes():
                node.tried = 0
        held = {int(s) // self.page_size for r in self.running for s in r.indices[r.num_cached :]}
        held_count = sum(len({int(s) // self.page_size for s in r.indices[r.num_cached :]}) for r in self.running)
        assert len(held) == held_count
        total = self.allocator.available_size() + self.cache.total_size() + held_count * self.page_size
        assert total == self.allocator.size

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for req in self.running:
                release(self.cache, req.tokens, req.indices, req.node, req.num_cached, req.namespace)
            assert self.cache.protected_size() == 0
            self.cache.reset()
            assert self.allocator.available_size() == self.allocator.size


TestRadix = RadixMachine.TestCase
TestRadix.settings = settings(max_examples=80, stateful_step_count=30, deadline=None, derandomize=True)


class PrefixMachine(RuleBasedStateMachine):
    """commit and match alone against a dictionary: page-aligned prefix -> slots of its last page."""

    @initialize(page_size=st.sampled_from([1, 4]))
    def start(self, page_size: int) -> None:
        self.page_size = page_size
        self.allocator = TokenAllocator(1 << 14, page_size)
        self.cache = RadixCache(self.allocator, page_size)
        self.cache.max_path = 1
        self.known: dict[tuple[int, ...], list[int]] = {}

    def expected(self, tokens: list[int]) -> list[int]:
        slots: list[int] = []
        while True:
            page = self.known.get(tuple(tokens[: len(slots) + self.page_size]))
            if page is None or len(slots) + self.page_size > len(tokens):
                return slots
            slots += page

    @rule(tokens=st.lists(st.integers(0, 2), max_size=24))
    def insert(self, tokens: list[int]) -> None:
        slots = self.allocator.alloc([0], [len(tokens)], [-1])
        assert slots is not None
        expected = len(self.expected(tokens))
        assert insert(self.cache, tokens, slots) == expected
        aligned = len(tokens) // self.page_size * self.page_size
        for at in range(expected, aligned, self.page_size):
            self.known[tuple(tokens[: at + self.page_size])] = slots[at : at + self.page_size].tolist()
        self.allocator.free(slots[aligned:])

    @rule(tokens=st.lists(st.integers(0, 2), max_size=24))
    def match(self, tokens: list[int]) -> None:
        assert matched(self.cache, tokens) == self.expected(tokens)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
            assert self.cache.total_size() == len(self.known) * self.page_size


TestPrefix = PrefixMachine.TestCase
TestPrefix.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, derandomize=True)


def filled(size: int = 64, page_size: int = 1) -> tuple[TokenAllocator, RadixCache]:
    allocator = TokenAllocator(size, page_size)
    return allocator, RadixCache(allocator, page_size)


def put(allocator: TokenAllocator, cache: RadixCache, tokens: list[int]) -> None:
    slots = allocator.alloc([0], [len(tokens)], [-1])
    assert slots is not None
    insert(cache, tokens, slots)


def test_least_recently_used_goes_first() -> None:
    allocator, cache = filled()
    for first in (1, 2, 3):
        put(allocator, cache, [first, 9, 9])
    cache.match_prefix([1, 9, 9])
    assert cache.evict(3) == 3
    assert [cache.match_prefix([first, 9, 9]).length for first in (1, 2, 3)] == [3, 0, 3]


def test_following_a_prefix_is_a_use() -> None:
    allocator, cache = filled()
    for first in (1, 2):
        put(allocator, cache, [first, 9, 9])
    cache.match_prefix([1, 9, 9])
    cache.match_prefix([2, 9, 9])
    assert [node.depth for node in cache.follow([1, 9, 9, 9])][-1] == 3
    assert cache.evict(3) == 3
    assert [cache.match_prefix([first, 9, 9]).length for first in (1, 2)] == [3, 0]


def keep(cache: RadixCache, tokens: list[int], until: float) -> None:
    cache.keep(cache.match_prefix(tokens).node, until)


def test_kept_prefixes_outlive_others_until_their_time() -> None:
    allocator, cache = filled()
    put(allocator, cache, [1] * 16)
    put(allocator, cache, [2] * 16)
    keep(cache, [1] * 16, 5.0)
    put(allocator, cache, [3] * 16)
    assert cache.kept_size() == 16 and cache.evict(32) == 32
    assert len(matched(cache, [1] * 16)) == 16 and not matched(cache, [2] * 16) and not matched(cache, [3] * 16)
    put(allocator, cache, [2] * 16)
    cache.expire(4.9)
    assert cache.kept_size() == 16
    cache.expire(5.0)
    assert cache.kept_size() == 0
    cache.evict(16)
    assert not matched(cache, [1] * 16) and len(matched(cache, [2] * 16)) == 16
    cache.check()


def test_what_is_kept_gives_way_where_nothing_else_is_there() -> None:
    allocator, cache = filled()
    put(allocator, cache, [1] * 16)
    keep(cache, [1] * 16, 5.0)
    assert cache.evict(8) == 8 and cache.kept_size() == 8 and len(matched(cache, [1] * 16)) == 8
    assert cache.evict(100) == 8 and cache.kept_size() == 0


def test_half_of_the_pool_is_kept_at_most() -> None:
    """What asks for the shortest time is let go, and of a path its end."""
    allocator, cache = filled()
    put(allocator, cache, [1] * 20)
    put(allocator, cache, [1] * 10 + [2] * 10)
    put(allocator, cache, [3] * 20)
    keep(cache, [1] * 20, 5.0)
    keep(cache, [3] * 20, 9.0)
    assert cache.kept_size() == 30  # the first prompt's own ten tokens are not
    cache.check()
    keep(cache, [1] * 10 + [2] * 10, 4.0)
    assert cache.kept_size() == 30
    cache.check()
    cache.evict(20)
    assert len(matched(cache, [3] * 20)) == 20 and len(matched(cache, [1] * 20)) == 10


def test_a_prompt_loses_its_end_first() -> None:
    allocator, cache = filled()
    put(allocator, cache, list(range(10)))
    assert cache.evict(4) == 4
    assert cache.match_prefix(list(range(10))).length == 6
    cache.check()


def test_locked_nodes_survive_eviction_and_splits() -> None:
    allocator, cache = filled()
    put(allocator, cache, [1, 2, 3, 4])
    match = cache.match_prefix([1, 2, 3, 4])
    cache.lock(match.node)
    put(allocator, cache, [1, 2, 7])  # splits the locked node
    assert (cache.protected_size(), cache.evictable_size()) == (4, 1)
    assert cache.evict(64) == 1
    assert matched(cache, [1, 2, 3, 4]) == cache.slots_to(match.node).tolist()
    cache.unlock(match.node)
    assert cache.evict(64) == 4
    assert allocator.available_size() == 64


def test_a_commit_gives_way_to_what_the_tree_has() -> None:
    allocator, cache = filled()
    first = allocator.alloc([0], [4], None)
    second = allocator.alloc([0], [5], None)
    assert first is not None and second is not None
    done = cache.commit([1, 2, 3, 4], first, cache.root, 0)
    other = cache.commit([1, 2, 3, 4, 5], second, cache.root, 0)
    assert other.indices.tolist() == [*first.tolist(), second[4]]
    assert allocator.available_size() == 64 - 5
    release(cache, [1, 2, 3, 4], done.indices, done.node, 4)
    release(cache, [1, 2, 3, 4, 5], other.indices, other.node, 5)
    assert (cache.evictable_size(), cache.protected_size()) == (5, 0)


def test_namespaces_share_nothing() -> None:
    allocator, cache = filled()
    put(allocator, cache, [1, 2, 3])
    assert cache.match_prefix([1, 2, 3], "lora").length == 0
    slots = allocator.alloc([0], [3], None)
    assert slots is not None
    assert insert(cache, [1, 2, 3], slots, "lora") == 0
    assert matched(cache, [1, 2, 3], "lora") == slots.tolist()


def test_a_disabled_cache_frees_everything() -> None:
    allocator = TokenAllocator(64, 4)
    cache = RadixCache(allocator, 4, enabled=False)
    slots = allocator.alloc([0], [10], [-1])
    assert slots is not None
    kept = cache.commit(list(range(10)), slots, cache.root, 0)
    assert kept.num_cached == 0 and cache.match_prefix(list(range(10))).length == 0
    release(cache, list(range(10)), kept.indices, kept.node, kept.num_cached)
    assert allocator.available_size() == 64


@pytest.mark.parametrize("misuse", ["unlock", "lock_evicted", "reset_locked"])
def test_misuse_is_an_assertion(misuse: str) -> None:
    allocator, cache = filled()
    put(allocator, cache, [1, 2, 3])
    node = cache.match_prefix([1, 2, 3]).node
    with pytest.raises(AssertionError):
        if misuse == "unlock":
            cache.unlock(node)
        elif misuse == "lock_evicted":
            cache.evict(3)
            cache.lock(node)
        else:
            cache.lock(node)
            cache.reset()


@pytest.mark.parametrize("defect", ["size", "slot", "edge", "heap"])
def test_check_finds_defects(defect: str) -> None:
    allocator, cache = filled()
    put(allocator, cache, [1, 2, 3])
    put(allocator, cache, [4, 5])
    node = cache.match_prefix([1, 2, 3]).node
    cache.check()
    if defect == "size":
        cache.lock(node)
        node.lock_ref = 0
    elif defect == "slot":
        node.value[0] = matched(cache, [4])[0]
    elif defect == "edge":
        node.key[0] = 9
    else:
        node.heap_entry = 0
    with pytest.raises(AssertionError):
        cache.check()


def test_long_prompts_match_whole() -> None:
    allocator, cache = filled(1 << 16)
    tokens = np.random.default_rng(0).integers(0, 150_000, 8192, dtype=np.int32)
    slots = allocator.alloc([0], [8192], None)
    assert slots is not None
    insert(cache, tokens, slots)
    assert matched(cache, tokens) == slots.tolist()


def walk(cache: RadixCache, tokens: Tokens) -> None:
    """Runs a prompt whose tokens all come to the tree."""
    match = cache.match_prefix(tokens)
    cache.lock(match.node)
    slots = cache.slots_to(match.node)
    new = cache.allocator.alloc([match.length], [len(tokens)], [-1])
    assert new is not None
    done = cache.commit(tokens, np.concatenate((slots, new)), match.node, match.length)
    cache.unlock(done.node)


@pytest.mark.parametrize("order", [range(1, 2001), range(2000, 0, -1)], ids=["each longer", "each shorter"])
def test_a_long_chain_is_walked_once(order: range) -> None:
    _, cache = filled(1 << 12)
    tokens = np.random.default_rng(0).integers(0, 150_000, 2001)
    slots = np.arange(0)
    for length in order:
        walk(cache, tokens[:length])
        slots = cache.slots_to(cache.match_prefix(tokens[:length]).node) if length == max(order) else slots
    walk(cache, tokens)
    node = cache.match_prefix(tokens[:2000]).node
    assert len(cache.path(node)) <= MAX_PATH
    assert cache.slots_to(node).tolist() == slots.tolist() and len(slots) == 2000
    cache.check()


def test_long_prompts_in_many_chunks_stay_few_nodes() -> None:
    """Nodes beyond the greatest that is made of others are not copied again."""
    _, cache = filled(1 << 17)
    tokens = np.random.default_rng(0).integers(0, 150_000, 1 << 17)
    for length in range(512, len(tokens) + 1, 512):
        walk(cache, tokens[:length])
    nodes = list(cache.nodes())
    assert len(nodes) <= MAX_PATH + 2 * len(tokens) // MAX_MERGED
    assert max(node.key.size for node in nodes) <= MAX_MERGED


def test_a_short_node_does_not_keep_a_long_prompt_in_memory() -> None:
    """What splits and evictions leave of a prompt keeps at most twice its own size alive."""
    _, cache = filled(1 << 14)
    rng = np.random.default_rng(0)
    headers = rng.integers(0, 150_000, (40, 16))
    for header in headers:
        long = np.concatenate((header, rng.integers(0, 150_000, 5000)))
        if cache.allocator.available_size() < len(long):
            cache.evict(len(long))
        walk(cache, long)
        for other in headers:
            cache.match_prefix(other)
    cache.evict(100)
    arrays = [array for node in cache.nodes() for array in (node.key, node.value)]
    wholes = {id(whole): whole.nbytes for whole in (a if a.base is None else a.base for a in arrays)}
    assert sum(wholes.values()) <= 2 * sum(a.nbytes for a in arrays)
    assert any(node.key.size == 16 for node in cache.nodes())
    cache.check()


@pytest.mark.parametrize("needed", ["a lock", "a branch", "a longer time", "whoever remembers it"])
def test_ends_that_somebody_needs_stay(needed: str) -> None:
    allocator, cache = filled()
    put(allocator, cache, [1, 2])
    node = cache.match_prefix([1, 2]).node
    if needed == "a lock":
        cache.lock(node)
    elif needed == "a branch":
        put(allocator, cache, [1, 2, 9])
    elif needed == "a longer time":
        cache.keep(node, 5.0)
    else:
        cache.is_remembered = lambda n: n is node
    put(allocator, cache, [1, 2, 3, 4])
    cache.max_path = 0
    assert [n.depth for n in cache.follow([1, 2, 3, 4])] == [2, 4] and node.parent is cache.root
    if needed == "a lock":
        cache.unlock(node)
    elif needed == "a branch":
        cache.remove([cache.match_prefix([1, 2, 9]).node])
    elif needed == "a longer time":
        cache.expire(5.0)
    else:
        cache.is_remembered = lambda n: False
    for length in range(5, 8):  # until the path is twice as long
        put(allocator, cache, list(range(1, length + 1)))
    assert [n.depth for n in cache.follow([1, 2, 3, 4, 5, 6, 7])] == [7] and node.parent is None
    cache.check()


def test_nodes_that_must_stay_are_not_tried_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn leaves a branch that the next one leaves out, so the ends of all turns stay."""
    allocator, cache = filled(1 << 13)
    tried: list[int] = []

    def counted(path: Sequence[Node], *rest: Any) -> Iterator[list[Node]]:
        tried.append(len(path))
        return chains(path, *rest)

    monkeypatch.setattr(radix_cache, "chains", counted)
    turns = 400
    for turn in range(1, turns + 1):
        put(allocator, cache, [7] * 2 * turn + [9])
        put(allocator, cache, [7] * 2 * turn)
        cache.match_prefix([7] * 2 * turn)
    end = cache.match_prefix([7] * 2 * turns).node
    assert len(cache.path(end)) == turns and max(tried) >= turns // 2
    assert sum(tried) <= 2 * turns, "the sum of all attempts is linear in the nodes"
    tried.clear()
    for length in range(2, 2 * turns + 1, 2):
        cache.match_prefix([7] * length)
    end.tried = 0
    cache.match_prefix([7] * 2 * turns, known=end)
    assert not tried, "nothing has changed"
    end.tried = turns
    put(allocator, cache, [7] * 10 + [8])
    new = [7] * 10 + [8] * 2
    for _ in range(MAX_PATH):
        put(allocator, cache, new := new + [8])
    assert tried == [MAX_PATH + 1], "a new branch near the root has its own count"
    cache.check()
