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
from sglang.srt.managers.front.session_affinity import MAX_ID_BYTES, SessionReplicas, session_of
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


def affinity(count: int, fallback: str = "total_tokens", **options: bool) -> ReplicaRouter:
    return ReplicaRouter("prefix_affinity", count, fallback=fallback, **options)


def test_a_session_stays_at_its_replica() -> None:
    """Agents that begin with the same instructions are spread, and each stays; `auto` brings all of them to one."""
    shared = prompt(1, pages=40)
    for method, spread in (("prefix_affinity", {0, 1, 2}), ("auto", {0})):
        router, loads = ReplicaRouter(method, 3), idle(3)
        first = {agent: router.choose(loads, shared, session=b"%d" % agent) for agent in range(9)}
        assert set(first.values()) == spread
        for turn in range(3):
            ids = [*shared, *prompt(turn, pages=turn)]
            assert {agent: router.choose(loads, ids, session=b"%d" % agent) for agent in first} == first


def test_the_session_of_a_lost_replica_stays_elsewhere() -> None:
    router, loads = affinity(3), idle(3)
    assert router.choose(loads, NEW, session=b"a") == 0
    moved = router.choose(loads[1:], NEW, session=b"a")
    assert moved == 1
    assert [router.choose(loads[1:], NEW, session=b"a") for _ in range(3)] == [moved] * 3
    assert router.choose(loads[2:], NEW, session=b"a") == 2, "the last one that serves"


@pytest.mark.parametrize(
    ("fallback", "busy", "elsewhere"),
    [
        ("total_tokens", ReplicaLoad(0, 1, 10 * len(NEW)), 1),
        ("total_requests", ReplicaLoad(0, 9, 0), 2),
        ("round_robin", ReplicaLoad(0, 1, 10 * len(NEW)), 1),
    ],
)
def test_a_session_leaves_a_replica_with_too_much_to_do(fallback: str, busy: ReplicaLoad, elsewhere: int) -> None:
    router, loads = affinity(3, fallback), idle(3)
    assert router.choose(loads, NEW, session=b"a") == 0
    others = [ReplicaLoad(1, 1, 0), ReplicaLoad(2, 0, 1)]
    assert router.choose([busy, *others], NEW, session=b"a") == elsewhere
    assert router.choose(loads, NEW, session=b"a") == elsewhere, "its prefix is there now"


@pytest.mark.parametrize("fallback", ["total_tokens", "total_requests"])
def test_sessions_are_fair_under_load(fallback: str) -> None:
    """One session sends most of the requests, and nothing ends: no replica gets many times the load of another."""
    router, loads, chance = affinity(4, fallback), idle(4), random.Random(3)
    for _ in range(400):
        session = b"%d" % (0 if chance.random() < 0.7 else chance.randrange(20))
        load = loads[router.choose(loads, NEW, session=session)]
        load.num_requests += 1
        load.num_tokens += len(NEW)
    counts = [load.num_requests for load in loads]
    assert max(counts) <= MAX_LOAD_RATIO * (min(counts) + 1) + 1


def test_without_a_session_the_prefix_counts() -> None:
    router, loads = affinity(2, "round_robin"), idle(2)
    first = [router.choose(loads, prompt(seed)) for seed in range(4)]
    assert first == [0, 1, 0, 1]
    assert [router.choose(loads, [*prompt(seed), *NEW]) for seed in (0, 2, 1, 3)] == [0, 0, 1, 1]


def test_sessions_without_prefix_caches_are_as_the_fallback_says() -> None:
    router, loads = affinity(2, caches_prefixes=False), idle(2)
    assert [router.choose(loads, NEW, session=b"a") for _ in range(4)] == [0, 1, 0, 1]


def test_a_flush_forgets_sessions() -> None:
    router, loads = affinity(2), idle(2)
    assert [router.choose(loads, NEW, session=session) for session in (b"a", b"b", b"a")] == [0, 1, 0]
    router.forget_prefixes()
    assert router.choose(loads, NEW, session=b"a") == 1, "least recently chosen"


def test_remembered_sessions_are_bounded() -> None:
    sessions = SessionReplicas(capacity=3)
    for index, name in enumerate((b"a", b"b", b"c", b"a", b"d")):
        sessions.put(name, index)
    assert len(sessions) == 3
    assert [sessions.get(name) for name in (b"a", b"b", b"c", b"d")] == [3, None, 2, 4]


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ([], None),
        ([(b"x-session-id", b" agent 7 ")], b"agent 7"),
        ([(b"x-smg-routing-key", b"key"), (b"x-session-id", b"id")], b"id"),
        ([(b"x-smg-routing-key", b"key"), (b"x-session-id", b" ")], b"key"),
        ([(b"x-session-id", b"a" * MAX_ID_BYTES)], b"a" * MAX_ID_BYTES),
        ([(b"x-session-id", b"a" * (MAX_ID_BYTES + 1))], None),
        ([(b"session-id", b"other")], None),
    ],
)
def test_headers_name_sessions(headers: list[tuple[bytes, bytes]], session: bytes | None) -> None:
    assert session_of(headers) == session
