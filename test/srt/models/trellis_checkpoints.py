"""Writes random trellises as EXL3 checkpoints have them, and decodes them with numpy, bit by bit as the format's
description says."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .quantized_checkpoints import Form, Tensors, Write

MARKERS = {"3inst": None, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
SIZE = 0.05


def states(tiles: np.ndarray, half_bits: int) -> np.ndarray:
    """The states of tiles int16 [..., words], by position [..., 256]: windows of 16 bits in rings."""
    bits = np.unpackbits(tiles.view(np.uint32).astype(">u4").view(np.uint8), axis=-1)
    lengths = [half_bits // 2 + (half_bits % 2) * (position % 2) for position in range(256)]
    ends = np.cumsum(lengths)
    assert ends[-1] == bits.shape[-1] == 128 * half_bits
    windows = (ends[:, None] - 16 + np.arange(16)) % bits.shape[-1]
    return bits[..., windows].astype(np.int64) @ (1 << np.arange(15, -1, -1))


@functools.cache
def value(codebook: str) -> np.ndarray:
    """The values of all states, float16."""
    state = np.arange(1 << 16, dtype=np.uint32)
    if codebook == "mul1":
        product = state * np.uint32(0x83DCD12D)
        total = product.view(np.uint8).reshape(-1, 4).sum(1).astype(np.float64)
        a, b = np.array([0x1EEE, 0xC931], dtype=np.uint16).view(np.float16).astype(np.float64)
        result: np.ndarray = ((1024 + total) * a + b).astype(np.float16)
        return result
    product = state * np.uint32(0xCBAC1FED) if codebook == "mcg" else state * np.uint32(89226354) + np.uint32(64248484)
    halves = ((product & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)).view(np.float16).reshape(-1, 2)
    return halves[:, 0] + halves[:, 1]


def inner_weight(trellis: torch.Tensor, half_bits: int, codebook: str) -> torch.Tensor:
    """[in, out] of tiles [in / 16, out / 16, words]."""
    values = value(codebook)[states(trellis.numpy(), half_bits)].astype(np.float32)
    matrix = np.zeros((trellis.shape[0], 16, trellis.shape[1], 16), dtype=np.float32)
    for position in range(256):
        lane, item = divmod(position, 8)
        row, column = 2 * (lane % 4) + (0, 1, 8, 9)[item % 4], lane // 4 + 8 * (item // 4)
        matrix[:, row, :, column] = values[..., position]
    return torch.from_numpy(matrix.reshape(16 * trellis.shape[0], -1))


@functools.cache
def hadamard() -> torch.Tensor:
    """Hadamard's matrix of 128, by parities."""
    index = np.arange(128)
    signs = [[(-1.0) ** bin(i & j).count("1") for j in index] for i in index]
    return torch.tensor(signs, dtype=torch.float64) / 128**0.5


def transformed(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix [rows, cols] times Hadamard's matrix on both sides, block by block."""
    rows, cols = matrix.shape
    blocks = matrix.reshape(rows // 128, 128, cols // 128, 128)
    return torch.einsum("ri,aibj,jc->arbc", hadamard(), blocks, hadamard()).reshape(rows, cols)


def padded(size: int) -> int:
    return -(-size // 128) * 128


def random_trellis(
    rows: int, cols: int, half_bits: int, codebook: str, generator: torch.Generator, packed_signs: bool = False
) -> Tensors:
    """The tensors of a matrix [rows, cols], by leaf."""
    wide, high = padded(cols), padded(rows)
    shape = (wide // 16, high // 16, 8 * half_bits)
    tensors = {"trellis": torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16)}
    if packed_signs:
        for leaf, size in (("su", wide), ("sv", high)):
            tensors[leaf] = torch.randint(-(1 << 15), 1 << 15, (size // 16,), generator=generator, dtype=torch.int16)
    else:
        for leaf, size, scale in (("suh", wide, 1.0), ("svh", high, SIZE)):
            factor = 0.5 + torch.rand(size, generator=generator)
            sign = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
            tensors[leaf] = (factor * sign * scale).half()
    marker = MARKERS[codebook]
    if marker is not None:
        tensors[codebook] = torch.tensor(marker, dtype=torch.int64).to(torch.int32)
    return tensors


def scales(tensors: Tensors, side: str) -> torch.Tensor:
    if f"s{side}h" in tensors:
        return tensors[f"s{side}h"].double()
    bits = np.unpackbits(tensors[f"s{side}"].numpy().view(np.uint8), bitorder="little")
    return 1 - 2 * torch.from_numpy(bits).double()


def stands_for(tensors: Tensors, rows: int, cols: int) -> torch.Tensor:
    """The dense weight [rows, cols] fp32."""
    trellis = tensors["trellis"]
    codebook = next((name for name in ("mcg", "mul1") if name in tensors), "3inst")
    inner = inner_weight(trellis, trellis.shape[-1] // 8, codebook).double()
    dense = scales(tensors, "u")[:, None] * transformed(inner) * scales(tensors, "v")
    return dense[:cols, :rows].T.float().contiguous()


def exl3(
    forms: Sequence[tuple[int, str]] = ((8, "mul1"),),
    packed_signs: bool = False,
    taller: tuple[int, str] | None = None,
    **more: Any,
) -> Form:
    """A form whose modules take (twice the bits, codebook) of `forms` in turn; those with more rows than columns that
    of `taller`, if it is given."""
    turn, generator = itertools.cycle(forms), torch.Generator().manual_seed(5)

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, cols = weight.shape
        half_bits, codebook = taller if taller is not None and rows > cols else next(turn)
        tensors = random_trellis(*weight.shape, half_bits, codebook, generator, packed_signs)
        return tensors, stands_for(tensors, *weight.shape)

    written: Write = write
    return Form(written, {"quant_method": "exl3", "bits": 4.25, "head_bits": 6, "codebook": "mul1"} | more)
