"""Types whose special values are codes, and what is never read."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.errors import UserError
from sglang.srt.layers.parameter import Param, PartKey, TensorPart
from sglang.srt.model_loader import weight_check
from sglang.srt.model_loader.weight_check import refuse_not_finite


def check(name: str, tensor: torch.Tensor, filled: slice = slice(None)) -> None:
    param = Param(name, tensor, {PartKey(): TensorPart(tuple(tensor[filled].shape), (), (filled,))})
    refuse_not_finite({name: param}, {"stored": [(param, PartKey())]}, "model")


def codes(*values: int) -> torch.Tensor:
    return torch.tensor([[1, 2, *values]], dtype=torch.uint8).repeat(3, 1)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_e4m3(code: int) -> None:
    check("a.weight", codes(0x7E, 0xFE).view(torch.float8_e4m3fn))
    with pytest.raises(UserError, match="stored"):
        check("a.weight", codes(code).view(torch.float8_e4m3fn))


@pytest.mark.parametrize("code", [0x7C, 0xFC, 0x7E])
def test_e5m2(code: int) -> None:
    check("a.weight", codes(0x7B, 0xFB).view(torch.float8_e5m2))
    with pytest.raises(UserError, match="stored"):
        check("a.weight", codes(code).view(torch.float8_e5m2))


def test_exponents_of_scales_and_packed_codes() -> None:
    check("a.weight_scale", codes(254))
    check("a.weight", codes(255))
    check("a.weight", codes(255).view(torch.int8))
    with pytest.raises(UserError, match="stored"):
        check("a.weight_scale", codes(255))


def test_more_than_is_compared_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_check, "CHUNK", 2)
    with pytest.raises(UserError, match="stored"):
        check("a.weight", codes(3, 4, 0x7F).view(torch.float8_e4m3fn))


def test_what_no_part_fills_is_never_read() -> None:
    tensor = torch.ones(4, 3)
    tensor[3] = torch.nan
    check("a.weight", tensor, slice(0, 3))
    with pytest.raises(UserError, match="stored"):
        check("a.weight", tensor, slice(0, 4))


def test_what_was_computed_while_loading_goes_by_its_own_name() -> None:
    scale = Param("a.weight_scale", torch.tensor([1.0, torch.nan]), {})
    with pytest.raises(UserError, match=r"a\.weight_scale"):
        refuse_not_finite({scale.name: scale}, {}, "model")


def test_scales_of_activations_may_have_holes() -> None:
    check("a.input_scale", torch.tensor([1.0, torch.inf]))
