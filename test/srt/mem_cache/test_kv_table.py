"""KVTable: rows, the device's copy of them, and what a request leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from sglang.srt.mem_cache import node_chains
from sglang.srt.mem_cache.cache_tier import PinnedPrefix
from sglang.srt.mem_cache.kv_table import KVTable
from sglang.srt.mem_cache.radix_node import Node
from sglang.srt.mem_cache.window_table import WindowTable
from sglang.srt.plan.pool_sizes import PoolSizes, WindowSize, window_tokens


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

    def cache_keys(self, length: int) -> np.ndarray:
        return np.array(self.tokens[:length], np.int32)

    def matchable_len(self) -> int:
        return len(self.tokens) - 1


def admit(kv: KVTable, tokens: list[int]) -> Sequence:
    seq = Sequence(tokens)
    prefix = kv.match(seq)
    kv.lock(prefix.node)
    kv.place(seq, prefix.node)
    return seq


def compute(kv: KVTable, seq: Sequence, upto: int, decodes: bool = False) -> np.ndarray:
    slots, old, new = np.array([seq.slot]), np.array([seq.kv_len], np.int32), np.array([upto], np.int32)
    locs = kv.grow(slots, old, new, int(decodes))
    seq.kv_len = upto
    return locs


@pytest.mark.parametrize("page", [1, 4])
def test_the_device_hears_of_prompts_and_enters_decoded_tokens_itself(page: int) -> None:
    kv = KVTable(PoolSizes(64, page, 3, 32))
    seq = admit(kv, list(range(10)))
    assert seq.slot == 1 and kv.num_free_rows() == 2 and kv.take_update() is None
    locs = compute(kv, seq, 10)
    update = kv.take_update()
    assert update is not None
    assert update.index.tolist() == list(range(32, 42)) and update.value.tolist() == locs.tolist()
    compute(kv, seq, 11, decodes=True)
    assert kv.take_update() is None and kv.rows[1, 10] > 0
    kv.check()


def test_a_waiting_prompt_is_not_compared_again_for_a_draft_that_reads_the_next_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In every step that it waits, only the end of its match is compared."""
    kv = KVTable(PoolSizes(4096, 4, 3, 2048), next_tokens_read=1)
    first = admit(kv, list(range(1600)))
    for turn in range(200, 1601, 200):
        compute(kv, first, turn)
        kv.commit(first)
    waiting, compared = Sequence(list(range(1600)) + [7] * 50), list[int]()
    common_length = type(kv.tree)._common_length

    def counted(tree: Any, key: np.ndarray, tokens: np.ndarray) -> int:
        compared.append(min(key.size, tokens.size))
        return common_length(tree, key, tokens)

    monkeypatch.setattr(type(kv.tree), "_common_length", counted)
    length = kv.match(waiting).length
    assert length == 1596 and sum(compared) >= 1596
    compared.clear()
    assert kv.match(waiting).length == length
    assert sum(compared) <= 2 * kv.page_size
    kv.check()


@pytest.mark.parametrize("page", [1, 4])
def test_a_second_request_begins_with_what_the_first_left(page: int) -> None:
    kv = KVTable(PoolSizes(64, page, 3, 32))
    first = admit(kv, list(range(10)))
    locs = compute(kv, first, 10)
    kv.commit(first)
    kv.release(first)
    assert (first.slot, first.kv_len, first.num_cached, first.node) == (0, 0, 0, None)
    second = admit(kv, list(range(10)))
    assert second.num_cached == second.kv_len == (9 if page == 1 else 8)
    assert kv.rows[second.slot, : second.kv_len].tolist() == locs[: second.kv_len].tolist()
    kv.check()


def test_duplicates_give_way_and_the_device_hears_of_it() -> None:
    kv = KVTable(PoolSizes(64, 1, 3, 32))
    first, second = admit(kv, list(range(10))), admit(kv, list(range(10)))
    locs = compute(kv, first, 10)
    compute(kv, second, 10)
    kv.commit(first)
    kv.commit(second)
    update = kv.take_update()
    assert update is not None
    assert kv.rows[second.slot, :10].tolist() == locs.tolist()
    assert update.value[update.index >= second.slot * 32].tolist() == 2 * locs.tolist(), "the older write has no other"
    assert kv.usage() == {"free": 54, "cached": 10, "total": 64}


