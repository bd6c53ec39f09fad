"""The weights of a block, as their bytes and products are counted. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights [rows, cols] on one rank that one matrix product reads.

    name: the module in the layer, as the family's WeightMap names it ("attn.qkv")
    parts: its parts, stacked by rows ("q", "k", "v"); their names in the checkpoint decide the quantization scheme
    experts: number of such matrices in one tensor; 0: no experts
    slots: > 0: the experts lie in main memory, and GPU memory has room for so many of them; each of the buffers that
        layers share has room for `buffered` of the others
    part_rows: rows of each part, where these are not equal
    quantized: False keeps it in 16 bits (or `dtype`), whatever the checkpoint's rules say of the name
    adapted: False: no LoRA adapter may change it
    """

    name: str
    parts: tuple[str, ...]
    rows: int
    cols: int
    bias: bool = False
    experts: int = 0
    quantized: bool = True
    dtype: str | None = None
    slots: int = 0
    buffered: int = 0
    adapted: bool = True
    part_rows: tuple[int, ...] = ()

    @property
    def rows_of_parts(self) -> tuple[int, ...]:
        """Returns the rows of each part."""
        return self.part_rows or (self.rows // len(self.parts),) * len(self.parts)

    def in_slots(self, slots: int, buffered: int) -> Matrix:
        """Returns the experts as they are if they lie in main memory."""
        return replace(self, slots=slots, buffered=min(buffered, self.experts - slots))

    @property
    def num_matrices(self) -> int:
        """Returns how many such matrices the memory of the device holds."""
        return self.slots or max(1, self.experts)


@dataclass(frozen=True, slots=True)
class Elements:
    """Parameters that are not multiplied as a matrix: norms, sinks, tables. `dtype` None: the model's."""

    count: int
    dtype: str | None = None


Weights = tuple[Matrix | Elements, ...]
