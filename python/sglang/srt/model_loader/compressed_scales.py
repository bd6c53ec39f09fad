"""Block scales of FP4 weights that a checkpoint stores compressed without loss (CSF), expanded while they are read.

A matrix of scales [R, C] is cut into slabs of 16 rows. A slab has a base byte for each row, then the rows' offsets from
it: of e4m3 scales (NVFP4) four bits each, the even column in the low ones, of e8m0 scales (MXFP4) one bit each, the
first in the lowest. `exceptions` (uint32) replace single bytes: the low 24 bits are row * C + column, the high 8 the
byte. The matrix is stored as two tensors, named after it with `.nvfp4_csf_fixed` and `.nvfp4_csf_exceptions`
(`.mxfp4_csf_...`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.configs.checkpoint_header import CSF_EXCEPTIONS, CSF_FIXED, expanded_name
from sglang.srt.errors import UserError

SLAB_ROWS = 16
_PLACE_BITS = 24
_WEIGHTS = ("weight", "weight_packed")
"""Names of the codes beside the scales."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How offsets of one kind of scales are packed: bits of an offset, columns of the weight for a scale, and the type
    of the scales, for torch and for safetensors."""

    bits: int
    group: int
    dtype: torch.dtype
    name: str


PACKINGS: Mapping[str, Packing] = {
    "nvfp4": Packing(4, 16, torch.float8_e4m3fn, "F8_E4M3"),
    "mxfp4": Packing(1, 32, torch.uint8, "U8"),
}


def expand(fixed: torch.Tensor, exceptions: torch.Tensor, rows: int, cols: int, packing: Packing) -> torch.Tensor:
    """Returns the scales [rows, cols]. Raises ValueError for tensors that hold others, or none."""
    slabs, width = -(-rows // SLAB_ROWS), -(-cols * packing.bits // 8)
    packed = fixed.reshape(slabs, SLAB_ROWS * (1 + width))
    bases, offsets = packed[:, :SLAB_ROWS], packed[:, SLAB_ROWS:].reshape(slabs, SLAB_ROWS, width)
    highest = (1 << 8) - (1 << packing.bits)
    if len(bases) and int(bases.max()) > highest:
        raise ValueError(f"a base of {int(bases.max())}, above {highest}")
    shifts = torch.arange(0, 8, packing.bits, dtype=torch.uint8)
    each = (offsets[..., None] >> shifts) & ((1 << packing.bits) - 1)
    scales = (bases[..., None] + each.flatten(-2)[..., :cols]).flatten(0, 1)[:rows].contiguous()
    replaced = exceptions.flatten().view(torch.int32).long()
    places = replaced & ((1 << _PLACE_BITS) - 1)
    if len(places) and int(places.max()) >= scales.numel():
        raise ValueError(f"an exception for scale {int(places.max())} of {scales.numel()}")
    if bool((places.diff() <= 0).any()):
        raise ValueError("exceptions that are not in ascending order")
    scales.view(-1)[places] = (replaced >> _PLACE_BITS & 0xFF).to(torch.uint8)
    return scales.view(packing.dtype)


class ExpandedScales:
    """A matrix of scales in place of the tensors that it is made of, with the methods that loading asks of a slice and
    of a file of safetensors. `find`: returns the open file that has a tensor, or None."""

    def __init__(self, fixed: str, find: Callable[[str], Any]) -> None:
        self.name, self.find = expanded_name(fixed), find
        self.fixed, kind = fixed, fixed.rpartition(".")[2].partition("_")[0]
        if kind not in PACKINGS:
            raise UserError(
                f"tensor {fixed}: compressed scales of {kind} are not supported (has {', '.join(PACKINGS)})"
            )
        self.packing = PACKINGS[kind]
        module = self.name.rpartition(".")[0]
        files = ((find(f"{module}.{leaf}"), f"{module}.{leaf}") for leaf in _WEIGHTS)
        shapes = (file.get_slice(name).get_shape() for file, name in files if file is not None)
        shape = next((tuple(shape) for shape in shapes), None)
        if shape is None or len(shape) != 2:
            raise UserError(f"tensor {fixed}: the weight [rows, columns / 2] that its scales belong to is missing")
        self.rows, self.cols = shape[0], 2 * shape[1] // self.packing.group

    def get_shape(self) -> list[int]:
        """Returns the shape of the expanded matrix."""
        return [self.rows, self.cols]

    def get_dtype(self) -> str:
        """Returns the type of the scales as safetensors names it."""
        return self.packing.name

    def get_tensor(self, name: str) -> torch.Tensor:
        """Returns all scales. Raises UserError for damaged tensors."""
        exceptions = self.fixed.removesuffix(CSF_FIXED) + CSF_EXCEPTIONS
        file = self.find(exceptions)
        if file is None:
            raise UserError(f"tensor {self.fixed} has no {exceptions} beside it")
        fixed, replaced = self.find(self.fixed).get_tensor(self.fixed), file.get_tensor(exceptions)
        try:
            return expand(fixed, replaced, self.rows, self.cols, self.packing)
        except (RuntimeError, ValueError) as error:
            described = f"{list(fixed.shape)} and {list(replaced.shape)}"
            raise UserError(
                f"tensor {self.fixed}: {described} do not hold {self.rows} x {self.cols} scales: {error}"
            ) from None

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.get_tensor(self.name)[index]
