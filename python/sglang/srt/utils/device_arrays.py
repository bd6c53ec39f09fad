"""Copies small host arrays to the device in one transfer, because a copy costs its launch, not bandwidth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_ALIGN = 16
_TORCH_DTYPE = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.bool_): torch.bool}


class Field(NamedTuple):
    """Shape and type of a named array. `rest`: value of the entries that a load does not give."""

    shape: tuple[int, ...]
    dtype: npt.DTypeLike
    rest: int = 0


class DeviceArrays:
    """Named arrays in one block of device memory at fixed addresses, as CUDA graphs need them.

    >>> arrays = DeviceArrays({"slots": Field((8,), np.int64)}, "cuda")
    >>> arrays.load(slots=np.array([3, 1]))
    >>> arrays["slots"]  # [8] int64: 3, 1, 0, 0, 0, 0, 0, 0
    """

    def __init__(self, fields: Mapping[str, Field], device: torch.device | str) -> None:
        self._fields = fields
        self._spans: dict[str, slice] = {}
        size = 0
        for name, (shape, dtype, _) in fields.items():
            length = math.prod(shape) * np.dtype(dtype).itemsize
            self._spans[name] = slice(size, size + length)
            size += -(-length // _ALIGN) * _ALIGN
        self._block = torch.empty(size, dtype=torch.uint8, device=device)
        self._arrays = {
            name: self._block[self._spans[name]].view(_TORCH_DTYPE[np.dtype(dtype)]).view(shape)
            for name, (shape, dtype, _) in fields.items()
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._arrays[name]

    def get(self, name: str) -> torch.Tensor | None:
        """Returns the array; None: there is none of this name."""
        return self._arrays.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def load(self, **values: npt.NDArray[Any]) -> None:
        """Writes the leading entries of each array, along every dimension; asynchronous on the current stream."""
        # The pinned block returns to torch's host allocator, which reuses it only after this copy has run.
        on_gpu = self._block.is_cuda
        host = self._block if self._block.is_cpu else torch.empty_like(self._block, device="cpu", pin_memory=on_gpu)
        memory = host.numpy()
        for name, (shape, dtype, rest) in self._fields.items():
            view = memory[self._spans[name]].view(dtype)
            given = values.get(name)
            if len(shape) > 1:
                view = view.reshape(shape)
                if given is None or given.shape != shape:
                    view[...] = rest
                if given is not None:
                    view[tuple(map(slice, given.shape))] = given
                continue
            count = 0 if given is None else len(given)
            if count:
                view[:count] = given
            if count < len(view):
                view[count:] = rest
        if host is not self._block:
            self._block.copy_(host, non_blocking=True)


def send(device: torch.device | str, **arrays: npt.NDArray[Any]) -> DeviceArrays:
    """Returns copies of these arrays on the device. On CUDA the copy is asynchronous on the current stream."""
    sent = DeviceArrays({name: Field(a.shape, a.dtype) for name, a in arrays.items()}, device)
    sent.load(**arrays)
    return sent


def to_device(array: npt.NDArray[Any], device: torch.device | str) -> torch.Tensor:
    """Returns a copy of one array on the device."""
    return send(device, array=array)["array"]


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Returns x if it is in host memory, otherwise a copy there, which is complete once an event recorded after this
    call (`event_on`) has passed."""
    if not x.is_cuda:
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


def event_on(device: torch.device | str) -> torch.cuda.Event | None:
    """Returns an event recorded on the current stream of a GPU; None on other devices."""
    if torch.device(device).type != "cuda":
        return None
    ready = torch.cuda.Event()
    ready.record()
    return ready
