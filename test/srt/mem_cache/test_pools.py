from __future__ import annotations

from fractions import Fraction

import pytest

from sglang.srt.mem_cache.memory_pool import CachePools, CacheStore, storage_dtype
from sglang.srt.plan.caches import group_caches
from sglang.srt.plan.layer_spec import key_value_cache, latent_cache
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


def test_unknown_cache_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="int3"):
        storage_dtype("int3")
