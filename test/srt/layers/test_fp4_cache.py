"""A cache of four-bit keys and values: its kernels against plain torch, interpreted here and natively on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import interpreter
import pytest
import torch
from pairs import some_of

from sglang.srt.blocks.gqa import reference as gqa_reference
from sglang.srt.hardware.arch import arch_by_name, current_arch
from sglang.srt.kernels.tiles import AttentionTile, attention_tiles, fp4_head_dims
from sglang.srt.layers.attention.triton_ops.decode_attention import DecodeWorkspace
from sglang.srt.layers.attention.triton_ops.decode_fp4 import decode_fp4_fwd
from sglang.srt.layers.attention.triton_ops.extend_fp4 import extend_fp4_fwd
from sglang.srt.layers.native_fp4 import dequantize_fp4_rows, quantize_fp4_rows
from sglang.srt.layers.triton_ops import rope_store
from sglang.srt.layers.triton_ops.fp4_rows import slot_stride
from srt.layers.attention.decode_plans import plan_ahead
from srt.layers.attention.reference import Problem, reference_decode, reference_extend, relative_error

DEVICE = interpreter.DEVICE
BOUND = 2e-3
"""The error of attention over the dequantized cache: dequantizing is exact, so it is that of 16 bits."""

LAYERS: tuple[dict[str, float], ...] = (
    {},
    {"window": 33},
    {"window": 7, "sinks": 1, "logit_cap": 20.0},
    {"sinks": 1},
    {"window": 33, "chunked": 1},
)


def stored(p: Problem) -> tuple[dict[str, torch.Tensor], Problem]:
    """The problem's caches as codes and scales; what they are dequantized to takes their place in the problem."""
    k, ks = quantize_fp4_rows(p.k_cache, p.k_scale)
    v, vs = quantize_fp4_rows(p.v_cache, p.v_scale)
    p.k_cache, p.v_cache = dequantize_fp4_rows(k, ks, 1.0), dequantize_fp4_rows(v, vs, 1.0)
    return {"k_cache": k, "v_cache": v, "k_group_scales": ks, "v_group_scales": vs}, p


def tile_of(op: str, dims: tuple[int, int]) -> AttentionTile:
    arch = arch_by_name("sm_120") if interpreter.ON_CPU else current_arch()
    return attention_tiles(op, *dims, "fp4_e2m1", arch.features)[0]


def problems(layers: Sequence[dict[str, float]]) -> list[Any]:
    """Head dims and layers. Features do not depend on the head dim: the smallest one has them all. `make test` has four
    head dims, of which one is no power of two and one has narrower values."""
    cases = [*((dims, {}) for dims in fp4_head_dims()), *(((64, 64), features) for features in layers if features)]
    return some_of(cases, [case for case in cases if case[0] in ((64, 64), (80, 80), (128, 128), (192, 128))])


@interpreter.kernel_test
@pytest.mark.parametrize(("dims", "features"), problems(LAYERS), ids=str)
def test_decode(dims: tuple[int, int], features: dict[str, float]) -> None:
    lens = [0, 99, 31, 130]
    caches, p = stored(Problem(lens, [1] * 4, 6, 2, *dims, device=DEVICE, k_scale=0.5, v_scale=2.0))
    tile, sinks = tile_of("decode_attention", dims), torch.linspace(-2, 3, 6, device=DEVICE)
    out = torch.full((4, 6, dims[1]), float("nan"), device=DEVICE)
    workspace = DecodeWorkspace.allocate(7, 6, 2, dims[1], 8, tile, DEVICE)
    plan = plan_ahead(p.prefix + 1, workspace, tile)
    decode_fp4_fwd(
        p.q, out, req_to_token=p.req_to_token, req_pool_indices=p.req_pool_indices, seq_lens=p.prefix + 1,
        plan=plan, scale=dims[0] ** -0.5, tile=tile, k_scale=p.k_scale, v_scale=p.v_scale,
        sliding_window=int(features.get("window", 0)), logit_cap=features.get("logit_cap", 0.0),
        sinks=sinks if "sinks" in features else None, chunked="chunked" in features, **caches,
    )  # fmt: skip
    want = reference_decode(
        p, dims[0] ** -0.5, int(features.get("window", 0)), features.get("logit_cap", 0.0),
        sinks if "sinks" in features else None, "chunked" in features,
    )  # fmt: skip
    assert relative_error(out, want) < BOUND


