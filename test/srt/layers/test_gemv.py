"""Products with one row against torch, interpreted on a CPU and natively on a GPU; and dependent launches."""

from __future__ import annotations

from collections.abc import Callable

import interpreter
import pytest
import torch
import torch.nn.functional as F

from sglang.srt.layers import native_ops
from sglang.srt.layers.triton_ops import activation, gemv, norm, pdl

DEVICE = interpreter.DEVICE
SMALL_TILE = {"BLOCK_N": 4, "BLOCK_K": 64, "num_warps": 4}


def operands(rows: int, cols: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(cols)
    x = torch.randn(rows, size, generator=generator).bfloat16().to(DEVICE)
    w = (torch.randn(cols, size, generator=generator) * size**-0.5).bfloat16().to(DEVICE)
    return x, w


def followed_by_nan(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with memory behind them of which nothing may be read."""
    memory = torch.full((x.numel() + 8192,), float("nan"), dtype=x.dtype, device=x.device)
    memory[: x.numel()] = x.flatten()
    return memory[: x.numel()].view(x.shape)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < 4e-3, f"relative error {error:.2e}"


@interpreter.kernel_test
@pytest.mark.parametrize(("cols", "size"), [(64, 256), (70, 192)])
def test_one_row(cols: int, size: int) -> None:
    x, w = operands(1, cols, size)
    assert_close(gemv.gemv(x, w, SMALL_TILE), F.linear(x, w))


@interpreter.kernel_test
def test_one_row_in_fp32() -> None:
    x, w = operands(1, 70, 192)
    out = gemv.gemv(x * 8, w, SMALL_TILE, torch.float32)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), (x * 8).double() @ w.double().T, rtol=1e-5, atol=1e-5)


@interpreter.kernel_test
@pytest.mark.parametrize("size", [64, 192, 80, 208])
@pytest.mark.parametrize("fp32", [False, True], ids=["16 bits", "fp32"])
def test_a_bias_and_columns_that_the_tile_does_not_divide(size: int, fp32: bool) -> None:
    x, w = operands(1, 70, size)
    w, dtype = (w.float() * 1.001, torch.float32) if fp32 else (w, torch.bfloat16)
    bias = torch.randn(70, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    out = gemv.gemv(x, w, SMALL_TILE, dtype, bias)
    exact = x.double() @ w.double().T + bias.double()
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=1e-5 if fp32 else 4e-3, atol=1e-5)
    assert torch.equal(gemv.gemv(followed_by_nan(x), followed_by_nan(w), SMALL_TILE, dtype, bias), out)


@interpreter.kernel_test
@pytest.mark.parametrize(("cols", "size"), [(3, 512), (5, 2048), (2, 2880), (1, 8208), (4, 16_400)])
@pytest.mark.parametrize("fp32", [False, True], ids=["16 bits", "fp32"])
def test_few_outputs_are_whole_rows_of_a_program(cols: int, size: int, fp32: bool) -> None:
    """Routers, and the gates of shared experts."""
    x, w = operands(1, cols, size)
    w, dtype = (w.float() * (1 + 2**-12), torch.float32) if fp32 else (w, torch.bfloat16)
    assert gemv.tile_for(cols, size) in gemv.WHOLE_ROW_TILES and gemv.tile_for(4096, size) == gemv.TILE
    bias = torch.randn(cols, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    x, w = followed_by_nan(x), followed_by_nan(w)
    out = gemv.gemv(x, w, None, dtype, bias)
    exact = x.double() @ w.double().T + bias.double()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5 if fp32 else 4e-3, atol=1e-5)


@interpreter.kernel_test
@pytest.mark.parametrize("linear", [gemv.linear, native_ops.linear])
@pytest.mark.parametrize("rows", [1, 3])
def test_weights_in_fp32_are_multiplied_in_fp32(linear: Callable[..., torch.Tensor], rows: int) -> None:
    """As routers that keep theirs so; cuBLAS may round to TF32 if told to, which it is not."""
    x, w = operands(rows, 40, 528)
    wide = w.float() * (1 + 2**-12)
    out = linear(x, wide, None, torch.float32)
    torch.testing.assert_close(out.double(), x.double() @ wide.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(interpreter.INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 2, 64])
@pytest.mark.parametrize("linear", [gemv.linear, native_ops.linear])
def test_logits_keep_the_digits_of_their_sums(linear: Callable[..., torch.Tensor], rows: int) -> None:
    x, w = operands(rows, 151936, 1024)
    out = linear(x * 8, w, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    exact = torch.cat([(x * 8).double() @ part.double().T for part in w.split(16384)], dim=1)
    assert (out - exact).abs().max() < 1e-3 and exact.abs().max() > 32


@interpreter.kernel_test
@pytest.mark.parametrize(("rows", "size"), [(2, 512), (1, 96), (1, 520)])
def test_what_does_not_fit_goes_to_torch(rows: int, size: int) -> None:
    x, w = operands(rows, 16, size)
    assert not gemv.supports(x, w)
    assert torch.equal(gemv.linear(x, w), F.linear(x, w))


@pytest.mark.gpu
@pytest.mark.skipif(interpreter.INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dependent_launch", [False, True])
@pytest.mark.parametrize(
    ("cols", "size"),
    [(6144, 4096), (4096, 12288), (1024, 3072), (151936, 1024), (5120, 2880), (128, 2048), (32, 2880), (256, 7168)],
)
def test_published_shapes(cols: int, size: int, dependent_launch: bool) -> None:
    x, w = operands(1, cols, size)
    pdl.enable(dependent_launch)
    try:
        for _ in range(3):
            assert_close(gemv.linear(x, w), F.linear(x, w))
    finally:
        pdl.enable(False)


@pytest.mark.gpu
@pytest.mark.skipif(interpreter.INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
def test_dependent_launches_keep_the_order_of_a_graph() -> None:
    """Every kernel of the chain reads what the one before it wrote."""
    x, w = operands(1, 4096, 4096)
    residual, weight = torch.randn_like(x), torch.ones(4096, device=DEVICE).bfloat16()

    def chain() -> torch.Tensor:
        h, r = x.clone(), residual.clone()
        for _ in range(20):
            h, r = norm.fused_add_rmsnorm(h, r, weight, 1e-6)
            h = gemv.gemv(h, w)
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


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
