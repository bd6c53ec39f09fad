"""A cache of four-bit keys and values: its kernels against plain torch, interpreted here and natively on a GPU."""

from __future__ import annotations

import interpreter
import pytest
import torch

from sglang.srt.kernels.tiles import _qkv, _split
from sglang.srt.layers import native_ops
from sglang.srt.layers.attention.triton_ops.decode_attention import DecodeWorkspace, plan_decode
from sglang.srt.layers.attention.triton_ops.decode_fp4 import decode_fp4_fwd
from sglang.srt.layers.attention.triton_ops.extend_fp4 import extend_fp4_fwd
from sglang.srt.layers.native_fp4 import dequantize_fp4_rows, quantize_fp4_rows
from sglang.srt.layers.triton_ops import rope_store
from srt.layers.attention.reference import Problem, reference_decode, reference_extend, relative_error

DEVICE = interpreter.DEVICE
BOUND = 2e-3
"""The error of attention over the dequantized cache: dequantizing is exact, so it is that of 16 bits."""


def stored(p: Problem) -> tuple[dict[str, torch.Tensor], Problem]:
    """The problem's caches as codes and scales; what they are dequantized to takes their place in the problem."""
    k, ks = quantize_fp4_rows(p.k_cache, p.k_scale)
    v, vs = quantize_fp4_rows(p.v_cache, p.v_scale)
    p.k_cache, p.v_cache = dequantize_fp4_rows(k, ks, 1.0), dequantize_fp4_rows(v, vs, 1.0)
    return {"k_cache": k, "v_cache": v, "k_group_scales": ks, "v_group_scales": vs}, p


@interpreter.kernel_test
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (192, 128)], ids=str)
def test_decode(dims: tuple[int, int]) -> None:
    lens = [0, 99, 31, 130]
    caches, p = stored(Problem(lens, [1] * 4, 6, 2, *dims, device=DEVICE, k_scale=0.5, v_scale=2.0))
    tile = _split(16, 32, 4, 3, 2)
    out = torch.full((4, 6, dims[1]), float("nan"), device=DEVICE)
    workspace = DecodeWorkspace.allocate(7, 6, 2, dims[1], 8, tile, DEVICE)
    plan_decode(p.prefix + 1, workspace, tile)
    decode_fp4_fwd(
        p.q, out, req_to_token=p.req_to_token, req_pool_indices=p.req_pool_indices, seq_lens=p.prefix + 1,
        workspace=workspace, scale=dims[0] ** -0.5, tile=tile, k_scale=p.k_scale, v_scale=p.v_scale, **caches,
    )  # fmt: skip
    assert relative_error(out, reference_decode(p, dims[0] ** -0.5)) < BOUND


@interpreter.kernel_test
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (192, 128)], ids=str)
def test_extend(dims: tuple[int, int]) -> None:
    caches, p = stored(Problem([0, 37, 70, 64], [40, 5, 1, 32], 6, 2, *dims, device=DEVICE, k_scale=0.5, v_scale=2.0))
    out = torch.full((78, 6, dims[1]), float("nan"), device=DEVICE)
    extend_fp4_fwd(
        p.q, p.k, p.v, out, req_to_token=p.req_to_token, req_pool_indices=p.req_pool_indices, prefix_lens=p.prefix,
        start_loc=p.start_loc, scale=dims[0] ** -0.5, tile=_qkv(64, 32, 4, 2), k_scale=p.k_scale, v_scale=p.v_scale,
        **caches,
    )  # fmt: skip
    assert relative_error(out, reference_extend(p, dims[0] ** -0.5)) < BOUND


@interpreter.kernel_test
@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize("dim, rot", [(64, 64), (80, 80), (128, 64)])
def test_store_equals_the_definition(heads: int, dim: int, rot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys as they are returned, and values, are in the cache as the definition has them, to the last bit: groups of
    zeros, of numbers too small for a scale, and of numbers beyond the largest scale, too."""
    monkeypatch.setattr(rope_store, "heads_per_program", lambda num_tokens: heads)
    torch.manual_seed(0)
    tokens, q_heads, kv_heads = 6, 5, 3
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * dim, device=DEVICE).bfloat16()
    values = qkv[:, -kv_heads * dim :]
    values[0], values[1], values[2], values[3] = 0, 1e-4, 3e4 * values[2], torch.arange(-3, 3, 6 / values.shape[1])
    weight = torch.rand(dim, device=DEVICE).bfloat16() + 0.5
    cos_sin, positions = torch.randn(512, rot, device=DEVICE), torch.randint(512, (tokens,), device=DEVICE)
    slots = torch.randperm(tokens + 5, device=DEVICE)[:tokens]
    caches = [torch.zeros(tokens + 5, kv_heads, dim // 2, dtype=torch.uint8, device=DEVICE) for _ in "kv"]
    scales = [torch.zeros(tokens + 5, kv_heads, dim // 16, dtype=torch.uint8, device=DEVICE) for _ in "kv"]
    rest = (q_heads, kv_heads, dim, *caches, slots, 0.7, 1.0, False, *scales)
    expected = native_ops.qk_norm_rope_store(qkv.clone(), positions, cos_sin, weight, weight, 1e-6, *rest)
    native = dequantize_fp4_rows(caches[0], scales[0], 0.7)
    for part in (*caches, *scales):
        part.zero_()
    actual = rope_store.qk_norm_rope_store(qkv.clone(), positions, cos_sin, weight, weight, 1e-6, *rest)
    for x, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, reference, rtol=1e-2, atol=2e-2)
    assert relative_error(dequantize_fp4_rows(caches[0], scales[0], 0.7), native) < 0.02
    for x, tensor_scale, codes, groups in zip(actual[1:], (0.7, 1.0), caches, scales, strict=True):
        of_x, groups_of_x = quantize_fp4_rows(x, tensor_scale)
        assert torch.equal(codes[slots], of_x) and torch.equal(groups[slots], groups_of_x)


def test_in_interpreter() -> None:
    interpreter.run_file(__file__)
