"""Turns blocks of GGUF files into numbers, or into the codes and scales of our own schemes.

Each function of a type takes its blocks as bytes [n, size] and returns the values in fp32 [n, elements], as the `gguf`
package computes them, bit for bit. Sources: the layouts of ggml's blocks, and that package, which is the test's oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from sglang.srt.configs.gguf.types import TensorType

CHUNK = 1 << 19
"""Elements that are dequantized at a time. Larger pieces leave the processor's caches, and take twice as long."""
_WIDE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def dequantized(blocks: torch.Tensor, kind: TensorType, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values of rows of blocks, uint8 [rows, bytes], as [rows, elements]: those of 16 or 32 bits as they
    are, the others in `dtype`, rounded from the fp32 that the format defines."""
    if kind.wide:
        return blocks.view(_WIDE[kind.wide])
    rows, cols = blocks.shape[0], blocks.shape[1] // kind.size * kind.elements
    out = torch.empty((rows, cols), dtype=dtype)
    step = max(1, CHUNK // cols)
    for begin in range(0, rows, step):
        piece = blocks[begin : begin + step]
        out[begin : begin + step] = VALUES[kind.name](piece.reshape(-1, kind.size)).view(-1, cols)
    return out


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Returns the number in fp16 at byte `at` of each block, fp32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Returns codes of which the low bits of all bytes come before the high ones: [..., n] -> [..., 2 n]."""
    return torch.cat([packed & 0xF, packed >> 4], -1)


def _bits(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Returns the pieces of `width` bits of each byte, the low ones first: [..., n] -> [..., 8 / width, n]."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    return packed.unsqueeze(-2) >> shifts.unsqueeze(-1) & (1 << width) - 1


def _table(values: tuple[int, ...], codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[codes.int()]


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Returns bits, the low one of each byte first, as 16 or 0: [n, 4] -> [n, 32]."""
    return _bits(packed, 1).transpose(1, 2).flatten(1) << 4


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _table(_IQ4, _nibbles(blocks[:, 2:]))


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    exponents = blocks[:, :1].int()  # 2 ** (e - 128), for doubled codes; the first two are subnormal
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return bits.view(torch.float32) * _table(_E2M1_DOUBLED, _nibbles(blocks[:, 1:]))


def _by_group(values: torch.Tensor, groups: int) -> torch.Tensor:
    """Returns a block's elements by group: [n, ...] -> [n, groups, elements of a group]."""
    return values.reshape(len(values), groups, -1)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, codes = blocks[:, :16], _bits(blocks[:, 16:80].view(-1, 2, 32), 2)
    factors = (_half(blocks, 80) * (scales & 0xF).float()).unsqueeze(-1)
    offsets = (_half(blocks, 82) * (scales >> 4).float()).unsqueeze(-1)
    return (factors * _by_group(codes, 16).float() - offsets).flatten(1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    scales = _nibbles(low) | _bits(high, 2).flatten(1) << 4
    codes = _bits(blocks[:, 32:96].view(-1, 2, 32), 2).flatten(1)
    without = _bits(blocks[:, :32], 1).flatten(1) ^ 1  # 4 less where the bit is not set
    values = codes.float() - 4 * without.float()
    return ((_half(blocks, 108) * (scales.float() - 32)).unsqueeze(-1) * _by_group(values, 16)).flatten(1)


def _scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns eight scales and eight minima of 6 bits each from the 12 bytes of a block of Q4_K or Q5_K."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 0x3F, third & 0xF | first >> 6 << 4], 1)
    minima = torch.cat([second & 0x3F, third >> 4 | second >> 6 << 4], 1)
    return scales, minima


def _with_minima(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Returns the values of Q4_K and Q5_K for codes [n, 256]."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    factors = (_half(blocks, 0) * scales.float()).unsqueeze(-1)
    offsets = (_half(blocks, 2) * minima.float()).unsqueeze(-1)
    return (factors * _by_group(codes, 8).float() - offsets).flatten(1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _with_minima(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    fifth = _bits(blocks[:, 16:48], 1).view(-1, 4, 64) << 4
    return _with_minima(blocks, _nibbles(blocks[:, 48:].reshape(-1, 4, 32)) | fifth)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).flatten(1)
    high = _bits(blocks[:, 128:192].reshape(-1, 2, 32), 2).flatten(1)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    values = (low | high << 4).float() - 32
    return ((_half(blocks, 208) * scales).unsqueeze(-1) * _by_group(values, 16)).flatten(1)


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    low = _bits(blocks[:, 4:8], 4).transpose(1, 2).flatten(1)
    high = _bits(blocks[:, 2:4], 2).transpose(1, 2).flatten(1)
    factors = _half(blocks, 0) * ((low | high << 4).float() - 32)
    values = _table(_IQ4, _nibbles(blocks[:, 8:].reshape(-1, 8, 16)))
    return (factors.unsqueeze(-1) * values).flatten(1)


VALUES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""The functions by type."""


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


def q8_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes plus 128 as bytes [rows, cols] and the scales [rows, cols / 32] fp16 of Q8_0's blocks, uint8
    [rows, bytes]: both have w = scale (code - 128)."""
    parts = blocks.view(blocks.shape[0], -1, 34)
    scales = parts[..., :2].contiguous().view(torch.float16).squeeze(-1)
    return (parts[..., 2:] ^ 0x80).flatten(1), scales


def mxfp4(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns e2m1 codes as bytes [rows, cols / 2] and exponents e8m0 [rows, cols / 32] of MXFP4's blocks, uint8
    [rows, bytes]."""
    parts = blocks.view(blocks.shape[0], -1, 17)
    return _halves_to_neighbours(parts[..., 1:]).flatten(1), parts[..., 0]
