"""Norms that quantize: bit for bit the kernels that they stand for, and products that take what they made."""

from __future__ import annotations

import dataclasses

import interpreter
import pytest
import torch
from srt.layers.moe.moe_harness import make_case, tile_configs_of
from srt.layers.quantization.test_quant_linear import weight_of

from sglang.srt.configs.activation import SILU
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.distributed.groups import Group
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.layers import native_ops
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import fused_moe
from sglang.srt.layers.moe.fused_moe_triton.tiles import MoeTiles, tile
from sglang.srt.layers.quantization import activations
from sglang.srt.layers.quantization.activations import QuantizedActivations, RowForm, RowFormat
from sglang.srt.layers.residual import SumJoin, SumStream
from sglang.srt.layers.triton_ops import linear_products, linear_tiles, norm
from sglang.srt.layers.triton_ops.norm_quantize import add_rmsnorm_quantize
from sglang.srt.layers.triton_ops.quantize import quantize_activation

DEVICE = interpreter.DEVICE
EPS = 1e-6
FORMS: dict[RowForm, str] = {"token": "fp8_channel", "group128": "fp8_block"}
"""With a scheme whose activations have that form."""


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def rows_of(tokens: int, size: int, form: RowForm) -> QuantizedActivations:
    x, residual, weight = randn(tokens, size), randn(tokens, size, seed=1), randn(size, seed=2)
    return add_rmsnorm_quantize(x, residual, weight, EPS, form)[0]


def test_few_rows_are_those_of_products() -> None:
    assert activations.MIN_ROWS == linear_tiles.FEW_ROWS + 1


@interpreter.kernel_test
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tokens", "size"), [(4, 256), (3, 384), (5, 96), (0, 256)])
def test_gives_what_two_launches_give(tokens: int, size: int, form: RowForm) -> None:
    x, residual, weight = randn(tokens, size), randn(tokens, size, seed=1) * 3, randn(size, seed=2)
    if tokens:
        x[0], residual[0] = 0.0, 0.0
    normed, total = norm.fused_add_rmsnorm(x.clone(), residual.clone(), weight, EPS)
    data, scale = quantize_activation(normed, SCHEMES[FORMS[form]])
    rows, actual = add_rmsnorm_quantize(x, residual, weight, EPS, form)
    assert torch.equal(actual, total) and torch.equal(rows.values, normed)
    assert torch.equal(rows.data.view(torch.uint8), data.view(torch.uint8)) and torch.equal(rows.scale, scale)


@interpreter.kernel_test
@pytest.mark.pairs
@pytest.mark.parametrize("tokens", [2, 5])
@pytest.mark.parametrize("name", ["fp8_channel", "fp8_block", "int8_channel"])
@pytest.mark.parametrize("form", FORMS)
def test_linear_products_of_rows(tokens: int, name: str, form: RowForm) -> None:
    """Of the weight's own form without another launch, of another form by their values."""
    weight = weight_of(name, (32,), 256)
    rows = rows_of(tokens, 256, form)
    arch = arch_by_name("sm_120")
    configs = linear_tiles.tile_configs_of(weight.scheme, (*weight.shape, False), arch)
    product = linear_products.quantized_linear(weight, arch, configs)
    wanted = product(rows.values)
    assert torch.equal(product(rows), wanted)
    spoilt = product(dataclasses.replace(rows, data=torch.zeros_like(rows.data)))
    assert torch.equal(spoilt, wanted) == (FORMS[form] != name or tokens < activations.MIN_ROWS)


@interpreter.kernel_test
@pytest.mark.parametrize("form", FORMS)
def test_experts_products_of_rows(form: RowForm) -> None:
    case = make_case(FORMS[form], 9, hidden=256, inter=128, device=DEVICE)
    one = tile(16, 32, 128, 2, 4, 2)
    given = (case.w13, case.w2, case.weights, case.ids)
    rows = rows_of(9, 256, form)
    configs = tile_configs_of(case.w13, case.w2, case.ids, tiles=MoeTiles(float("inf"), one, one))
    wanted = fused_moe(rows.values, *given, SILU, configs)
    assert torch.equal(fused_moe(rows, *given, SILU, configs), wanted)


class Block:
    """Looks at its input."""

    def __init__(self, form: RowForm | None) -> None:
        self.row_format = None if form is None else RowFormat(form)

    def defer_all_reduce(self) -> None:
        return None


@interpreter.kernel_test
@pytest.mark.parametrize("form", [None, *FORMS])
def test_norms_quantize_for_blocks_that_take_it(form: RowForm | None) -> None:
    made = RMSNorm.__new__(RMSNorm)
    made.weight, made.eps = randn(256, seed=2), EPS
    made._norm, made._add_norm = native_ops.rmsnorm, native_ops.fused_add_rmsnorm
    join = SumJoin(made, None)
    join.attach(Block(form))
    for tokens in (2, 3):
        stream = SumStream(randn(tokens, 256))
        assert isinstance(join.before(stream), torch.Tensor), "there is no sum yet"
        join.after(stream, randn(tokens, 256, seed=1))
        found = join.before(stream)
        assert isinstance(found, QuantizedActivations) == (form is not None and tokens == 3)
        assert not isinstance(found, QuantizedActivations) or found.form == form
        stream.group = Group()
        join.after(stream, randn(tokens, 256, seed=1))
        assert isinstance(join.before(stream), QuantizedActivations) == (form is not None and tokens == 3)


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
