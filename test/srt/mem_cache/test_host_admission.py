"""HostTier.admission: what waiting requests cost while prefixes are loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from sglang.srt.mem_cache import host_tier
from sglang.srt.mem_cache.cache_tier import CopyState
from sglang.srt.mem_cache.host_tier import Admission, HostTier
from sglang.srt.mem_cache.kv_table import KVTable
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.plan.host_cache import HostCachePlan
from sglang.srt.plan.pool_sizes import PoolSizes

PAGE, LENGTH = 4, 128


class Waiting:
    """A request whose prompt main memory has, except for its last page."""

    namespace = None
    may_be_stale = True

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        self.num_loads = self.num_loaded = 0

    def cache_keys(self, length: int) -> np.ndarray:
        return self.tokens[:length]

    def matchable_len(self) -> int:
        return len(self.tokens) - 1


class EndlessCopies:
    """A copy engine whose copies never end."""

    ready, broken, loads_layers, page_bytes = True, False, False, (1,)
    state = CopyState.UNDER_WAY

    def start(self) -> None:
        pass

    def pace(self, rate: float | None) -> None:
        pass

    def submit(self, moves: object, to_host: bool) -> SimpleNamespace:
        return SimpleNamespace(state=self.state, layers=None)


class CopiesAtOnce(EndlessCopies):
    """A copy engine whose copies end at once."""

    state = CopyState.DONE


def tier_with(prompts: list[np.ndarray], policy: str = "write_through", copies: object = None) -> HostTier:
    """Returns a tier whose main memory has these prompts."""
    sizes = PoolSizes(10_000, PAGE, 64, 256)
    plan = HostCachePlan(
        sizes=sizes,
        token_bytes=1,
        window_bytes=0,
        state_bytes=0,
        write_policy=policy,
        save_tokens=1024,
        storage=None,
        ranks_share=False,
        processes=1,
    )
    tier = HostTier(KVTable(sizes), plan, cast(Any, copies or EndlessCopies()), list, None)
    tier._becomes_ready()
    for prompt in prompts:
        put(tier.host.tree, prompt)
    return tier


def put(tree: RadixCache, prompt: np.ndarray) -> None:
    """Gives a prompt to a tree."""
    slots = tree.allocator.alloc([0], [len(prompt)], [0])
    assert slots is not None
    tree.lock(tree.root)
    tree.unlock(tree.commit(prompt, slots, tree.root, 0).node)


def test_waiting_requests_are_not_compared_with_all_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose prefix is being loaded waits without any comparison, in every step; another is compared only with
    loads of prefixes that begin as its own does."""
    prompts = [np.arange(number * 1000, number * 1000 + LENGTH) for number in range(20)]
    tier, compared = tier_with(prompts), list[int]()
    common = host_tier.common_length
    monkeypatch.setattr(host_tier, "common_length", lambda *keys: (compared.append(1), common(*keys))[1])
    requests = [Waiting(np.concatenate((prompt, [7]))) for prompt in prompts]
    for _ in range(3):
        for req in requests:
            assert tier.admission(cast(Any, req), 0, lambda windows: True) is Admission.LATER
        tier.launch()
        tier.end_copies()
    assert len(tier._copies) == 20 and not compared
    beginning_alike = Waiting(np.concatenate((prompts[3][:100], [7])))
    assert tier.admission(cast(Any, beginning_alike), 0, lambda windows: True) is Admission.LATER
    assert len(compared) == 1 and len(tier._copies) == 20
    strange = Waiting(np.arange(90_000, 90_000 + LENGTH))
    assert tier.admission(cast(Any, strange), 0, lambda windows: True) is Admission.NOW and len(compared) == 1


def test_prefixes_that_are_written_back_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """All begin alike, main memory has that beginning, and two share more than it has: they are copied in turn."""
    header, ends = np.arange(100), [np.arange(12) + 1000 * number for number in range(1, 41)]
    tier, compared = tier_with([header], "write_back", CopiesAtOnce()), list[int]()
    monkeypatch.setattr(host_tier, "common_length", lambda *keys: compared.append(1) or 0)
    prompts = [np.concatenate((header, end)) for end in ends]
    prompts.append(np.concatenate((header, ends[3][:8], [7, 7, 7, 7])))
    tree = tier.device.tree
    for prompt in prompts:
        put(tree, prompt)
    assert tree.evict(tree.total_size()) == len(header) + 40 * 12 + 4
    assert not compared and tier.host.tree.total_size() == len(header) + 40 * 12 + 4
    assert [tier.host.tree.match_prefix(prompt).length for prompt in prompts] == [112] * 41
    tier.check()
