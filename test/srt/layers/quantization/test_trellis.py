"""EXL3's matrices in plain torch, against numpy that reads them bit by bit."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.configs.trellis import CODEBOOKS, Trellis
from sglang.srt.hardware.arch import CPU
from sglang.srt.layers.quantization import trellis
from sglang.srt.layers.quantization.trellis import TrellisModule, TrellisWeight

from ...models import trellis_checkpoints as oracle

FORMS = [(2 * bits, codebook) for bits in range(1, 9) for codebook in CODEBOOKS] + [
    (2 * bits + 1, "mul1") for bits in range(1, 8)
]


@pytest.mark.parametrize(("codebook", "zero", "deviation"), [
    ("3inst", 0.76807, 1.244), ("mcg", 1.84375, 1.244), ("mul1", -3.4531, 1.0003),
])  # fmt: skip
def test_codebooks_have_their_known_values(codebook: str, zero: float, deviation: float) -> None:
    values = trellis.codebook_values(codebook)
    assert float(values[0]) == pytest.approx(zero, rel=1e-4)
    assert float(values.float().std()) == pytest.approx(deviation, abs=1e-3)
    assert torch.equal(values, torch.from_numpy(oracle.value(codebook)))


@pytest.mark.parametrize(("half_bits", "codebook"), FORMS)
def test_tiles_are_decoded_bit_by_bit(half_bits: int, codebook: str) -> None:
    tensors = oracle.random_trellis(128, 128, half_bits, codebook, torch.Generator().manual_seed(half_bits))
    tiles = tensors["trellis"][:2, :3].contiguous()
    got = trellis.decode(tiles, Trellis(half_bits, codebook))
    assert torch.equal(got.float(), oracle.inner_weight(tiles, half_bits, codebook))


@pytest.mark.parametrize(("rows", "cols", "half_bits", "codebook"), [
    (128, 256, 8, "mul1"), (200, 128, 5, "mul1"), (128, 130, 6, "mcg"), (72, 40, 4, "3inst"),
])  # fmt: skip
def test_products_are_those_of_the_equal_dense_weight(rows: int, cols: int, half_bits: int, codebook: str) -> None:
    generator = torch.Generator().manual_seed(rows)
    tensors = oracle.random_trellis(rows, cols, half_bits, codebook, generator)
    module = TrellisModule(Trellis(half_bits, codebook), tensors["trellis"], tensors["suh"], tensors["svh"], 0, rows)
    weight, want = TrellisWeight([module], cols), oracle.stands_for(tensors, rows, cols)
    torch.testing.assert_close(weight.dequantized(), want, rtol=0, atol=1e-5)
    x, bias = torch.randn(2, 3, cols, generator=generator), torch.randn(rows, generator=generator)
    got = trellis.trellis_linear(weight, CPU, ())(x, bias)
    torch.testing.assert_close(got, x @ want.T + bias, rtol=1e-4, atol=1e-4)
