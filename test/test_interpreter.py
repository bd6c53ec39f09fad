"""The repaired interpreter agrees with torch on exactly the operations that the stock one gets wrong."""

from __future__ import annotations

from pathlib import Path

import interpreter
import pytest
import torch
import triton
import triton.language as tl
from interpreter_processes import run_pytest

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.layers.quantization import reference

DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def cast_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs).to(y_ptr.dtype.element_ty))


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c_ptr + offs, tl.dot(tl.load(a_ptr + offs), tl.load(b_ptr + offs)))


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs) + tl.load(y_ptr + offs))


@triton.jit
def zeros_kernel(x_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, x * 0.0)
    tl.store(out_ptr + N + offs, x * -0.0)


@triton.jit
def doubled(x):
    return x + x


@triton.jit
def doubled_kernel(x_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, doubled(tl.load(x_ptr + offs)) - doubled(1))


def values() -> torch.Tensor:
    """Both signs, ties, subnormals of float8, and everything between; within the range of every dtype."""
    torch.manual_seed(0)
    wide = torch.randn(480) * torch.logspace(-8, 1.5, 480)
    special = torch.tensor([0.0, -0.0, 1.0, 1.00390625, 1.01171875, 2**-9, 2**-10, 2**-16, 448.0, -448.0, 0.3])
    return torch.cat([wide, special, torch.zeros(512 - 480 - len(special))]).to(interpreter.DEVICE)


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="Triton 3.6 takes a constant -0.0 for 0.0 on a GPU")
def test_zeros_of_both_signs_are_told_apart() -> None:
    x, out = torch.ones(16, device=interpreter.DEVICE), torch.ones(2, 16, device=interpreter.DEVICE)
    zeros_kernel[(1,)](x, out, N=16)
    assert not out.any() and torch.signbit(out).tolist() == [[False] * 16, [True] * 16]


@interpreter.kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
def test_downcast_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    x = values()
    y = torch.zeros(512, dtype=dtype, device=x.device)
    cast_kernel[(1,)](x, y, 512)
    assert torch.equal(y.float(), x.to(dtype).float())


@interpreter.kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
def test_upcast_is_exact(dtype: torch.dtype) -> None:
    x = values().to(dtype)
    y = torch.zeros(512, device=x.device)
    cast_kernel[(1,)](x, y, 512)
    assert torch.equal(y, x.float())


@interpreter.kernel_test
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_float8_saturates(dtype: torch.dtype, largest: float) -> None:
    x = torch.tensor([1e6, -1e6, largest, -largest], device=interpreter.DEVICE)
    y = torch.zeros(4, dtype=dtype, device=x.device)
    cast_kernel[(1,)](x, y, 4)
    assert y.float().tolist() == [largest, -largest, largest, -largest]


@interpreter.kernel_test
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dot(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    a, b = (torch.randn(32, 32, device=interpreter.DEVICE).to(dtype) for _ in range(2))
    c = torch.full((32, 32), float("nan"), device=a.device)
    dot_kernel[(1,)](a, b, c, 32)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-4, atol=1e-4)


@interpreter.kernel_test
def test_bfloat16_arithmetic() -> None:
    torch.manual_seed(2)
    x, y = (torch.randn(64, device=interpreter.DEVICE).bfloat16() for _ in range(2))
    out = torch.zeros_like(x)
    add_kernel[(1,)](x, y, out, 64)
    assert torch.equal(out, x + y)


