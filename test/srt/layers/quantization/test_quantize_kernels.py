"""Activation quantization kernels: bit for bit what the reference rounds to."""

from __future__ import annotations

import interpreter
import pytest
import torch

from sglang.srt.configs.quant_scheme import SCHEMES, Scheme
from sglang.srt.layers.quantization import reference
from sglang.srt.layers.triton_ops.quantize import encode_e2m1, quantize_activation, quotient

DEVICE = interpreter.DEVICE
SHAPES = [(1, 256), (5, 384), (3, 160), (17, 96)]


def activations(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Of several magnitudes, with zeros, an outlier, a row of zeros and a group of zeros."""
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows * cols))
    x *= torch.logspace(-4, 4, cols)[torch.randperm(cols, generator=torch.Generator().manual_seed(1))]
    x[:, ::7] = 0.0
    x[0, cols // 2] = 3000.0
    x[-1, :16] = 0.0
    if rows > 2:
        x[1] = 0.0
    return x.to(dtype).to(DEVICE)


def value(data: torch.Tensor, scale: torch.Tensor, scheme: Scheme, factor: torch.Tensor | None) -> torch.Tensor:
    """What the quantized activation stands for, by the reference's own arithmetic, in fp32."""
    data, scale = data.cpu(), scale.cpu()
    group = {"tensor": (0, 0), "token": (1, 0), "group128": (1, 128), "mxfp8": (1, 32), "nvfp4": (1, 16)}
    kinds = {"mxfp8": "e8m0", "nvfp4": "e4m3"}
    element = "e2m1" if scheme.activation == "nvfp4" else "int8" if scheme.element == "int8" else "e4m3"
    assert scheme.activation is not None
    as_weight = Scheme("x", element, group[scheme.activation], kinds.get(scheme.activation, "float32"), None)
    held = scale.squeeze(0) if scheme.activation == "tensor" else scale
    return reference.dequantize(
        reference.Quantized(data, held, None if factor is None else factor.squeeze(0)), as_weight
    )


@interpreter.kernel_test
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_channel", "int8_channel", "fp8_block", "mxfp8", "mxfp4_mxfp8"])
def test_dynamic_scales(name: str, shape: tuple[int, int]) -> None:
    scheme = SCHEMES[name]
    x = activations(*shape)
    data, scale = quantize_activation(x, scheme)
    want = reference.round_activation(x.cpu(), scheme)
    assert torch.equal(value(data, scale, scheme, None), want)
    assert scale.shape == {
        "fp8_tensor": (1,),
        "fp8_channel": shape[:1],
        "int8_channel": shape[:1],
        "fp8_block": (shape[0], -(-shape[1] // 128)),
    }.get(name, (shape[0], shape[1] // 32))


@interpreter.kernel_test
@pytest.mark.parametrize("step", [0.5, 0.013])
def test_a_static_scale_saturates(step: float) -> None:
    scheme, x = SCHEMES["fp8_tensor"], activations(4, 200)
    given = torch.tensor([step], device=DEVICE)
    data, scale = quantize_activation(x, scheme, given)
    assert scale is given
    want = reference.round_activation(x.cpu(), scheme, given.cpu())
    assert torch.equal(value(data, scale, scheme, None), want)
    assert data.float().abs().max() == 448.0, "the outlier is beyond the scale"


@interpreter.kernel_test
@pytest.mark.parametrize("shape", [(1, 256), (7, 96)])
@pytest.mark.parametrize("factor", [1.0, 0.0021, 40.0])
def test_nvfp4(shape: tuple[int, int], factor: float) -> None:
    scheme, x = SCHEMES["nvfp4"], activations(*shape)
    whole = torch.tensor([factor], device=DEVICE)
    data, scale = quantize_activation(x, scheme, whole)
    assert data.dtype == torch.uint8 and scale.dtype == torch.float8_e4m3fn
    assert data.shape == (shape[0], shape[1] // 2) and scale.shape == (shape[0], shape[1] // 16)
    want = reference.round_activation(x.cpu(), scheme, whole.cpu().squeeze(0))
    assert torch.equal(value(data, scale, scheme, whole.cpu()), want)


@interpreter.kernel_test
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("name", "largest"), [("fp8_tensor", 448.0), ("nvfp4", 448.0 * 6.0)])
def test_infinity_saturates_by_a_static_scale(name: str, largest: float, sign: float, dtype: torch.dtype) -> None:
    """Products of 16 bits may overflow; so do quotients by a small scale."""
    scheme, x = SCHEMES[name], torch.ones(2, 64, dtype=dtype, device=DEVICE)
    x[0, 5], x[1, 7] = sign * torch.inf, sign * torch.finfo(dtype).max
    whole = torch.tensor([2.0**-10], device=DEVICE)
    data, scale = quantize_activation(x, scheme, whole)
    got = value(data, scale, scheme, whole.cpu() if name == "nvfp4" else None)
    assert got[0, 5] == got[1, 7] == sign * largest * 2.0**-10
    assert torch.equal(got, reference.round_activation(x.cpu(), scheme, whole.cpu().squeeze(0)))


@interpreter.kernel_test
@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_channel", "fp8_block", "mxfp8", "nvfp4"])
def test_nan_stays_in_its_row(name: str) -> None:
    scheme, x = SCHEMES[name], torch.ones(3, 256, dtype=torch.bfloat16, device=DEVICE)
    x[1, 5] = torch.nan
    whole = torch.tensor([0.5], device=DEVICE) if name in ("fp8_tensor", "nvfp4") else None
    data, scale = quantize_activation(x, scheme, whole)
    got = value(data, scale, scheme, whole.cpu() if name == "nvfp4" else None)
    assert got.isnan().any(dim=1).tolist() == [False, True, False]


@interpreter.kernel_test
def test_every_tie_of_e2m1_goes_to_the_even_code() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x, out, N: tl.constexpr):
        at = tl.arange(0, N)
        tl.store(out + at, encode_e2m1(tl.load(x + at)).to(tl.uint8))

    ties = torch.tensor([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = torch.cat((ties, ties + 1e-4, ties - 1e-4, torch.tensor([1e9, 6.0, 7.0, 0.1, 2.0, 3.0, 4.0, 1.0])))
    x = torch.cat((near, -near)).to(DEVICE)
    out = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    kernel[(1,)](x, out, len(x))
    assert torch.equal(out.cpu(), reference.encode_e2m1(x.cpu()))


@interpreter.kernel_test
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quotients_are_rounded_to_nearest(dtype: torch.dtype) -> None:
    """Of every significand that 16 bits hold, by some of the scales'; no other bit of either matters."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x, steps, out, N: tl.constexpr):
        step = tl.load(steps + tl.program_id(0))
        at = tl.arange(0, N)
        values = quotient(tl.load(x + at).to(tl.float32), step, tl.math.div_rn(1.0, step))
        tl.store(out + tl.program_id(0) * N + at, values)

    bits = 7 if dtype == torch.bfloat16 else 10
    x = (1.0 + torch.arange(1 << bits) / (1 << bits)).to(dtype)
    steps = 1.0 + torch.randint(0, 1 << 23, (257,), generator=torch.Generator().manual_seed(0)) / (1 << 23)
    steps[0] = 2.0 - 2.0**-23
    out = torch.empty((len(steps), len(x)), device=DEVICE)
    kernel[(len(steps),)](x.to(DEVICE), steps.to(DEVICE), out, len(x))
    assert torch.equal(out.cpu(), x.float()[None, :] / steps[:, None])


@interpreter.kernel_test
def test_rows_may_be_strided_and_none_is_fine() -> None:
    wide = activations(4, 512)
    part = wide[:, 128:256]
    for name in ("fp8_channel", "fp8_block", "mxfp8"):
        data, scale = quantize_activation(part, SCHEMES[name])
        packed, packed_scale = quantize_activation(part.contiguous(), SCHEMES[name])
        assert torch.equal(data.float(), packed.float()) and torch.equal(scale, packed_scale)
        empty, _ = quantize_activation(part[:0], SCHEMES[name])
        assert empty.shape == (0, 128)


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
