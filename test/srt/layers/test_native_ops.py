"""The torch reference ops against formulas written another way (loops, complex numbers, torch's own layers)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sglang.srt.blocks.gqa import reference as gqa_reference
from sglang.srt.blocks.moe import reference as routing
from sglang.srt.configs.activation import SILU
from sglang.srt.layers import native_ops
from sglang.srt.layers.moe.expert_weights import ExpertWeights


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(dtype: torch.dtype) -> None:
    x, residual = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype)
    weight = torch.rand(64).to(dtype)
    torch.testing.assert_close(native_ops.rmsnorm(x, weight, 1e-5), F.rms_norm(x, (64,), weight, 1e-5))
    normed, total = native_ops.fused_add_rmsnorm(x, residual, weight, 1e-5)
    assert normed.dtype == total.dtype == dtype
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, F.rms_norm(x + residual, (64,), weight, 1e-5))


def test_a_product_may_keep_the_digits_of_its_sums() -> None:
    """More columns than are widened at a time."""
    x, w = torch.randn(3, 70).bfloat16() * 4, torch.randn(native_ops.WIDENED_ELEMENTS // 70 * 2 + 5, 70).bfloat16()
    exact = x.double() @ w.double().T
    assert exact.abs().max() > 32, "where bf16 has a grid of 0.25"
    out = native_ops.linear(x, w, out_dtype=torch.float32)
    assert out.dtype == torch.float32 and (out - exact).abs().max() < 1e-4
    assert torch.equal(native_ops.linear(x, w), F.linear(x, w))


def test_silu_and_mul() -> None:
    x = torch.randn(3, 10)
    want = torch.tensor([[a / (1 + torch.exp(-a)) * b for a, b in zip(r[:5], r[5:], strict=True)] for r in x])
    torch.testing.assert_close(native_ops.silu_and_mul(x), want)


def _rope_complex(x: torch.Tensor, angles: torch.Tensor, is_neox_style: bool) -> torch.Tensor:
    """x [T, H, D] rotated as complex numbers by angles [T, R / 2]."""
    out = x.clone()
    half = angles.shape[1]
    for i in range(half):
        a, b = (i, i + half) if is_neox_style else (2 * i, 2 * i + 1)
        z = torch.complex(x[..., a], x[..., b]) * torch.polar(torch.ones(len(x)), angles[:, i])[:, None]
        out[..., a], out[..., b] = z.real, z.imag
    return out


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("rot_dim", [16, 8])
@pytest.mark.parametrize("norm", [False, True])
def test_qk_norm_rope_store(is_neox_style: bool, rot_dim: int, norm: bool) -> None:
    tokens, heads, kv_heads, dim = 6, 4, 2, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    positions = torch.tensor([0, 3, 9, 1, 2, 31])
    angles = torch.rand(32, rot_dim // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    weights = (torch.rand(dim), torch.rand(dim)) if norm else (None, None)
    k_cache, v_cache = torch.full((20, kv_heads, dim), 7.0), torch.full((20, kv_heads, dim), 7.0)
    loc = torch.tensor([4, 19, 2, 11, 5, 7])
    q, k, v = gqa_reference.qk_norm_rope_store(
        qkv, positions, table, *weights, 1e-6, heads, kv_heads, dim, k_cache, v_cache, loc, is_neox_style=is_neox_style
    )
    want_q, want_k, want_v = qkv.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    if norm:
        want_q = F.rms_norm(want_q, (dim,), weights[0], 1e-6)
        want_k = F.rms_norm(want_k, (dim,), weights[1], 1e-6)
    torch.testing.assert_close(q, _rope_complex(want_q, angles[positions], is_neox_style))
    torch.testing.assert_close(k, _rope_complex(want_k, angles[positions], is_neox_style))
    torch.testing.assert_close(v, want_v)
    torch.testing.assert_close(k_cache[loc], k)
    torch.testing.assert_close(v_cache[loc], v)
    untouched = torch.ones(20, dtype=torch.bool).index_fill_(0, loc, False)
    assert (k_cache[untouched] == 7).all() and (v_cache[untouched] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_store_scales_and_saturates(dtype: torch.dtype) -> None:
    cache = torch.zeros(4, 1, 2, dtype=dtype)
    native_ops.store_cache(cache, torch.tensor([[[1.0, -6.0]], [[1e6, -1e6]]]), torch.tensor([2, 1]), 2.0)
    limit = torch.finfo(dtype).max
    assert cache.float()[:, 0].tolist() == [[0, 0], [limit, -limit], [0.5, -3], [0, 0]]


@pytest.mark.parametrize("renormalize", [False, True])
def test_topk_softmax(renormalize: bool) -> None:
    logits = torch.randn(7, 9)
    weights, ids = routing.topk_softmax(logits, 3, renormalize)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    for row, w, i in zip(logits, weights, ids, strict=True):
        best = sorted(range(9), key=lambda e: -row[e])[:3]
        probs = torch.stack([row[e].exp() for e in best]) / (row[best].exp().sum() if renormalize else row.exp().sum())
        assert i.tolist() == best
        torch.testing.assert_close(w, probs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_moe_and_its_missing_experts(dtype: torch.dtype) -> None:
    x, w13, w2 = torch.randn(5, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    weights = torch.rand(5, 2)
    ids = torch.tensor([[0, 1], [3, -1], [-1, -1], [2, 0], [1, 3]], dtype=torch.int32)
    want = torch.zeros(5, 8)
    for t in range(5):
        for w, e in zip(weights[t], ids[t].tolist(), strict=True):
            if e >= 0:
                gate, up = (w13[e] @ x[t]).chunk(2)
                want[t] += w * (w2[e] @ (F.silu(gate) * up))
    experts = ExpertWeights(w13.to(dtype)), ExpertWeights(w2.to(dtype))
    got = native_ops.fused_moe(x.to(dtype), *experts, weights, ids, SILU, ())
    alone = [native_ops.fused_moe(x[t : t + 1].to(dtype), *experts, weights[[t]], ids[[t]], SILU, ()) for t in range(5)]
    assert got.dtype == dtype
    assert (got[2] == 0).all() and (alone[2] == 0).all()
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.4}
    torch.testing.assert_close(got.float(), want, **tolerance)
    torch.testing.assert_close(torch.cat(alone).float(), want, **tolerance)
