"""EXL3: which modules are trellises, with how many bits and which codebook. No torch.

A checkpoint's config.json states averages only. What counts are the tensors: the shape of a module's `trellis` gives
its bits, and a marker beside it the codebook.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.errors import UserError

TILE = 16
"""Rows and columns of a tile of a trellis."""
BLOCK = 128
"""Rows and columns that one Hadamard transform mixes; matrices are padded to whole blocks."""
MAX_BITS = 8
MARKERS: Mapping[str, int] = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
"""Codebooks that a tensor beside the trellis names, and the multiplier that is its value; without one it is 3INST."""
DEFAULT_CODEBOOK = "3inst"
CODEBOOKS = (DEFAULT_CODEBOOK, *MARKERS)
_MARKER_BYTES = 4
DECODED_BYTES = 64 << 20
"""Most bytes of a matrix that are decoded at once, for many rows."""
CHUNK_TOKENS = 1024
"""Most tokens whose choices of experts are computed at once: transformed inputs take much memory."""


@dataclass(frozen=True, slots=True)
class Trellis:
    """How a matrix is stored: twice its bits a weight, the codebook, and whether inputs and outputs have signs packed
    to bits (`su`, `sv`) in place of scales (`suh`, `svh`)."""

    half_bits: int
    codebook: str
    packed_signs: bool = False

    @property
    def words(self) -> int:
        """Returns the 16-bit words of a tile."""
        return TILE * TILE * self.half_bits // 2 // 16


def padded(size: int) -> int:
    """Returns rows or columns in whole blocks."""
    return -(-size // BLOCK) * BLOCK


def trellis_bytes(trellis: Trellis, rows: int, cols: int) -> int:
    """Returns the bytes of a matrix [rows, cols] with its scales of inputs and outputs."""
    rows, cols = padded(rows), padded(cols)
    marker = 0 if trellis.codebook == DEFAULT_CODEBOOK else _MARKER_BYTES
    return rows * cols // (TILE * TILE) * trellis.words * 2 + 2 * (rows + cols) + marker


@dataclass(frozen=True, slots=True)
class Trellises:
    """The trellises of a checkpoint. stored: those that its files have, by module without the decoder's prefix; others
    are thought of with `bits` on average (`head_bits` of output heads)."""

    bits: float
    head_bits: float
    codebook: str
    stored: Mapping[str, Trellis] = field(default_factory=dict)

    def of(self, module: str) -> Trellis:
        """Returns the trellis of a module (without the decoder's prefix)."""
        return self.stored.get(module) or self._average(module)

    def _average(self, module: str) -> Trellis:
        """Returns bits whose average over the layers is the config's: a tensor has whole bits, or with mul1 halves."""
        if module.rpartition(".")[2] == "lm_head":
            return Trellis(2 * math.ceil(self.head_bits), self.codebook)
        step = 1 if self.codebook == "mul1" else 2
        match = re.search(r"layers\.(\d+)\.", module)
        layer, steps = int(match[1]) if match else 0, 2 * self.bits / step
        here = math.floor(steps * (layer + 1)) - math.floor(steps * layer)
        return Trellis(min(max(step * here, 2), 2 * MAX_BITS), self.codebook)


def read_trellises(config: Mapping[str, Any], source: str) -> Trellises:
    """Reads what config.json says. Raises UserError for other numbers than a checkpoint can have."""
    bits, head_bits = config.get("bits"), config.get("head_bits", 6)
    for name, value in (("bits", bits), ("head_bits", head_bits)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= MAX_BITS:
            raise UserError(f"{source}: {name} must be a number from 1 to {MAX_BITS}; got {value!r}.")
    codebook = config.get("codebook") or DEFAULT_CODEBOOK
    if codebook not in CODEBOOKS:
        raise UserError(f"{source}: codebook {codebook!r} is not supported (has {', '.join(CODEBOOKS)}).")
    return Trellises(float(bits or 0), float(head_bits), codebook)


def merged(trellises: Sequence[tuple[Trellis, ...]]) -> tuple[Trellis, ...]:
    """Returns the trellises of a product of modules, in order."""
    return tuple(one for each in trellises for one in each)
