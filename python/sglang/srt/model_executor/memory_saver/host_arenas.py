"""Arenas of a server without a GPU: nothing is given back, but contents are lost as on a GPU.

Memory that is given back is filled with bytes that make no number, so that whatever still reads it is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

POISON = 0xFF
"""Of which every float is made a NaN."""


class _Recorder(TorchDispatchMode):
    """Notes the memory of every tensor that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    self.storages[storage.data_ptr()] = StorageWeakRef(storage)
        return out


class HostArenas:
    """The arenas of a server on a CPU."""

    graph_pool: Any = None

    def __init__(self) -> None:
        self._found: dict[str, list[StorageWeakRef]] = {}
        self.unmapped: set[str] = set()

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        """Notes what the block allocates and keeps."""
        recorder = _Recorder()
        with recorder:
            yield
        self._found.setdefault(tag, []).extend(recorder.storages.values())

    def size(self, tag: str) -> int:
        """Returns the bytes of an arena."""
        return sum(len(segment) for segment in self.segments(tag))

    def segments(self, tag: str) -> list[torch.Tensor]:
        """Returns the memory of an arena that something still holds."""
        segments, seen = [], set[int]()
        for each in self._found.get(tag, ()):
            storage = torch.UntypedStorage._new_with_weak_ptr(each.cdata)
            if storage is not None and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                segments.append(torch.empty(0, dtype=torch.uint8).set_(storage))
        return segments

    def unmap(self, tag: str) -> None:
        """Overwrites the memory."""
        self.unmapped.add(tag)
        for segment in self.segments(tag):
            segment.fill_(POISON)

    def map(self, tag: str) -> None:
        """Leaves the memory as it is, undefined."""
        self.unmapped.discard(tag)

    def free_bytes(self) -> int | None:
        """Returns None: nothing was given back."""
        return None
