"""Tensors that clients send, in the names of a checkpoint: over the tensors of a model directory, or alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from sglang.srt.model_loader.checkpoint import Weights

STORED_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
"""Types of tensors that may be sent, by their names in safetensors."""
Tensors = Mapping[str, torch.Tensor]


class SentTensor:
    """A tensor with the interface of a slice of a safetensors file, and of the file."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Returns the shape."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Returns the name of the type in safetensors."""
        return STORED_NAMES[self._tensor.dtype]

    def get_tensor(self, name: str) -> torch.Tensor:
        """Returns the whole tensor."""
        return self._tensor

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


class SentOver:
    """The weights of a directory, some of them replaced by what was sent. Stands for `Weights`."""

    def __init__(self, stored: Weights | None, sent: Tensors) -> None:
        """stored: None: nothing but what was sent."""
        self._stored, self._sent = stored, sent

    @property
    def paths(self) -> tuple[Path, ...]:
        """Returns the files."""
        return () if self._stored is None else self._stored.paths

    def total_bytes(self) -> int:
        """Returns the size of all files and tensors."""
        sent = sum(tensor.nbytes for tensor in self._sent.values())
        return sent + (0 if self._stored is None else self._stored.total_bytes())

    def tensors(self, after: Callable[[Path], None] = lambda path: None) -> Iterator[tuple[str, Any, Any]]:
        """Yields as `Checkpoint.tensors` does."""
        for name, view, file in () if self._stored is None else self._stored.tensors(after):
            if name not in self._sent:
                yield name, view, file
        for name, tensor in self._sent.items():
            view = SentTensor(tensor)
            yield name, view, view
