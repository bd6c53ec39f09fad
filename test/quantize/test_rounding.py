"""Rounding with smaller errors than those of the nearest values: fitted scales, and GPTQ's compensation."""

from __future__ import annotations

import pytest
import torch

from sglang.quantize.rounding import compensated, fitted
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.layers.quantization.reference import Quantized, dequantize, quantize, quantize_by

FOUR_BITS = ("int4_g32", "int4_g64", "int4_g128", "mxfp4", "nvfp4")
ROWS, COLUMNS = 64, 384
"""Columns of three blocks."""


def layer(columns: int = COLUMNS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight; inputs that correlate and some of which are much larger than others, as those of models; more inputs
    of the same kind, which no rounding sees."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    mix = normal(columns, columns) / columns**0.5 + 0.6 * torch.eye(columns)
    sizes = torch.exp(0.7 * normal(columns))
    return normal(ROWS, columns), (normal(4096, columns) @ mix) * sizes, (normal(1024, columns) @ mix) * sizes


def products_of(x: torch.Tensor) -> torch.Tensor:
    return x.T @ x / len(x)


def output_error(q: Quantized, scheme_name: str, weight: torch.Tensor, x: torch.Tensor) -> float:
    wanted = x @ weight.T
    return ((x @ dequantize(q, SCHEMES[scheme_name]).T - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("name", FOUR_BITS)
def test_compensation_beats_plain_rounding_on_correlated_inputs(name: str) -> None:
    weight, seen, others = layer()
    scheme = SCHEMES[name]
    plain = output_error(quantize(weight, scheme), name, weight, others)
    scaled = output_error(fitted(weight, scheme, squares=seen.square().mean(0)), name, weight, others)
    gptq = output_error(compensated(weight, scheme, products_of(seen)), name, weight, others)
    assert scaled < 0.98 * plain
    assert gptq < 0.78 * plain and gptq < 0.85 * scaled


@pytest.mark.parametrize("name", FOUR_BITS)
def test_inputs_that_do_not_correlate_leave_nothing_to_compensate(name: str) -> None:
    weight, scheme = layer()[0], SCHEMES[name]
    ours, alone = compensated(weight, scheme, torch.eye(COLUMNS)), fitted(weight, scheme)
    assert torch.equal(dequantize(ours, scheme), dequantize(alone, scheme))


@pytest.mark.parametrize("name", FOUR_BITS)
def test_a_fitted_scale_is_never_worse_than_the_plain_one(name: str) -> None:
    weight, scheme = layer()[0], SCHEMES[name]

    def errors(q: Quantized) -> torch.Tensor:
        return (dequantize(q, scheme) - weight).square().unflatten(-1, (-1, scheme.group[1])).sum(-1)

    plain, better = errors(quantize(weight, scheme)), errors(fitted(weight, scheme))
    assert bool((better <= plain).all()) and better.sum() < 0.97 * plain.sum()


@pytest.mark.parametrize("name", FOUR_BITS)
def test_results_are_in_the_stored_form(name: str) -> None:
    """Types and shapes are those of plain rounding, and the codes those of the values."""
    weight, seen, _ = layer()
    scheme, factor = SCHEMES[name], torch.tensor(0.01) if name == "nvfp4" else None
    plain = quantize(weight, scheme, factor)
    for ours in (fitted(weight, scheme, factor), compensated(weight, scheme, products_of(seen), factor)):
        assert (ours.scale.shape, ours.scale.dtype) == (plain.scale.shape, plain.scale.dtype)
        assert (ours.data.shape, ours.data.dtype) == (plain.data.shape, plain.data.dtype)
        assert ours.global_scale == plain.global_scale
        again = quantize_by(dequantize(ours, scheme), scheme, ours.scale, ours.global_scale)
        assert torch.equal(dequantize(again, scheme), dequantize(ours, scheme))


def test_a_last_block_may_be_short_and_inputs_may_be_missing() -> None:
    """Inputs that were zero in all samples, and as few samples as leave the products singular."""
    weight, seen, _ = layer(160)
    few = seen[:20].clone()
    few[:, 40:50] = 0
    q = compensated(weight, SCHEMES["int4_g32"], products_of(few))
    rounded = dequantize(q, SCHEMES["int4_g32"])
    assert bool(rounded.isfinite().all())
    assert output_error(q, "int4_g32", weight, few) < 0.6 * output_error(
        quantize(weight, SCHEMES["int4_g32"]), "int4_g32", weight, few
    )
    assert output_error(compensated(weight, SCHEMES["int4_g32"], torch.zeros(160, 160)), "int4_g32", weight, few) < 0.2
