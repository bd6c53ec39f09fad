"""Each row of norms, rotation and the store of keys and values: its heads, rotated part and type of cache.

Only `scripts/execute_kernels.py` runs it, over executed PTX (`@interpreter.kernel_test`).
"""

from __future__ import annotations

import interpreter
import pytest
import torch
from ledger.rows.ledger_rows import parts_of, rows_of

from sglang.srt.blocks.gqa import reference
from sglang.srt.layers.triton_ops import rope_store

CACHES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
HEADS = 9, 3
"""Of queries and keys: no row's heads of a program divide the first."""


@interpreter.kernel_test
@pytest.mark.parametrize("row", [row for row in rows_of("qk_norm_rope_store") if "/fp4_e2m1/" not in row])
def test_store(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words, tile = parts_of(row)
    dim, rot = (int(number) for number in words[0].split("r"))
    cache = CACHES[words[1]]
    monkeypatch.setattr(rope_store, "heads_per_program", lambda num_tokens: tile["HEADS"])
    generator = torch.Generator().manual_seed(dim + rot)
    q_heads, kv_heads = HEADS
    if "Q_HEADS [64]" in words:
        q_heads, kv_heads = 64, 4
    qkv = (torch.randn(3, (q_heads + 2 * kv_heads) * dim, generator=generator) * 30).bfloat16()
    angles = torch.rand(50, rot // 2, generator=generator) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    kind = torch.float32 if "fp32" in words else torch.bfloat16
    weights = [torch.randn(dim, generator=generator).to(kind) for _ in range(2)]
    positions, slots = torch.tensor([0, 49, 7]), torch.tensor([11, 0, 5])
    results = []
    for op in (reference.qk_norm_rope_store, rope_store.qk_norm_rope_store):
        caches = [torch.zeros(12, kv_heads, dim).to(cache) for _ in range(2)]
        given = (*weights, 1e-6, q_heads, kv_heads, dim, *caches, slots, 0.5, 0.125, "interleaved" not in words)
        results.append([*op(qkv.clone(), positions, cos_sin, *given), *caches])
    for want, got in zip(*results, strict=True):
        step = 0.26 if got.element_size() == 1 else 2e-2
        torch.testing.assert_close(got.float(), want.float(), rtol=step, atol=2e-2)
        assert (got.float() == want.float()).float().mean() > 0.9
