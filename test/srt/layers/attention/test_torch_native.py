"""The torch attention backend against a loop over tokens and heads, in fp64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang.srt.layers.attention import torch_native_backend
from sglang.srt.layers.attention.call_site import Attention
from sglang.srt.layers.attention.sites import AttentionSites
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.native_ops import store_cache
from sglang.srt.layers.step_rows import DecodeRows, ExtendRows, TokenSlots
from sglang.srt.mem_cache.memory_pool import CachePools, CacheStore
from sglang.srt.plan.cache_spec import key_value_cache
from sglang.srt.plan.caches import group_caches
from sglang.srt.plan.pool_sizes import PoolSizes
from srt.layers.attention.backend_harness import Mode

LAYER = Attention(CacheStore(1, "kv"), num_heads=4, num_kv_heads=2, head_dim=16, scale=0.4)
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_kv_heads": 4},
    "one_kv_head": {"num_kv_heads": 1},
    "narrow_values": {"v_head_dim": 8},
    "window": {"sliding_window": 5},
    "chunks": {"sliding_window": 5, "chunked": True},
    "cap": {"logit_cap": 1.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "all": {"sliding_window": 3, "logit_cap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "v_head_dim": 8},
}
SEQ_LENS = {3: 21, 1: 1, 4: 9, 2: 13}  # request slot -> length


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: Attention) -> torch.Tensor:
    """One query [Hq, D] at the last position of keys [L, Hkv, D]."""
    out = []
    for head in range(layer.num_heads):
        kv = head // (layer.num_heads // layer.num_kv_heads)
        first = max(0, len(keys) - layer.sliding_window) if layer.sliding_window else 0
        if layer.chunked:
            first = (len(keys) - 1) // layer.sliding_window * layer.sliding_window
        scores = [float(q[head] @ keys[i, kv]) * layer.scale for i in range(first, len(keys))]
        if layer.logit_cap:
            scores = [layer.logit_cap * math.tanh(s / layer.logit_cap) for s in scores]
        total = sum(map(math.exp, scores))
        if layer.sinks is not None:
            total += math.exp(layer.sinks[head])
        out.append(sum(math.exp(s) / total * values[first + i, kv] for i, s in enumerate(scores)))
    return torch.cat(out)


class Case:
    """A pool with random keys and values of every request in scattered slots; unused slots hold NaN."""

    def __init__(self, layer: Attention, dtype: str = "float32", scale: float = 1.0) -> None:
        torch.manual_seed(0)
        cache = CacheStore(1, "kv")
        self.layer = replace(layer, cache=cache)
        kv = key_value_cache("kv", layer.num_kv_heads, layer.head_dim, layer.v_head_dim, dtype)
        CachePools(group_caches([(kv,), (kv,)]), PoolSizes(63, 1, 5, 32), "cpu").bind([cache])
        cache.k_scale = cache.v_scale = scale
        if dtype == "float32":
            cache.k.fill_(float("nan"))
            cache.v.fill_(float("nan"))
        self.table = torch.zeros(6, 32, dtype=torch.int32)
        order = torch.randperm(63) + 1
        self.keys, self.values = {}, {}
        for slot, length in SEQ_LENS.items():
            loc, order = order[:length], order[length:]
            self.table[slot, :length] = loc
            self.keys[slot] = torch.randn(length, layer.num_kv_heads, layer.head_dim)
            self.values[slot] = torch.randn(length, layer.num_kv_heads, layer.v_head_dim)
            store_cache(cache.k, self.keys[slot], loc, scale)
            store_cache(cache.v, self.values[slot], loc, scale)

    def batch(self, mode: Mode, new: list[int]) -> ForwardBatch:
        lens = list(SEQ_LENS.values())
        tokens = torch.zeros(sum(new), dtype=torch.int64)
        slots = (TokenSlots(self.table, tokens),)
        requests, seq_lens = torch.tensor(list(SEQ_LENS)), torch.tensor(lens, dtype=torch.int32)
        batch = ForwardBatch(tokens, tokens, slots)
        if mode is Mode.DECODE:
            batch.decode = DecodeRows(requests, seq_lens, slots, lens)
        else:
            prefix = [n - e for n, e in zip(lens, new, strict=True)]
            start_loc = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            prefix_lens = torch.tensor(prefix, dtype=torch.int32)
            batch.extend = ExtendRows(requests, seq_lens, prefix_lens, start_loc, slots, new, prefix, lens)
        site, backend = self.layer.site, TorchNativeAttnBackend(None, "cpu")  # type: ignore[arg-type]
        sites = AttentionSites({site: backend.decode_builder(site)}, {site: backend.extend_builder(site)})
        batch.metadata = sites.metadata(batch)
        return batch

    def run(self, new: list[int], mode: Mode) -> tuple[torch.Tensor, torch.Tensor]:
        """What the backend and the reference give for the last `new` tokens of each request."""
        layer = self.layer
        q = torch.randn(sum(new), layer.num_heads, layer.head_dim)
        want, row = [], 0
        for (slot, length), count in zip(SEQ_LENS.items(), new, strict=True):
            for end in range(length - count + 1, length + 1):
                keys, values = self.keys[slot][:end].double(), self.values[slot][:end].double()
                want.append(_attend(q[row].double(), keys, values, layer))
                row += 1
        unused = q.new_empty(0)
        got = layer(q, unused, unused, self.batch(mode, new))
        return got, torch.stack(want).float()


@pytest.fixture(params=[1 << 23, 100], ids=["whole", "pieces"])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_native_backend, "_MAX_SCORES", request.param)


@pytest.mark.usefixtures("piece")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("new", [[21, 1, 9, 13], [5, 1, 1, 12], None], ids=["prefill", "extend", "decode"])
def test_against_the_loop(variant: str, new: list[int] | None) -> None:
    layer = replace(LAYER, **VARIANTS[variant])
    mode = Mode.DECODE if new is None else Mode.EXTEND
    got, want = Case(layer).run(new or [1, 1, 1, 1], mode)
    assert got.shape == (len(want), layer.num_heads * layer.v_head_dim)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("mode", [Mode.EXTEND, Mode.DECODE])
def test_fp8_caches_are_scaled_back(dtype: str, mode: Mode) -> None:
    got, want = Case(LAYER, dtype, scale=0.5).run([1, 1, 1, 1], mode)
    assert (got - want).norm() / want.norm() < (0.06 if dtype == "fp8_e4m3" else 0.12)


def test_graphs_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="--disable-cuda-graph"):
        TorchNativeAttnBackend(None, "cpu").decode_builder(LAYER.site).prepare_graphs((8,))
