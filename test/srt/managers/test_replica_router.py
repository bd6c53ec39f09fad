"""The choice of a replica: by load, by turns, and by prefix within bounds of the load."""

from __future__ import annotations

import random

import pytest

from sglang.srt.configs.load_balance import BALANCE_METHODS
from sglang.srt.managers.front.replica_router import (
    MAX_LOAD_RATIO,
    MAX_PAGES,
    PAGE_TOKENS,
    RecentPages,
    ReplicaLoad,
    ReplicaRouter,
    page_hashes,
)
from sglang.srt.utils.media_item import MediaItem
from sglang.srt.utils.shared_array import SharedArray

NEW = range(10_000, 10_000 + 4 * PAGE_TOKENS)


def prompt(seed: int, pages: int = 8) -> list[int]:
    return random.Random(seed).choices(range(1000), k=pages * PAGE_TOKENS)


def idle(count: int) -> list[ReplicaLoad]:
    return [ReplicaLoad(index) for index in range(count)]


def test_turns_and_equals() -> None:
    """Of equals the one that has waited longest is taken, by every method."""
    for method in BALANCE_METHODS:
        router, loads = ReplicaRouter(method, 3), idle(3)
        assert [router.choose(loads, prompt(seed)) for seed in range(6)] == [0, 1, 2, 0, 1, 2], method


@pytest.mark.parametrize(
    ("method", "chosen"), [("total_tokens", 1), ("total_requests", 2), ("round_robin", 0), ("auto", 1)]
)
def test_the_least_loaded(method: str, chosen: int) -> None:
    loads = [ReplicaLoad(0, 5, 5000), ReplicaLoad(1, 9, 90), ReplicaLoad(2, 1, 8000)]
    assert ReplicaRouter(method, 3).choose(loads, NEW) == chosen


def test_replicas_that_are_gone_are_not_chosen() -> None:
    for method in BALANCE_METHODS:
        router, loads = ReplicaRouter(method, 3), idle(3)
        router.choose(loads, prompt(1))  # 0 has the prefix
        assert {router.choose(loads[1:], prompt(1)) for _ in range(4)} <= {1, 2}, method


def test_a_prefix_draws_its_next_request() -> None:
    router, loads = ReplicaRouter("auto", 2), idle(2)
    first = {seed: router.choose(loads, prompt(seed)) for seed in range(6)}
    assert set(first.values()) == {0, 1}
    for seed, index in first.items():
        assert router.choose(loads, [*prompt(seed), *NEW]) == index
    assert router.choose(loads, prompt(0), "another tenant") == 1 - router.choose(loads, prompt(0), "another tenant 2")


def test_the_longest_prefix_wins() -> None:
    router, loads = ReplicaRouter("auto", 2), idle(2)
    shared = prompt(1)
    assert router.choose(loads, shared) == 0
    loads[0].num_tokens = 10 * len(shared)
    longer = [*shared, *prompt(2)]
    assert router.choose(loads, longer) == 1, "the holder has too much to do"
    loads[0].num_tokens = 0
    assert router.choose(loads, [*longer, *NEW]) == 1
    router.forget_prefixes()
    assert router.choose(loads, [*longer, *NEW]) == 0, "least recently chosen"


def test_a_hot_prefix_is_shared_out() -> None:
    """Everybody sends the same prefix, and nothing ends: no replica gets many times the tokens of another."""
    router, loads, shared = ReplicaRouter("auto", 4), idle(4), prompt(1, pages=40)
    for seed in range(200):
        ids = [*shared, *prompt(seed, pages=1)]
        load = loads[router.choose(loads, ids)]
        load.num_requests += 1
        load.num_tokens += len(ids)
    counts = [load.num_tokens for load in loads]
    assert max(counts) <= MAX_LOAD_RATIO * min(counts)


def test_without_prefix_caches_only_load_counts() -> None:
    router, loads = ReplicaRouter("auto", 2, caches_prefixes=False), idle(2)
    assert [router.choose(loads, prompt(1)) for _ in range(4)] == [0, 1, 0, 1]


def test_pages_stand_for_all_tokens_before_their_end() -> None:
    ids = prompt(1)
    hashes = page_hashes(ids)
    assert len(hashes) == 8 and page_hashes(ids[:-1]) == hashes[:-1]
    changed = page_hashes([ids[0] + 1, *ids[1:]])
    assert not set(changed) & set(hashes) and not set(page_hashes(ids, "salt")) & set(hashes)
    assert len(page_hashes(range((MAX_PAGES + 5) * PAGE_TOKENS))) == MAX_PAGES
    assert page_hashes([]) == []


def test_pages_of_images() -> None:
    """Equal placeholders of other images are no prefix, from the image on; the same image is one."""

    def shown(digest: bytes) -> list[int]:
        pixels = SharedArray(name="x", shape=[4, 4], dtype="float32")
        spans = [(PAGE_TOKENS + 3, 2 * PAGE_TOKENS + 1)]
        item = MediaItem(kind="image", digest=digest, spans=spans, grid=(1, 2, 2), pixels=pixels)
        return page_hashes([7] * 4 * PAGE_TOKENS, None, [item])

    one, again, other = shown(b"1" * 32), shown(b"1" * 32), shown(b"2" * 32)
    assert one == again and one[0] == other[0] and not set(one[1:]) & set(other[1:])


def test_what_is_remembered_is_bounded_and_forgets_ends_first() -> None:
    pages, old, new = RecentPages(), page_hashes(prompt(1)), page_hashes(prompt(2))
    pages.capacity = 12
    pages.add(old)
    pages.add(new)
    assert len(pages) == 12 and pages.matched(new) == 8 and pages.matched(old) == 4
    router = ReplicaRouter("auto", 2)
    router.set_cache_size(0, 3 * PAGE_TOKENS)
    assert router.choose(idle(2), prompt(1)) == 0
    assert len(router._pages[0]) == 3
