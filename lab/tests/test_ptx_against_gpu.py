"""Tensors that a GPU wrote beside those of the executor of PTX."""

from __future__ import annotations

import pytest
import torch
from ptx_against_gpu import difference


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_differences_are_counted_whatever_the_shape(shape: tuple[int, ...]) -> None:
    ones = torch.ones(shape)
    assert difference(ones, ones.clone()) == 0
    assert difference(ones, ones + 2 * torch.finfo(ones.dtype).eps) == 2
    assert difference(ones.int(), ones.int() + 3) == 3