@interpreter.kernel_test
@pytest.mark.parametrize(("dims", "features"), problems([*LAYERS, {"window": 33, "both_ways": 1}]), ids=str)
def test_extend(dims: tuple[int, int], features: dict[str, float]) -> None:
    caches, p = stored(Problem([0, 37, 70, 64], [40, 5, 1, 32], 6, 2, *dims, device=DEVICE, k_scale=0.5, v_scale=2.0))
    sinks, causal = torch.linspace(-2, 3, 6, device=DEVICE), "both_ways" not in features
    out = torch.full((78, 6, dims[1]), float("nan"), device=DEVICE)
    extend_fp4_fwd(
        p.q, p.k, p.v, out, req_to_token=p.req_to_token, req_pool_indices=p.req_pool_indices, prefix_lens=p.prefix,
        start_loc=p.start_loc, scale=dims[0] ** -0.5, tile=tile_of("extend_attention", dims), k_scale=p.k_scale,
        v_scale=p.v_scale, causal=causal, sliding_window=int(features.get("window", 0)),
        logit_cap=features.get("logit_cap", 0.0), sinks=sinks if "sinks" in features else None,
        chunked="chunked" in features, **caches,
    )  # fmt: skip
    want = reference_extend(
        p, dims[0] ** -0.5, causal, int(features.get("window", 0)), features.get("logit_cap", 0.0),
        sinks if "sinks" in features else None, chunked="chunked" in features,
    )  # fmt: skip
    assert relative_error(out, want) < BOUND


def test_the_definition() -> None:
    """Scales are the largest magnitude over 6 in e4m3; codes are to nearest, ties to the even code."""
    x = torch.zeros(1, 32)
    x[0, :8] = torch.tensor([6.0, -0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x[0, 16] = 1e-4
    codes, scales = quantize_fp4_rows(x, 1.0)
    assert scales.view(torch.float8_e4m3fn).tolist() == [[1.0, 0.0]]
    assert dequantize_fp4_rows(codes, scales, 1.0)[0, :8].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert not dequantize_fp4_rows(codes, scales, 1.0)[0, 16:].any()
    large = torch.full((1, 16), 1e5)
    assert dequantize_fp4_rows(*quantize_fp4_rows(large, 1.0), 1.0).tolist() == [[6.0 * 448.0] * 16]
    torch.manual_seed(0)
    values = torch.randn(64, 256)
    error = dequantize_fp4_rows(*quantize_fp4_rows(values, 0.01), 0.01) - values
    assert error.norm() / values.norm() < 0.1


@pytest.mark.parametrize("dims", fp4_head_dims(), ids=str)
@pytest.mark.parametrize("heads", [1, 2, 3, 8])
def test_slots_are_counted_in_what_divides_them(dims: tuple[int, int], heads: int) -> None:
    """So that one form of a kernel serves any number of heads; the unit is a function of the head dim alone."""
    for dim in dims:
        unit = 8 if dim % 32 else 16
        codes = torch.empty(5, heads, dim // 2, dtype=torch.uint8)
        assert slot_stride(codes) * unit == heads * dim // 2
        assert slot_stride(torch.empty(5, 2 * heads, dim // 2)[:, :heads]) * unit == heads * dim
    with pytest.raises(AssertionError):
        slot_stride(torch.empty(5, dims[0] // 2, heads).transpose(1, 2))


@interpreter.kernel_test
@pytest.mark.parametrize(("heads", "dim", "rot"), [(1, 64, 64), (8, 64, 64), (4, 80, 80), (8, 128, 64)])
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
    expected = gqa_reference.qk_norm_rope_store(qkv.clone(), positions, cos_sin, weight, weight, 1e-6, *rest)
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


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
