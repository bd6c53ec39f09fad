"""The reference formats against their definitions, element by element."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.configs.quant_scheme import SCHEMES, Scheme
from sglang.srt.layers.quantization import reference
from sglang.srt.layers.quantization.reference import dequantize, quantize, round_activation


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0.0), (0.26, 0.5), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (2.51, 3.0), (3.5, 4.0), (5.0, 4.0),
     (5.01, 6.0), (6.9, 6.0), (-0.75, -1.0), (-100.0, -6.0)],
)  # fmt: skip
def test_e2m1_rounds_to_nearest_even(value: float, rounded: float) -> None:
    assert reference.decode_e2m1(reference.encode_e2m1(torch.tensor([value]))).item() == rounded


def test_e2m1_codes_survive() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(reference.encode_e2m1(reference.decode_e2m1(codes)), codes)
    assert torch.equal(reference.unpack_nibbles(reference.pack_nibbles(codes)), codes)
    assert reference.pack_nibbles(torch.tensor([1, 2])).item() == 0x21


def test_e8m0() -> None:
    assert reference.decode_e8m0(torch.tensor([127, 128, 0, 254], dtype=torch.uint8)).tolist() == [
        1.0, 2.0, 2.0**-127, 2.0**127,
    ]  # fmt: skip
    assert reference.decode_e8m0(torch.tensor(255, dtype=torch.uint8)).isnan()


BOUNDS = {"e4m3": 2**-4, "int8": 1 / 250, "int4": 1 / 14, "e2m1": 0.34}
"""Largest error of a value relative to the largest one, with room for the rounding of scales."""


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda s: s.name)
@pytest.mark.parametrize("shape", [(128, 256), (3, 192, 384), (100, 128)])
def test_round_trip(scheme: Scheme, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.rand(shape[-2], 1).exp2() * 0.02
    q = quantize(weight, scheme)
    rows, cols = shape[-2:]
    assert q.data.shape == (*shape[:-1], cols if scheme.bits == 8 else cols // 2)
    assert q.scale.shape == (*shape[:-2], *scheme.scale_shape(rows, cols))
    assert (q.global_scale is not None) == scheme.global_scale
    back = dequantize(q, scheme)
    assert (back - weight).abs().max() <= BOUNDS[scheme.element] * weight.abs().max()
    # What is representable stays as it is.
    again = dequantize(quantize(back, scheme), scheme)
    if scheme.element != "int4":
        torch.testing.assert_close(again, back, rtol=2e-2, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda s: s.name)
def test_a_gpu_gives_the_same_bits(scheme: Scheme) -> None:
    """Quotients of bfloat16 numbers have ties, which go the other way where the last bit of a scale differs."""
    weight = torch.randn(2, 256, 512, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    here, there = quantize(weight, scheme), quantize(weight.cuda(), scheme)
    for mine, other in ((here.data, there.data), (here.scale, there.scale), (here.global_scale, there.global_scale)):
        assert (mine is None) == (other is None)
        assert mine is None or torch.equal(mine.view(torch.uint8), other.cpu().view(torch.uint8))
    x = weight[0]
    assert torch.equal(round_activation(x.cuda(), scheme).cpu(), round_activation(x, scheme))


def test_zero_weights_stay_zero() -> None:
    for scheme in SCHEMES.values():
        assert not dequantize(quantize(torch.zeros(128, 128), scheme), scheme).any()


def test_activation() -> None:
    x = torch.randn(5, 256)
    for scheme in SCHEMES.values():
        rounded = round_activation(x, scheme)
        assert (rounded - x).norm() / x.norm() < (0.12 if scheme.activation == "nvfp4" else 0.04)
        if scheme.activation is None:
            assert torch.equal(rounded, x)
    static = round_activation(torch.tensor([[1.0, 1000.0]]), SCHEMES["fp8_tensor"], torch.tensor(1.0))
    assert static.tolist() == [[1.0, 448.0]]
