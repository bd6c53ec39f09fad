"""Lengths of the rows of W + B A, found by a layer's own product, whatever it does to its inputs."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.layers import adapter_scales
from sglang.srt.layers.adapter_scales import BaseProduct
from sglang.srt.layers.quantization import reference

ROWS, COLS, PADDED, RANK = 48, 256, 288, 3
FACTORS = {"static": torch.tensor(0.037), "nvfp4": torch.tensor(0.0037)}


@pytest.mark.parametrize("form", ["16 bits", "fp8_channel", "fp8_block", "static", "nvfp4", "int8"])
def test_lengths(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than two rows are quantized as the GPU's kernels do. Behind the 256 columns there is padding."""
    monkeypatch.setattr(adapter_scales, "MOST_COLUMNS", 100)
    generator = torch.Generator().manual_seed(len(form))
    weight = torch.randn(ROWS, PADDED, generator=generator) * 0.05
    weight[:, COLS:] = 0.0
    weight[:, :3] = 0.0
    scheme = SCHEMES.get("fp8_tensor" if form == "static" else "int8_channel" if form == "int8" else form)
    bias = torch.randn(ROWS, generator=generator)

    def product(x: torch.Tensor) -> torch.Tensor:
        rounded = x if scheme is None or len(x) < 3 else reference.round_activation(x, scheme, FACTORS.get(form))
        return (rounded.float() @ weight.T + bias).to(x.dtype)

    a = torch.randn(2, RANK, PADDED, generator=generator) * PADDED**-0.5
    a[..., COLS:] = 0.0
    b = torch.randn(ROWS, RANK, generator=generator) * 0.1
    parts = (torch.arange(ROWS) % 3 > 1).to(torch.int32)
    delta = torch.stack([b[row] @ a[parts[row]] for row in range(ROWS)])
    found = BaseProduct(product, COLS, None).lengths(a, b, parts)
    torch.testing.assert_close(found, (weight + delta).norm(dim=1), rtol=1e-4, atol=0)
