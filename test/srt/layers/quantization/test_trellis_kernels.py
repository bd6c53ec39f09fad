"""Kernels of EXL3's products against plain torch, interpreted on a CPU and natively on a GPU."""

from __future__ import annotations

import interpreter
import pytest
import torch

from sglang.srt.configs.activation import SILU
from sglang.srt.configs.trellis import CODEBOOKS, Trellis, padded
from sglang.srt.hardware.arch import CPU
from sglang.srt.layers.quantization import trellis, trellis_banks
from sglang.srt.layers.quantization.trellis import TrellisModule, TrellisWeight
from sglang.srt.layers.quantization.trellis_banks import TrellisBank, places_of
from sglang.srt.layers.triton_ops import trellis_experts, trellis_products

DEVICE = interpreter.DEVICE
FORMS = [(2 * bits, CODEBOOKS[bits % 3]) for bits in range(1, 9)] + [
    (8, codebook) for codebook in CODEBOOKS if codebook != CODEBOOKS[1]
] + [(2 * bits + 1, "mul1") for bits in range(1, 8)]  # fmt: skip


def module(
    rows: int, cols: int, half_bits: int, codebook: str, first: int = 0, held: int | None = None
) -> TrellisModule:
    form, generator = Trellis(half_bits, codebook), torch.Generator().manual_seed(rows + half_bits)
    held = held or padded(first + rows)
    shape = (padded(cols) // 16, held // 16, form.words)
    tiles = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16)
    suh, svh = torch.randn(padded(cols), generator=generator), 0.05 * torch.randn(held, generator=generator)
    return TrellisModule(form, *(part.to(DEVICE) for part in (tiles, suh.half(), svh.half())), first, rows)


def check(weight: TrellisWeight, rows: int, dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, weight.cols, generator=generator).to(DEVICE, dtype)
    bias = torch.randn(weight.shape[0], generator=generator).to(DEVICE, dtype)
    want = trellis.trellis_linear(weight, CPU, ())(x.float(), bias.float())
    got = trellis_products.trellis_linear(weight, CPU, ())(x, bias, out_dtype)
    assert got.dtype == (out_dtype or dtype) and got.shape == want.shape
    # Inputs are rounded to float16 twice, and of many rows the sums are.
    assert float((got.float() - want).norm() / want.norm()) < (3e-3 if dtype == torch.bfloat16 else 1e-3)


@interpreter.kernel_test
@pytest.mark.values
@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize(("half_bits", "codebook"), FORMS)
def test_every_form(half_bits: int, codebook: str, rows: int) -> None:
    check(TrellisWeight([module(128, 128, half_bits, codebook)], 128), rows, torch.float16)


@interpreter.kernel_test
@pytest.mark.parametrize("rows", [5, 20])
def test_modules_with_bits_of_their_own(rows: int) -> None:
    """Padded columns and rows, a head's rows between blocks, and slices of one module with its input scales."""
    first, other = module(200, 300, 8, "mul1"), module(100, 300, 6, "mcg", first=60)
    slice_of_first = TrellisModule(other.form, other.tiles, first.suh, other.svh, 0, 128)
    check(TrellisWeight([first, other, slice_of_first], 300), rows, torch.bfloat16, torch.float32)


@interpreter.kernel_test
def test_columns_are_split() -> None:
    assert trellis_products.splits_of(128, 1024) == (4, 256)
    check(TrellisWeight([module(128, 1024, 8, "mul1")], 1024), 3, torch.bfloat16)


@interpreter.kernel_test
def test_a_matrix_is_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trellis_products, "DECODED_BYTES", 2 * 128 * 128)
    check(TrellisWeight([module(300, 128, 8, "mul1")], 128), 17, torch.bfloat16)


def bank(rows: int, cols: int, half_bits: int, codebook: str, num: int) -> TrellisBank:
    each = [module(rows, cols, half_bits, codebook) for _ in range(num)]
    generator = torch.Generator().manual_seed(half_bits)
    tiles, suh, svh = (torch.stack([getattr(one, part) for one in each]) for part in ("tiles", "suh", "svh"))
    tiles = torch.randint(-(1 << 15), 1 << 15, tiles.shape, generator=generator, dtype=torch.int16).to(DEVICE)
    factors = 0.5 + torch.rand(num, 1, generator=generator).to(DEVICE)
    form, places = each[0].form, places_of(rows, svh.shape[1], svh.device)
    return TrellisBank(form, tiles, (suh * factors).half(), (svh * factors).half(), rows, cols, places)


@interpreter.kernel_test
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_experts_by_routing(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of 16 pairs, or of 64, and chunks of tokens; some choices are other ranks'."""
    monkeypatch.setattr(trellis_experts, "CHUNK_TOKENS", 60)
    num, inter, hidden = 3, 128, 160
    w13 = (bank(inter, hidden, 6, "mul1", num), bank(inter, hidden, 7, "mul1", num))
    w2 = (bank(hidden, inter, 8, "mcg", num),)
    generator = torch.Generator().manual_seed(tokens)
    x = (0.5 * torch.randn(tokens, hidden, generator=generator)).to(DEVICE, torch.bfloat16)
    ids = torch.stack([torch.randperm(num, generator=generator)[:2] for _ in range(tokens)]).to(torch.int32)
    ids[::4, 0] = -1
    weights = torch.rand(tokens, 2, generator=generator)
    args = weights.to(DEVICE), ids.to(DEVICE), SILU, ()
    want = trellis_banks.fused_moe(x.float(), w13, w2, *args)
    got = trellis_experts.fused_moe(x, w13, w2, *args)
    assert got.dtype == x.dtype and float((got.float() - want).norm() / want.norm()) < 8e-3


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