def test_what_failed_is_not_kept() -> None:
    kv = KVTable(PoolSizes(64, 1, 3, 32))
    seq = admit(kv, list(range(10)))
    compute(kv, seq, 10)
    kv.commit(seq)
    kv.release(seq, keep=False)
    assert kv.usage() == {"free": 64, "cached": 0, "total": 64} and kv.num_free_rows() == 3


@pytest.mark.parametrize("length", [8, 40])
def test_who_copies_windows_before_they_go_looks_at_few(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """length: without and with tokens before the window."""
    kv = KVTable(PoolSizes(10_000, 1, 2, 64, (WindowSize(16, 10_000),)))
    for number in range(200):
        seq = admit(kv, [number] * length)
        compute(kv, seq, length)
        kv.release(seq)
    window, looked, told = kv.windows[0], list[int](), list[list[Node]]()
    window.evict(200 * max(0, length - 15))  # what a further token does not see
    unused = WindowTable._unused
    monkeypatch.setattr(WindowTable, "_unused", lambda self, slots: (looked.append(1), unused(self, slots))[1])
    window.before_eviction = lambda nodes: told.append(list(nodes))
    oldest = sorted(kv.tree.nodes(), key=lambda node: node.last_access)
    kept = [int((node.windows[0] != 0).sum()) for node in oldest]
    assert len(oldest) == 200 and sum(kept) == 200 * min(length, 15)
    window.evict(kept[0] + 1)
    assert told == [oldest[:2]] and len(looked) <= 8
    assert [int((node.windows[0] != 0).sum()) for node in oldest[:3]] == [0, kept[1] - 1, kept[2]]


def test_windows_in_use_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eviction after eviction looks at the windows of running requests, which are the oldest, only the first time. Once
    the requests have ended, their windows can be evicted."""
    kv = KVTable(PoolSizes(10_000, 1, 110, 64, (WindowSize(16, 10_000),)))
    running = [admit(kv, [number] * 8) for number in range(50)]
    for seq in running:
        compute(kv, seq, 8)
        kv.commit(seq)
    for number in range(50, 100):
        seq = admit(kv, [number] * 8)
        compute(kv, seq, 8)
        kv.release(seq)
    window, looked = kv.windows[0], list[int]()
    unused = WindowTable._unused
    monkeypatch.setattr(WindowTable, "_unused", lambda self, slots: (looked.append(1), unused(self, slots))[1])
    window.before_eviction = lambda nodes: told.append(list(nodes))
    told, counts = list[list[Node]](), list[int]()
    for _ in range(20):
        looked.clear()
        assert window.evict(8) == 8
        counts.append(len(looked))
        kv.check(running)
    assert counts == [102] + [2] * 19  # by `before_eviction` and by the eviction
    assert [len(nodes) for nodes in told] == [1] * 20
    for seq in running:
        kv.release(seq)
    assert window.evict(640) == 640 and kv.usage()["free"] < 10_000
    kv.check()


@pytest.mark.parametrize("branches", [False, True])
def test_windows_of_nodes_that_must_stay_are_seldom_looked_at(branches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn's end has its window. Where it has another branch, too, nobody need look at the window."""
    looked: list[Node] = []
    content = node_chains._content

    def counted(node: Node, window: WindowTable) -> int:
        looked.append(node)
        return content(node, window)

    monkeypatch.setattr(node_chains, "_content", counted)
    turns, step = 200, 16
    kv = KVTable(PoolSizes(8192, step, 2, 4096, windows=(WindowSize(16, 8192),)))
    for turn in range(1, turns + 1):
        tokens = [7] * turn * step
        for ends in [tokens + [9] * step, tokens] if branches else [tokens]:
            seq = admit(kv, ends)
            compute(kv, seq, len(ends))
            kv.commit(seq)
            kv.release(seq)
    waiting = Sequence([7] * turns * step)
    for _ in range(10):
        kv.match(waiting)
    assert waiting.node is not None and len(kv.tree.path(waiting.node)) > turns // 2
    assert len(looked) <= (0 if branches else 2 * turns) and bool(looked) != branches


def test_ends_of_chunks_stay_in_long_chains() -> None:
    """A token at the beginning of a chunk sees none before it, so requests can go on there without any window."""
    chunk, turn, length = 64, 16, 48 * 16
    kv = KVTable(PoolSizes(4096, turn, 2, 2048, windows=(WindowSize(chunk, 256, True),)))

    def play(tokens: list[int]) -> int:
        seq = admit(kv, tokens)
        cached = seq.kv_len
        for end in [*range(cached + turn, len(tokens), turn), len(tokens)]:
            compute(kv, seq, end)
            kv.commit(seq)
            kv.leave_windows(np.array([seq.slot]), np.array([end], np.int32))
        kv.release(seq)
        return cached

    for end in range(turn, length + 1, turn):
        play([7] * end)
    for number in range(10, 20):  # others take the windows
        play([number] * 128)
    assert play([7] * 100 + [8] * 20) == 64
    kv.check()


def test_what_was_evicted_is_not_kept_for_the_eviction_of_windows() -> None:
    """A window's table as large as that of all tokens never evicts anything by itself."""
    kv = KVTable(PoolSizes(64, 1, 3, 32, (WindowSize(8, 64),)))
    for i in range(100):
        seq = admit(kv, [i] * 20)
        compute(kv, seq, 20)
        kv.release(seq)
        kv.take_update()
        kv.check()
    assert 0 < len(kv.windows[0]._heap) <= 2 * sum(1 for _ in kv.tree.nodes())


def test_where_prompts_pause_for_a_state() -> None:
    """At the last whole page before the last token; with pages of one token where much was computed before."""

    def table(page: int, checkpoints: int = 4, cached: bool = True, states: bool = True) -> KVTable:
        sizes = PoolSizes(4096, page, 4, 4096, has_states=states, checkpoints=checkpoints)
        return KVTable(sizes, prefix_caching=cached)

    pages = table(16)
    ends = {(0, 70): 64, (64, 70): 70, (0, 64): 48, (48, 64): 64, (0, 16): 16, (0, 17): 16, (32, 50): 48}
    assert {span: pages.chunk_end(*span) for span in ends} == ends
    tokens = table(1)
    ends = {
        (0, 700): 640,
        (640, 700): 700,
        (0, 500): 500,
        (0, 576): 512,
        (200, 700): 700,
        (188, 702): 702,
        (128, 702): 640,
    }
    assert {span: tokens.chunk_end(*span) for span in ends} == ends
    for other in (table(16, checkpoints=0), table(16, cached=False), table(16, 0, states=False)):
        assert other.chunk_end(0, 70) == 70


@pytest.mark.parametrize(("chunk", "uncertain_slots"), [(5, 1), (5, 3), (4, 3)])
def test_most_tokens_of_a_window_while_a_prompt_is_computed(chunk: int, uncertain_slots: int) -> None:
    window: Any = SimpleNamespace(window=8, page_size=1, uncertain_slots=uncertain_slots)
    assert WindowTable.max_prompt_tokens(window, chunk) == window_tokens(8, 1, chunk + uncertain_slots - 1)


@pytest.mark.parametrize("readable", [True, False])
def test_a_state_that_is_still_being_written_is_not_copied(readable: bool) -> None:
    checkpoints = SimpleNamespace(is_readable=lambda node: readable, pin=lambda node: 7)
    departure = PinnedPrefix(cast(Any, SimpleNamespace(checkpoints=checkpoints)), cast(Any, None))
    assert departure.keep_state(cast(Any, None)) == readable
    assert departure.row == (7 if readable else 0)
