"""Device buffers at fixed addresses, as CUDA graphs need them, that one copy from the host fills."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

_ALIGN = 16
_TORCH_DTYPE = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


class StaticPack:
    """`fields`: name -> (length, numpy dtype, value of the entries that a load does not give)."""

    def __init__(self, fields: Mapping[str, tuple[int, type[np.integer], int]], device: str) -> None:
        self._fields = fields
        self._offsets: dict[str, int] = {}
        size = 0
        for name, (length, dtype, _) in fields.items():
            self._offsets[name] = size
            size += -(-length * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN
        self._packed = torch.zeros(size, dtype=torch.uint8, device=device)
        self._views = {
            name: self._packed[self._offsets[name] :][: length * np.dtype(dtype).itemsize].view(
                _TORCH_DTYPE[np.dtype(dtype)]
            )
            for name, (length, dtype, _) in fields.items()
        }
        self.load()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name]

    def load(self, **values: np.ndarray) -> None:
        """Write the leading entries of each field; asynchronous on the current stream."""
        host = torch.empty(self._packed.numel(), dtype=torch.uint8, pin_memory=self._packed.is_cuda)
        memory = host.numpy()
        for name, (length, dtype, rest) in self._fields.items():
            start = self._offsets[name]
            view = memory[start : start + length * np.dtype(dtype).itemsize].view(dtype)
            given = values.get(name, view[:0])
            view[: len(given)] = given
            view[len(given) :] = rest
        self._packed.copy_(host, non_blocking=True)
