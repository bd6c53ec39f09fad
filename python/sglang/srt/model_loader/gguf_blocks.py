"""Turns blocks of GGUF files into numbers, or into the codes and scales of our own four-bit schemes."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from sglang.srt.configs.gguf.types import TensorType

CHUNK = 1 << 24
"""Elements that are dequantized at a time: they take four bytes each, and several times as much on the way."""
_WIDE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dequantized(blocks: torch.Tensor, kind: TensorType, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values of rows of blocks, uint8 [rows, bytes], as [rows, elements]: those of 16 or 32 bits as they
    are, the others in `dtype`, rounded from the fp32 that the format defines."""
    if kind.wide:
        return blocks.view(_WIDE[kind.wide])
    rows, cols = blocks.shape[0], blocks.shape[1] // kind.size * kind.elements
    out = torch.empty((rows, cols), dtype=dtype)
    step = max(1, CHUNK // cols)
    number = gguf.GGMLQuantizationType(kind.number)
    for begin in range(0, rows, step):
        with np.errstate(all="ignore"):  # scales that are NaN are refused once the weights are loaded
            values = gguf.dequantize(blocks[begin : begin + step].numpy(), number)
        out[begin : begin + step] = torch.from_numpy(np.ascontiguousarray(values))
    return out


def _halves_to_neighbours(nibbles: torch.Tensor) -> torch.Tensor:
    """Returns the codes of blocks of 32, 16 bytes [..., 16], with two neighbours to a byte, the first in the low bits;
    files have element i in the low and i + 16 in the high bits of byte i."""
    codes = torch.cat([nibbles & 0xF, nibbles >> 4], -1)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def q4_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes plus 8 as bytes [rows, cols / 2] and the scales [rows, cols / 32] fp16 of Q4_0's blocks, uint8
    [rows, bytes]: both have w = scale (code - 8)."""
    parts = blocks.view(blocks.shape[0], -1, 18)
    scales = parts[..., :2].contiguous().view(torch.float16).squeeze(-1)
    return _halves_to_neighbours(parts[..., 2:]).flatten(1), scales


def mxfp4(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns e2m1 codes as bytes [rows, cols / 2] and exponents e8m0 [rows, cols / 32] of MXFP4's blocks, uint8
    [rows, bytes]."""
    parts = blocks.view(blocks.shape[0], -1, 17)
    return _halves_to_neighbours(parts[..., 1:]).flatten(1), parts[..., 0]