@triton.jit
def integers_kernel(x_ptr, y_ptr, out_ptr, wide_ptr, N: tl.constexpr, ROWS: tl.constexpr, SIGNED: tl.constexpr):
    for row in range(ROWS):  # an operator's types are known from the second time on
        offs = row * N + tl.arange(0, N)
        x, y = tl.load(x_ptr + offs), tl.load(y_ptr + offs)
        tl.store(out_ptr + offs, x // y)
        tl.store(out_ptr + ROWS * N + offs, x % y)
        tl.store(out_ptr + 2 * ROWS * N + offs, x << 2)
        tl.store(out_ptr + 3 * ROWS * N + offs, x >> 1)
        tl.store(out_ptr + 4 * ROWS * N + offs, x // 3 - x % 3)
        wide = x.to(tl.int64)
        tl.store(wide_ptr + offs, wide * y + (wide // y if SIGNED else 0))


@interpreter.kernel_test
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_integers(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    low = 0 if dtype == torch.uint8 else -32_000
    x = torch.randint(low, 250 if dtype == torch.uint8 else 32_000, (3, 16)).to(dtype).to(interpreter.DEVICE)
    y = (torch.arange(48).view(3, 16) % 7 + 1).to(dtype).to(interpreter.DEVICE)
    y = y if dtype == torch.uint8 else y * torch.tensor([1, -1] * 8, dtype=dtype, device=y.device)
    out, wide = torch.zeros(5, 3, 16, dtype=dtype, device=x.device), torch.zeros(3, 16, dtype=torch.int64).to(x.device)
    integers_kernel[(1,)](x, y, out, wide, N=16, ROWS=3, SIGNED=low < 0)
    quotient, third = torch.div(x, y, rounding_mode="trunc"), torch.div(x, 3, rounding_mode="trunc")
    expected = torch.stack((quotient, torch.fmod(x, y), x << 2, x >> 1, third - torch.fmod(x, 3)))
    assert torch.equal(out, expected.to(dtype))
    assert torch.equal(wide, x.long() * y.long() + (quotient.long() if low < 0 else 0))


@triton.jit
def dot_scaled_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    m, n, g = tl.arange(0, M)[:, None], tl.arange(0, N)[:, None], tl.arange(0, K // G)[None, :]
    BYTES: tl.constexpr = K // 2 if FORMAT == "e2m1" else K
    k = tl.arange(0, BYTES)[None, :]
    a, b = tl.load(a_ptr + m * BYTES + k), tl.load(b_ptr + n * BYTES + k)
    a_scale, b_scale = tl.load(a_scale_ptr + m * (K // G) + g), tl.load(b_scale_ptr + n * (K // G) + g)
    acc = tl.full((M, N), 2.0, tl.float32)
    c = tl.dot_scaled(a, a_scale, FORMAT, tl.trans(b), b_scale, FORMAT, acc)
    tl.store(c_ptr + m * N + tl.arange(0, N)[None, :], c)


@interpreter.kernel_test
@pytest.mark.skipif(not interpreter.INTERPRETED, reason="only GPUs with block-scaled instructions run all of these")
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4_mxfp8", "nvfp4"])
def test_scaled_dot_is_the_product_of_the_dequantized_operands(name: str) -> None:
    """Formats mxfp8 (e4m3, group 32), mxfp4 (e2m1, group 32) and NVFP4 (e2m1, group 16, e4m3 scales)."""
    scheme, m, n, k = SCHEMES[name], 32, 16, 128
    torch.manual_seed(1)
    spread = torch.logspace(-3, 3, k)
    a, b = reference.quantize(torch.randn(m, k) * spread, scheme), reference.quantize(torch.randn(n, k), scheme)
    out = torch.full((m, n), torch.nan)
    dot_scaled_kernel[(1,)](a.data, a.scale, b.data, b.scale, out, m, n, k, scheme.group[1], FORMAT=scheme.element)
    for q in (a, b):
        q.global_scale = None  # of the whole matrix: no part of the instruction
    expected = reference.dequantize(a, scheme) @ reference.dequantize(b, scheme).T + 2.0
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@interpreter.kernel_test
def test_a_launch_leaves_the_language_as_it_was() -> None:
    """Also one that calls device functions, and one that failed."""
    stock = (tl.load, tl.tensor.__add__, tl.range)
    x, out = torch.arange(16, device=interpreter.DEVICE), torch.zeros(16, dtype=torch.int64, device=interpreter.DEVICE)
    with pytest.raises(Exception):  # noqa: B017
        doubled_kernel[(1,)](x, out, 15)
    for _ in range(2):
        assert (tl.load, tl.tensor.__add__, tl.range) == stock
        doubled_kernel[(1,)](x, out, 16)
        assert torch.equal(out, 2 * x - 2)
    assert (tl.load, tl.tensor.__add__, tl.range) == stock


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)


def test_failures_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a process that a worker of xdist starts, which inherits the worker's variables."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    file = tmp_path / "test_that_fails.py"
    file.write_text("def test_that_fails():\n    assert False\n")
    status, output = run_pytest(["-p", "conftest", "-p", "no:cacheprovider", str(file)])
    assert status == pytest.ExitCode.TESTS_FAILED, output
