"""The tensors of a model in GGUF, as a checkpoint of safetensors would have them.

A tensor is read when it is indexed, and of a matrix only the rows that are asked for. The types whose codes and scales
a kernel reads stay in four or eight bits if the model wants them so; the others are dequantized.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang.srt.configs.checkpoint_header import inside
from sglang.srt.configs.gguf.tensors import (
    FP4,
    INDEX_NAME,
    INT4,
    INT8,
    Index,
    Source,
    StoredPart,
    TensorEntry,
    parts_of,
)
from sglang.srt.configs.gguf.types import BY_NAME
from sglang.srt.errors import UserError
from sglang.srt.model_loader.gguf_blocks import dequantized, mxfp4, q4_0, q8_0
from sglang.srt.model_loader.gguf_changes import CHANGES, WHOLE_CHANGES, row_orders, rows_of_halves

logger = logging.getLogger(__name__)

_CODES = {INT4: q4_0, INT8: q8_0, FP4: mxfp4}
"""Functions that return codes and scales, by scheme."""
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class GGUFCheckpoint:
    """A model in GGUF in the directory that `unpack` made. `dtype`: of dequantized weights; `wanted`: whether the model
    has a tensor of this name."""

    folder: Path
    index: Index
    dtype: torch.dtype = torch.float32
    wanted: Callable[[str], bool] = lambda name: True
    maps: dict[int, np.memmap[Any, Any]] = field(default_factory=dict, compare=False, repr=False)

    def total_bytes(self) -> int:
        """Returns the size of all tensors, dequantized."""
        return sum(_elements(entry) * self.dtype.itemsize for entry in self.index.entries)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Returns the files."""
        return tuple(self.folder / inside(file, self.folder / INDEX_NAME) for file in self.index.files)

    def tensors(self, after: Callable[[Path], None] = lambda path: None) -> Iterator[tuple[str, Any, Any]]:
        """Yields (name, slice, file) as `Checkpoint.tensors` does; `after` is not called, since its files stay mapped.
        Tensors that can stay in fewer bits are there in 16 if their name in 16 bits is wanted."""
        entries = [entry for entry in self.index.entries if not _is_plain(entry) and self._is_wide(entry)]
        self._say(entries)
        for entry in self.index.entries:
            wide = self._is_wide(entry)
            for expert, name in enumerate(entry.names()):
                for part in parts_of(entry, name, wide):
                    tensor = _Tensor(self, entry, part, wide, expert if entry.num_experts else None)
                    yield part.name, tensor, tensor

    def _is_wide(self, entry: TensorEntry) -> bool:
        return not entry.kept or self.wanted(next(entry.names()))

    def _say(self, entries: Sequence[TensorEntry]) -> None:
        """Logs what reading weights in 16 bits costs."""
        if not entries:
            return
        sources = [source for entry in entries for source in entry.sources]
        logger.info(
            "%s: %d tensors of types %s are read as %s, %.2f GB instead of the %.2f GB in the file",
            self.index.files[0],
            len(sources),
            ", ".join(sorted({source.type for source in sources})),
            str(self.dtype).removeprefix("torch."),
            sum(map(_elements, entries)) * self.dtype.itemsize / 1e9,
            sum(map(_stored_bytes, sources)) / 1e9,
        )

    def blocks(self, source: Source, rows: slice | torch.Tensor) -> torch.Tensor:
        """Returns rows of a tensor's blocks, uint8 [rows, bytes]. The rows are those of all its dims but the last."""
        kind = BY_NAME[source.type]
        width = source.shape[-1] // kind.elements * kind.size
        count = math.prod(source.shape[:-1])
        every = self._map(source.file)[source.offset : source.offset + count * width].reshape(count, width)
        return torch.from_numpy(np.array(every[rows if isinstance(rows, slice) else rows.numpy()]))

    def _map(self, file: int) -> np.memmap[Any, Any]:
        if file not in self.maps:
            path = self.folder / inside(self.index.files[file], self.folder / INDEX_NAME)
            try:
                self.maps[file] = np.memmap(path, np.uint8, "r")
            except (OSError, ValueError) as error:
                raise UserError(f"{path} cannot be read: {error}. Was the file moved?") from None
        return self.maps[file]


def _elements(entry: TensorEntry) -> int:
    return math.prod(entry.shape) * (entry.num_experts or 1)


