from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang.srt.mem_cache.memory_pool import KVPool, storage_dtype
from sglang.srt.mem_cache.req_pool import ReqToTokenPool


def test_request_slots_leave_the_padding_row_alone() -> None:
    pool = ReqToTokenPool(3, 16, "cpu")
    assert [pool.alloc() for _ in range(4)] == [1, 2, 3, None]
    assert pool.host.shape == (4, 16) and tuple(pool.device_table.shape) == (4, 16)
    assert pool.device_table.dtype == torch.int32 and not pool.device_table.any()
    pool.free(2)
    assert pool.available_size() == 1 and pool.alloc() == 2
    for bad in (0, 4):
        with pytest.raises(AssertionError):
            pool.free(bad)
    pool.free(1)
    with pytest.raises(AssertionError):
        pool.free(1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "fp8_e4m3", "fp8_e5m2"])
def test_kv_pool_shapes(dtype: str) -> None:
    spec = SimpleNamespace(num_layers=2, num_kv_heads=3, head_dim=8, v_head_dim=4, dtype=dtype)
    pool = KVPool(spec, 20, "cpu")
    assert tuple(pool.k(1).shape) == (20, 3, 8) and tuple(pool.v(1).shape) == (20, 3, 4)
    assert pool.k(0).dtype == storage_dtype(dtype) and pool.k(0).is_contiguous()
    assert pool.size_bytes() == 2 * 20 * 3 * (8 + 4) * pool.k(0).element_size()
    pool.set_scales(1, 0.5, 0.25)
    assert [pool.k_scale(0), pool.k_scale(1), pool.v_scale(1)] == [1.0, 0.5, 0.25]


def test_unknown_cache_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="int3"):
        storage_dtype("int3")
