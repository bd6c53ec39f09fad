from __future__ import annotations

from fractions import Fraction
from typing import Any

import psutil
import pytest
import torch

from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import CachePools, CacheStore, storage_dtype
from sglang.srt.plan.cache_spec import PER_REQUEST, CacheSpec, CacheTensor, key_value_cache, latent_cache
from sglang.srt.plan.caches import group_caches
from sglang.srt.plan.pool_sizes import PoolSizes

SIZES = PoolSizes(tokens=20, page_size=4, max_requests=3, context_len=16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "fp8_e4m3", "fp8_e5m2"])
def test_caches_of_several_shapes(dtype: str) -> None:
    """Layer 0 has wide heads, layer 1 has none, layer 2 narrow ones and a latent beside them."""
    wide, narrow = key_value_cache("kv", 2, 16, 16, dtype), key_value_cache("kv", 3, 8, 4, dtype)
    groups = group_caches([(wide,), (), (narrow, latent_cache("latent", 12, 8, dtype))])
    pools = CachePools(groups, SIZES, "cpu")
    stores = [CacheStore(0, "kv"), CacheStore(2, "kv"), CacheStore(2, "latent")]
    pools.bind(stores)
    assert [tuple(s.k.shape) for s in stores] == [(24, 2, 16), (24, 3, 8), (24, 1, 12)]
    assert [tuple(s.v.shape) for s in stores] == [(24, 2, 16), (24, 3, 4), (24, 1, 8)]
    assert stores[0].k.dtype == storage_dtype(dtype) and stores[0].k.is_contiguous()
    assert stores[2].v.data_ptr() == stores[2].k.data_ptr(), "values of a latent are its first columns"
    item = stores[0].k.element_size()
    assert pools.size_bytes() == 24 * (2 * 32 + 3 * 12 + 12) * item
    assert (
        sum(s.k.untyped_storage().nbytes() for s in stores) + sum(s.v.untyped_storage().nbytes() for s in stores[:2])
        == pools.size_bytes()
    )


def test_a_pool_in_main_memory_takes_none_before_it_is_used() -> None:
    process, size = psutil.Process(), 256 << 20
    before = process.memory_info().rss
    sizes = PoolSizes(tokens=size // (2 * 16 * 8 * 4), page_size=4, max_requests=3, context_len=16)
    (tensors,) = CachePools(group_caches([(key_value_cache("kv", 16, 8, 8, "float32"),)]), sizes, "cpu").tensors[0]
    assert sum(tensor.nbytes for tensor in tensors.values()) >= size
    assert process.memory_info().rss - before < size // 8
    assert not any(tensor[-100:].any() for tensor in tensors.values())


def test_stores_of_one_cache_share_it() -> None:
    """Layers that attend over another layer's keys and values."""
    pools = CachePools(group_caches([(key_value_cache("kv", 1, 8, 8, "float32"),), ()]), SIZES, "cpu")
    first, second = CacheStore(0, "kv"), CacheStore(0, "kv")
    pools.bind([first, second])
    assert first.k.data_ptr() == second.k.data_ptr()
    with pytest.raises(KeyError):
        pools.bind([CacheStore(1, "kv")])


def test_entries_that_cost_nothing_are_views() -> None:
    spec = latent_cache("latent", 576, 512, "bfloat16")
    assert spec.entry_bytes == 1152 and spec.entries_per_token == Fraction(1)


class Recorded(torch.Tensor):
    """Knows the bytes of the largest part that was read."""

    largest = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function is torch.Tensor.__getitem__:
            cls.largest = max(cls.largest, result.nbytes)
        return result


def test_copies_of_states_take_little_memory_however_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 1 to 3 move on by one at once, and row 4 is copied twice."""
    monkeypatch.setattr(memory_pool, "STATE_COPY_BYTES", 1000)
    shape = CacheTensor("state", (2, 5, 8), "float32")
    state = CacheSpec("state", (shape, CacheTensor("conv", (3, 4), "bfloat16")), lifetime=PER_REQUEST)
    sizes = PoolSizes(20, 4, max_requests=3, context_len=16, has_states=True, checkpoints=4)
    pools = CachePools(group_caches([(state,), (), (state,)]), sizes, "cpu")
    stores = [CacheStore(0, "state"), CacheStore(2, "state")]
    pools.bind(stores)
    for store in stores:
        for name in ("state", "conv"):
            store[name].copy_(torch.randn(store[name].shape))
    before = [{name: store[name].clone() for name in ("state", "conv")} for store in stores]
    sources, targets = torch.tensor([1, 2, 3, 4, 4]), torch.tensor([2, 3, 4, 5, 6])
    pools.states = [states.as_subclass(Recorded) for states in pools.states]
    pools.copy_states(sources, targets)
    assert 0 < Recorded.largest <= 1000
    for store, old in zip(stores, before, strict=True):
        for name in ("state", "conv"):
            assert torch.equal(store[name], old[name][[0, 1, 1, 2, 3, 4, 4, 7]])


def test_unknown_cache_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="int3"):
        storage_dtype("int3")
