"""EXL3's matrices in plain torch: the reference of the kernels, and the CPU's path.

y = (((x * suh) H) Wq) H * svh (+ bias). H is the Sylvester-Hadamard transform of 128 neighbours, divided by sqrt(128),
and Wq [in, out] the trellis: tiles of 16 x 16 weights, each a ring of bits. A weight's 16-bit state, the bits that end
with its symbol, is turned to a value by a codebook, so that neighbouring states share all bits but those of a symbol.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.configs.trellis import BLOCK, TILE, Trellis
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.tile_configs import TileConfigs
from sglang.srt.layers.quantization.activations import Activations, values_of
from sglang.srt.layers.quantization.linear_weight import QuantizedProduct

WEIGHTS = TILE * TILE
STATE_BITS = 16
WORD_BITS = 32
MUL1_SCALE, MUL1_OFFSET = 0x1EEE, 0xC931
"""Bits of the float16 factor and summand that turn MUL1's sums of bytes into values."""
MULTIPLIERS = {"3inst": 89226354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
SUMMANDS = {"3inst": 64248484, "mcg": 0}


@dataclass(frozen=True, slots=True)
class TrellisModule:
    """One module's matrix [in, out], padded to whole blocks. `tiles` int16 [in / 16, out / 16, words]; `suh` [in] and
    `svh` [out] float16; the module's outputs are the columns from `first` on, of which `rows` are wanted."""

    form: Trellis
    tiles: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class TrellisWeight:
    """The weight [N, K] of a linear layer: modules side by side, each with all K columns."""

    modules: Sequence[TrellisModule]
    cols: int

    @property
    def shape(self) -> tuple[int, int]:
        """Returns (N, K)."""
        return sum(module.rows for module in self.modules), self.cols

    def dequantized(self) -> torch.Tensor:
        """Returns the weight [N, K] in fp32."""
        return torch.cat([dense(one)[: self.cols, one.first : one.first + one.rows].T for one in self.modules])


def states(tiles: torch.Tensor, half_bits: int) -> torch.Tensor:
    """Returns the states of the weights of tiles int16 [..., words] by position, int64 [..., 256]."""
    # A word is read from its highest bit, and a tile is a ring.
    words = tiles.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    ends = _symbol_ends(half_bits)
    last = (ends - 1) // WORD_BITS
    before = words[..., (last - 1) % words.shape[-1]]
    pair = (before << WORD_BITS) | words[..., last]
    return (pair >> (WORD_BITS - 1 - (ends - 1) % WORD_BITS)) & 0xFFFF


def _symbol_ends(half_bits: int) -> torch.Tensor:
    """Returns the bit behind each symbol. Of half bits, even positions have the smaller whole number, odd ones one
    more."""
    positions = torch.arange(1, WEIGHTS + 1)
    return positions * half_bits // 2


@functools.lru_cache(maxsize=4)
def codebook_values(codebook: str) -> torch.Tensor:
    """Returns the values of all 65,536 states, float16."""
    state = torch.arange(1 << STATE_BITS, dtype=torch.int64)
    product = (state * MULTIPLIERS[codebook] + SUMMANDS.get(codebook, 0)) & 0xFFFFFFFF
    if codebook == "mul1":
        total = sum((product >> shift) & 0xFF for shift in (0, 8, 16, 24))
        scale, offset = (_half(bits).double() for bits in (MUL1_SCALE, MUL1_OFFSET))
        assert isinstance(total, torch.Tensor)
        return ((1024 + total).double() * scale + offset).half()
    mixed = (product & 0x8FFF8FFF) ^ 0x3B603B60
    halves = [_half(mixed >> shift & 0xFFFF) for shift in (0, 16)]
    return halves[0] + halves[1]


def _half(bits: int | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(bits).to(torch.int32).to(torch.uint16).view(torch.float16)


@functools.lru_cache(maxsize=1)
def tile_order() -> torch.Tensor:
    """Returns the position of each weight of a tile [16, 16], row by row: the order of tensor cores' operands."""
    position = torch.arange(WEIGHTS)
    lane, item = position // 8, position % 8
    row = 2 * (lane % 4) + torch.tensor([0, 1, 8, 9])[item % 4]
    column = lane // 4 + 8 * (item // 4)
    order = torch.empty(WEIGHTS, dtype=torch.int64)
    order[row * TILE + column] = position
    return order


def decode(tiles: torch.Tensor, form: Trellis) -> torch.Tensor:
    """Returns the matrix [in, out], float16, of tiles [in / 16, out / 16, words]."""
    order = states(tiles.cpu(), form.half_bits)[..., tile_order()]
    values = codebook_values(form.codebook)[order].unflatten(-1, (TILE, TILE))
    return values.transpose(1, 2).flatten(2, 3).flatten(0, 1).to(tiles.device)


@functools.lru_cache(maxsize=4)
def hadamard(device: torch.device) -> torch.Tensor:
    """Returns the transform [128, 128], fp32."""
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix / math.sqrt(BLOCK)).to(device)


def transformed(x: torch.Tensor) -> torch.Tensor:
    """Returns x [..., blocks * 128] in fp32 with each block of the last dim transformed."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    return (blocks @ hadamard(x.device)).flatten(-2)


def dense(module: TrellisModule) -> torch.Tensor:
    """Returns the equal matrix [in, out] in fp32: with scales and transforms on both sides."""
    inner = decode(module.tiles, module.form)
    both = transformed(transformed(inner).T.contiguous()).T
    return module.suh.float()[:, None] * both * module.svh.float()


def multiply(x: torch.Tensor, module: TrellisModule) -> torch.Tensor:
    """Returns x [T, K] times the module's matrix, fp32 [T, rows]."""
    wide = torch.nn.functional.pad(x.float(), (0, module.suh.shape[0] - x.shape[-1]))
    inner = transformed(wide * module.suh.float()) @ decode(module.tiles, module.form).float()
    out = transformed(inner) * module.svh.float()
    return out[:, module.first : module.first + module.rows]


def trellis_linear(weight: TrellisWeight, arch: ArchTraits, configs: TileConfigs) -> QuantizedProduct:
    """Returns the product op of a weight, which is decoded for each product."""

    def run(x: Activations, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        values = values_of(x)
        rows = values.reshape(-1, values.shape[-1])
        out = torch.cat([multiply(rows, module) for module in weight.modules], -1)
        if bias is not None:
            out += bias.float()
        return out.to(out_dtype or values.dtype).view(*values.shape[:-1], -1)

    return run
