"""Products with few rows against torch, interpreted on a CPU and natively on a GPU."""

from __future__ import annotations

import interpreter
import pytest
import torch
import torch.nn.functional as F

from sglang.srt.layers import native_ops
from sglang.srt.layers.triton_ops import activation, norm, pdl, skinny_gemm
from sglang.srt.layers.triton_ops.skinny_gemm import DEFAULT_TILES, MAX_ROWS, SkinnyTiles, split_k, supports

DEVICE = interpreter.DEVICE
SMALL_TILES = SkinnyTiles(
    gemv={"BLOCK_N": 4, "BLOCK_K": 64, "num_warps": 4},
    gemv_gated=DEFAULT_TILES.gemv_gated,
    skinny={"BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2},
    programs=8,
)


def operands(rows: int, cols: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, size, generator=generator).bfloat16().to(DEVICE)
    w = (torch.randn(cols, size, generator=generator) * size**-0.5).bfloat16().to(DEVICE)
    return x, w


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < 4e-3, f"relative error {error:.2e}"


@interpreter.kernel_test
@pytest.mark.parametrize("rows", [1, 2, MAX_ROWS])
@pytest.mark.parametrize(("cols", "size"), [(64, 256), (70, 192)])
def test_linear(rows: int, cols: int, size: int) -> None:
    x, w = operands(rows, cols, size)
    for _ in range(2):  # the arrival counters must be back at zero
        assert_close(skinny_gemm.skinny_linear(x, w, SMALL_TILES), F.linear(x, w))


@interpreter.kernel_test
def test_gated_linear() -> None:
    x, w = operands(1, 40, 512)
    assert_close(skinny_gemm.linear_silu_and_mul(x, w), native_ops.silu_and_mul(F.linear(x, w)))


@interpreter.kernel_test
def test_what_does_not_fit_goes_to_torch() -> None:
    x, w = operands(3, 16, 100)
    assert not supports(x, w)
    assert torch.equal(skinny_gemm.linear(x, w), F.linear(x, w))
    assert not supports(torch.empty(MAX_ROWS + 1, 4096).bfloat16(), torch.empty(1, 4096).bfloat16())


@pytest.mark.gpu
@pytest.mark.skipif(interpreter.INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dependent_launch", [False, True])
@pytest.mark.parametrize("rows", [1, 3, MAX_ROWS])
@pytest.mark.parametrize(("cols", "size"), [(6144, 4096), (4096, 12288), (1024, 3072), (151936, 1024)])
def test_published_shapes(rows: int, cols: int, size: int, dependent_launch: bool) -> None:
    x, w = operands(rows, cols, size)
    pdl.enable(dependent_launch)
    try:
        for _ in range(3):
            assert_close(skinny_gemm.skinny_linear(x, w), F.linear(x, w))
        assert_close(skinny_gemm.linear_silu_and_mul(x, w), native_ops.silu_and_mul(F.linear(x, w)))
    finally:
        pdl.enable(False)


@pytest.mark.gpu
@pytest.mark.skipif(interpreter.INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
def test_dependent_launches_keep_the_order_of_a_graph() -> None:
    """Every kernel of the chain reads what the one before it wrote."""
    x, w = operands(2, 4096, 4096)
    residual, weight = torch.randn_like(x), torch.ones(4096, device=DEVICE).bfloat16()

    def chain() -> torch.Tensor:
        h, r = x.clone(), residual.clone()
        for _ in range(20):
            h, r = norm.fused_add_rmsnorm(h, r, weight, 1e-6)
            h = skinny_gemm.skinny_linear(h, w)
            h = activation.silu_and_mul(h.repeat(1, 2))
        return h

    expected = chain()
    pdl.enable(True)
    try:
        chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = chain()
        for _ in range(50):
            graph.replay()
            assert torch.equal(result, expected)
    finally:
        pdl.enable(False)


def test_split_covers_k_with_even_parts() -> None:
    tile = {"BLOCK_N": 64, "BLOCK_K": 128}
    for cols, size in [(4096, 4096), (151936, 4096), (4096, 12288), (1024, 2048), (64, 128)]:
        parts, steps = split_k(cols, size, tile, 396), size // 128
        assert 1 <= parts <= max(1, steps // 2)
        assert (parts - 1) * -(-steps // parts) < steps, "no part is empty"


def test_in_interpreter() -> None:
    interpreter.run_file(__file__)