def _stored_bytes(source: Source) -> int:
    kind = BY_NAME[source.type]
    return math.prod(source.shape) // kind.elements * kind.size


def _is_plain(entry: TensorEntry) -> bool:
    """Returns whether the file has the values in 16 or 32 bits."""
    return all(BY_NAME[source.type].wide for source in entry.sources)


class _Tensor:
    """One tensor, with the methods of a slice of safetensors and of its file. `expert`: of a tensor that has all; None:
    the tensor is whole."""

    def __init__(
        self, checkpoint: GGUFCheckpoint, entry: TensorEntry, part: StoredPart, wide: bool, expert: int | None
    ) -> None:
        self.checkpoint, self.entry, self.part, self.wide, self.expert = checkpoint, entry, part, wide, expert

    def get_shape(self) -> Sequence[int]:
        """Returns the shape."""
        return self.part.shape

    def get_dtype(self) -> str:
        """Returns the type as safetensors names it."""
        return self.part.dtype if not self.wide or _is_plain(self.entry) else _NAMES[self.checkpoint.dtype]

    def get_tensor(self, name: str) -> torch.Tensor:
        """Returns the whole tensor, whose name is `name`."""
        return self[()]

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Returns a part of the tensor; only the rows in it are read."""
        rows, *others = index or (slice(None),)
        start, stop, step = rows.indices(self.part.shape[0])
        assert step == 1
        if self.entry.change in WHOLE_CHANGES or len(self.part.shape) == 1:
            return self._read(0, self.part.shape[0])[(rows, *others)]
        return self._read(start, stop)[(slice(None), *others)]

    def _read(self, start: int, stop: int) -> torch.Tensor:
        """Returns rows of the first dim."""
        sources = self.entry.sources
        if self.wide:
            tensor = self._changed([self._values(source, start, stop) for source in sources])
            return tensor if _is_plain(self.entry) else tensor.to(self.checkpoint.dtype)
        codes = self._changed([self._codes(source, start, stop) for source in sources])
        return codes.view(torch.int32) if self.part.dtype == "I32" else codes

    def _changed(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        change, heads = CHANGES.get(self.entry.change), self._row_heads()
        tensor = tensors[0] if change is None else change(tensors)
        if heads is not None and tensor.dim() == 1:  # of a matrix only the rows in question were read
            tensor = tensor[rows_of_halves(len(tensor), heads)]
        # 16-bit experts in one tensor have their columns first.
        return tensor.transpose(1, 2) if self.wide and tensor.dim() == 3 else tensor

    def _values(self, source: Source, start: int, stop: int) -> torch.Tensor:
        blocks, lead = self._blocks(source, start, stop)
        values = dequantized(blocks, BY_NAME[source.type], self.checkpoint.dtype)
        return values.view(*lead, source.shape[-1]) if len(source.shape) > 1 else values.view(-1)

    def _codes(self, source: Source, start: int, stop: int) -> torch.Tensor:
        """Returns codes or scales, whichever this tensor has."""
        blocks, lead = self._blocks(source, start, stop)
        codes, scales = _CODES[self.entry.kept](blocks)
        if self.part.name.endswith(("_scale", "_scales")):
            return scales.reshape(*lead, -1)
        return codes.reshape(*lead, -1, 16) if self.part.name.endswith("_blocks") else codes.reshape(*lead, -1)

    def _blocks(self, source: Source, start: int, stop: int) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Returns blocks, uint8 [rows, bytes], and the dims of the rows. `start` and `stop` count in the first dim of
        this tensor."""
        shape = source.shape
        if self.entry.change in WHOLE_CHANGES or len(shape) == 1:
            return self.checkpoint.blocks(source, slice(None)), shape[:-1]
        if self.expert is not None:
            first = self.expert * shape[1]
            return self.checkpoint.blocks(source, slice(first + start, first + stop)), (stop - start,)
        if len(shape) == 3:
            return self.checkpoint.blocks(source, slice(start * shape[1], stop * shape[1])), (stop - start, shape[1])
        heads = self._row_heads()
        rows = slice(start, stop) if heads is None else rows_of_halves(shape[0], heads)[start:stop]
        return self.checkpoint.blocks(source, rows), (stop - start,)

    def _row_heads(self) -> int | None:
        """Returns the number of heads if rows of heads are in another order in the file; None: they are not."""
        return row_orders(self.checkpoint.index).get(self.entry.change)
