"""Elementwise kernels against the plain torch ops, interpreted on a CPU and natively on a GPU."""

from __future__ import annotations

from typing import Any

import interpreter
import pytest
import torch
import torch.nn.functional as F
from pairs import some_of

from sglang.srt.blocks.gqa import reference as gqa_reference
from sglang.srt.blocks.gqa.kernels import whole_norm
from sglang.srt.blocks.moe import reference as routing
from sglang.srt.blocks.moe.kernels import topk
from sglang.srt.configs.activation import GPT_OSS_SWIGLU, Activation
from sglang.srt.layers import native_ops
from sglang.srt.layers.triton_ops import activation, decode_inputs, embedding, norm, rope_store

DEVICE = interpreter.DEVICE
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def randn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(dtype).to(DEVICE)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Elementwise to one rounding of the dtype, relative to the larger of the value and one."""
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def in_turn(sizes: list[tuple[int, ...]]) -> list[Any]:
    """Every size in every dtype. `make test` has each size once, and each dtype where there are as many sizes."""
    quick = [(*size, DTYPES[i % len(DTYPES)]) for i, size in enumerate(sizes)]
    return some_of([(*size, dtype) for size in sizes for dtype in DTYPES], quick)


@interpreter.kernel_test
@pytest.mark.parametrize(("size", "dtype"), in_turn([(96,), (1000,), (2064,)]))
def test_embedding_rows(size: int, dtype: torch.dtype) -> None:
    """The rows of three ranks; each token has a row of one of them, and one is of none."""
    table = randn(3 * 20, size, dtype=dtype)
    ids = torch.tensor([0, 59, 19, 20, -1, 39, 40, 60, 20, 1 << 40], device=DEVICE)
    inside = (ids >= 0) & (ids < 60)
    expected = torch.where(inside[:, None], F.embedding(torch.where(inside, ids, 0), table), 0)
    parts = []
    for first in (0, 20, 40):
        parts.append(embedding.embedding_rows(ids, table[first : first + 20], first))
        assert torch.equal(parts[-1], native_ops.embedding_rows(ids, table[first : first + 20], first))
    assert torch.equal(parts[0] + parts[1] + parts[2], expected)
    assert embedding.embedding_rows(ids[:0], table, 0).shape == (0, size)


@interpreter.kernel_test
@pytest.mark.parametrize("windows", [0, 2])
@pytest.mark.parametrize("num_reqs", [0, 1, 5, 131])
def test_decode_inputs(num_reqs: int, windows: int) -> None:
    """With two rows of padding behind the requests."""
    rows, context = 140, 9
    slots = torch.cat((torch.randperm(rows - 1)[:num_reqs] + 1, torch.zeros(2, dtype=torch.int64))).to(DEVICE)
    lens = torch.randint(1, context + 1, (num_reqs + 2,), dtype=torch.int32).to(DEVICE)
    lens[num_reqs:] = 1
    locs = torch.randint(1, 10_000, (num_reqs + 2,)).to(DEVICE)
    locs[num_reqs:] = 0
    next_tokens = torch.randint(0, 1 << 40, (rows,)).to(DEVICE)
    table = torch.randint(0, 1 << 30, (1 + windows, rows, context), dtype=torch.int32).to(DEVICE)
    for given in (num_reqs + 2, 0):
        arrays = slots[:given], lens[:given], locs[:given], next_tokens
        by_torch, by_kernel = table.clone(), table.clone()
        expected = native_ops.decode_inputs(*arrays, by_torch)
        actual = decode_inputs.decode_inputs(*arrays, by_kernel)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
        assert torch.equal(by_kernel, by_torch) and (not given or not torch.equal(by_kernel, table))


@interpreter.kernel_test
@pytest.mark.parametrize(("num_tokens", "size", "dtype"), in_turn([(1, 4096), (3, 96), (5, 1000)]))
def test_rmsnorm(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    x, weight = randn(num_tokens, size, dtype=dtype, scale=3.0), randn(size, dtype=dtype)
    assert_close(norm.rmsnorm(x, weight, 1e-6), native_ops.rmsnorm(x, weight, 1e-6))


@interpreter.kernel_test
def test_rmsnorm_of_a_strided_slice_and_of_nothing() -> None:
    wide, weight = randn(4, 300), randn(100)
    assert_close(norm.rmsnorm(wide[:, 100:200], weight, 1e-5), native_ops.rmsnorm(wide[:, 100:200], weight, 1e-5))
    assert norm.rmsnorm(wide[:0, :100], weight, 1e-5).shape == (0, 100)


@interpreter.kernel_test
@pytest.mark.parametrize(("num_tokens", "size", "dtype"), in_turn([(1, 2048), (4, 80)]))
def test_fused_add_rmsnorm(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    x, residual, weight = (randn(num_tokens, size, dtype=dtype) for _ in range(3))
    weight = weight[0].contiguous()
    expected, expected_sum = native_ops.fused_add_rmsnorm(x, residual, weight, 1e-6)
    normed, total = norm.fused_add_rmsnorm(x.clone(), residual.clone(), weight, 1e-6)
    assert_close(normed, expected)
    assert torch.equal(total, expected_sum)


@interpreter.kernel_test
@pytest.mark.parametrize(("num_tokens", "size", "dtype"), in_turn([(1, 3072), (7, 100), (70, 64)]))
def test_silu_and_mul(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = randn(num_tokens, 2 * size, dtype=dtype, scale=4.0)
    assert_close(activation.silu_and_mul(gate_up), native_ops.silu_and_mul(gate_up))
    assert_close(activation.gelu_and_mul(gate_up), native_ops.gelu_and_mul(gate_up))
    assert_close(activation.relu2(gate_up), native_ops.relu2(gate_up))
    for clamped in (Activation(limit=2.0), GPT_OSS_SWIGLU):
        assert_close(activation.activate(gate_up, clamped), native_ops.gated(gate_up, clamped))


@interpreter.kernel_test
@pytest.mark.parametrize("limit", [2.0, 4.0, 6.25, 7.0, 16.0])
def test_limits_of_the_result_within_the_rounding_of_bfloat16(limit: float) -> None:
    """From a limit of 6.25 on kernels clamp before the function, the reference what comes out of it."""
    limited = Activation(limit=limit, limits_result=True)
    gate_up = torch.linspace(-3 * limit, 3 * limit, 512, dtype=torch.bfloat16, device=DEVICE).reshape(4, 128)
    got, want = activation.activate(gate_up, limited).float(), native_ops.gated(gate_up, limited).float()
    torch.testing.assert_close(got, want, rtol=2**-7, atol=0.0)


@interpreter.kernel_test
def test_activations_of_what_is_very_large() -> None:
    """No NaN where a cube or an exponential overflows."""
    gate_up = torch.tensor([[1e30, -1e30, 300.0, -300.0, 0.0, 2.0, 2.0, 2.0, 2.0, 2.0]], device=DEVICE)
    assert torch.equal(activation.gelu_and_mul(gate_up), native_ops.gelu_and_mul(gate_up))
    assert torch.equal(activation.silu_and_mul(gate_up), native_ops.silu_and_mul(gate_up))


@interpreter.kernel_test
@pytest.mark.parametrize(("num_q", "num_k", "dtype"), in_turn([(6144, 1024), (768, 128), (1500, 1100), (16, 48)]))
def test_qk_whole_norm(num_q: int, num_k: int, dtype: torch.dtype) -> None:
    """MiniMax-M2 on one rank, on eight, and sizes that no block divides. `reduce` stands for a second rank."""
    qkv, q_weight, k_weight = (randn(*shape, dtype=dtype) for shape in ((5, num_q + 2 * num_k), (num_q,), (num_k,)))
    for ranks, reduce in ((1, None), (2, lambda sums: 2.0 * sums)):
        given = (q_weight, k_weight, 1e-6, (ranks * num_q, num_k), ranks, reduce)
        own, expected = qkv.clone(), qkv.clone()
        whole_norm.qk_whole_norm(own, *given)
        gqa_reference.qk_whole_norm(expected, *given)
        assert_close(own, expected)
        assert torch.equal(own[:, num_q + num_k :], qkv[:, num_q + num_k :])
    whole_norm.qk_whole_norm(qkv[:0], q_weight, k_weight, 1e-6, (num_q, num_k))


@interpreter.kernel_test
@pytest.mark.pairs
@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn, torch.float8_e5m2])
def test_qk_norm_rope_store(num_tokens: int, dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    check_rope_store(num_tokens, dtype, cache_dtype or dtype, heads=(4, 2), dim=64, rot=64)


@interpreter.kernel_test
@pytest.mark.parametrize("num_tokens", [2, 300])
def test_partial_rotary_on_odd_head_counts(num_tokens: int) -> None:
    check_rope_store(num_tokens, torch.float16, torch.float16, heads=(5, 1), dim=80, rot=32)


@interpreter.kernel_test
def test_interleaved_rotary() -> None:
    check_rope_store(3, torch.float16, torch.float16, heads=(2, 2), dim=64, rot=64, is_neox_style=False)


@interpreter.kernel_test
def test_rotary_without_head_norms() -> None:
    check_rope_store(3, torch.float16, torch.float16, heads=(2, 1), dim=64, rot=32, has_norm=False)


def check_rope_store(
    num_tokens: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    heads: tuple[int, int],
    dim: int,
    rot: int,
    is_neox_style: bool = True,
    has_norm: bool = True,
) -> None:
    q_heads, kv_heads = heads
    num_slots = num_tokens + 9
    # Values far beyond the range of e4m3 after scaling: the store must saturate.
    qkv = randn(num_tokens, (q_heads + 2 * kv_heads) * dim, dtype=dtype, scale=30.0)
    positions = torch.randint(0, 50, (num_tokens,)).to(DEVICE)
    loc = torch.randperm(num_slots)[:num_tokens].to(DEVICE)
    angles = torch.rand(50, rot // 2) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(DEVICE)
    weights = (randn(dim, dtype=dtype), randn(dim, dtype=dtype)) if has_norm else (None, None)

    def caches() -> tuple[torch.Tensor, torch.Tensor]:
        zeros = torch.zeros(2, num_slots, kv_heads, dim, dtype=torch.float32, device=DEVICE)
        return zeros[0].to(cache_dtype), zeros[1].to(cache_dtype)

    def run(op, qkv: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor):
        return op(
            qkv,
            positions,
            cos_sin,
            *weights,
            1e-6,
            q_heads,
            kv_heads,
            dim,
            k_cache,
            v_cache,
            loc,
            0.5,
            0.125,
            is_neox_style,
        )

    expected_caches, actual_caches = caches(), caches()
    expected = run(gqa_reference.qk_norm_rope_store, qkv.clone(), *expected_caches)
    actual = run(rope_store.qk_norm_rope_store, qkv.clone(), *actual_caches)
    for got, want in zip(actual, expected, strict=True):
        assert got.shape == want.shape
        assert_close(got, want)
    for got, want in zip(actual_caches, expected_caches, strict=True):
        # One step of an fp8 mantissa where the fp32 values straddle a rounding boundary.
        step = {1: 0.26, 2: TOLERANCE[dtype]}[got.element_size()]
        torch.testing.assert_close(got.float(), want.float(), rtol=step, atol=TOLERANCE[dtype])
        assert (got.float() == want.float()).float().mean() > 0.99 - (0.1 if got.element_size() > 1 else 0.0)


@interpreter.kernel_test
def test_untyped_bytes_are_refused_as_cache() -> None:
    cache = torch.zeros(4, 1, 64, dtype=torch.uint8, device=DEVICE)
    index = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(TypeError, match="view it as float8"):
        rope_store.qk_norm_rope_store(
            randn(1, 192), index, randn(4, 64), None, None, 1e-6, 1, 1, 64, cache, cache, index
        )


@interpreter.kernel_test
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 128, 8), (7, 60, 4), (5, 8, 1)])
def test_topk_softmax(num_tokens: int, num_experts: int, top_k: int, renormalize: bool) -> None:
    logits = randn(num_tokens, num_experts, scale=3.0)
    weights, ids = topk.topk_softmax(logits, top_k, renormalize)
    expected_weights, expected_ids = routing.topk_softmax(logits, top_k, renormalize)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


@interpreter.kernel_test
@pytest.mark.parametrize(("num_experts", "top_k", "groups"), [(160, 6, (8, 3)), (24, 4, (6, 2))])
def test_topk_softmax_among_the_best_groups(num_experts: int, top_k: int, groups: tuple[int, int]) -> None:
    logits = randn(9, num_experts, scale=3.0)
    weights, ids = topk.topk_softmax(logits, top_k, False, 16.0, groups=groups)
    expected_weights, expected_ids = routing.topk_softmax(logits, top_k, False, 16.0, groups=groups)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
    members = num_experts // groups[0]
    assert all(len(set((row // members).tolist())) <= groups[1] for row in ids)
    anywhere = routing.topk_softmax(logits, top_k, False, 16.0)[1]
    assert not torch.equal(ids, anywhere), "the groups decide nothing"


@interpreter.kernel_test
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "hash"])
def test_experts_are_renamed_to_those_of_the_rank(score: str) -> None:
    """Experts 5 to 9 of 16; weights stay those of all experts, and padding stays padding."""
    logits = randn(7, 16, scale=3.0)
    expert_map = torch.full((16,), -1, dtype=torch.int32, device=DEVICE)
    expert_map[5:10] = torch.arange(5, dtype=torch.int32, device=DEVICE)
    num_valid = torch.tensor([6], dtype=torch.int32, device=DEVICE)
    table = torch.stack([torch.randperm(16)[:4] for _ in range(20)]).int().to(DEVICE)
    args = {
        "softmax": (logits, 4, True),
        "sigmoid": (logits, None, 4, True),
        "hash": (logits, torch.arange(7, device=DEVICE), table, "sigmoid"),
    }[score]
    for ops in (topk, routing):
        route = getattr(ops, f"topk_{score}")
        weights, ids = route(*args, num_valid=num_valid)
        same_weights, local = route(*args, num_valid=num_valid, expert_map=expert_map)
        assert torch.equal(weights, same_weights) and local.dtype == torch.int32
        want = [[e - 5 if 5 <= e < 10 else -1 for e in row] for row in ids.tolist()]
        assert local.tolist() == want and any(e >= 0 for row in want for e in row)
        assert want[6] == [-1] * 4


@interpreter.kernel_test
def test_topk_softmax_of_equal_logits_names_distinct_experts() -> None:
    _, ids = topk.topk_softmax(torch.zeros(3, 16, device=DEVICE), 4, True)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
