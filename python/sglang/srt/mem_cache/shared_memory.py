"""Main memory mapped by all ranks of a machine, for caches that are equal on all of them, as MLA latents are.

The first rank makes an anonymous file in memory, and the others open it through its process and descriptor. The system
frees it when the last process that maps it has ended.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

import torch

NOBODY = 1 << 62
"""Value of a rank that has no say where the minimum over the ranks counts."""


class SharingFailed(Exception):
    """Raised when the ranks cannot map the same memory."""


def shared_tensor(
    num_bytes: int, first: bool, agree: Callable[[Sequence[int]], list[int]], proc: str = "/proc"
) -> torch.Tensor:
    """Returns [num_bytes] uint8 zeros in the same memory on all ranks. `first`: whether this rank makes it; exactly one
    does. `agree` returns the minimum over the ranks of each value. A collective. Raises SharingFailed on all ranks if
    one of them cannot map it."""
    file = _create(num_bytes) if first else -1
    pid, descriptor = agree([os.getpid(), file] if file >= 0 else [NOBODY, NOBODY])
    mapped = None
    if descriptor != NOBODY:
        mapped = _map(file, num_bytes) if first else _open(f"{proc}/{pid}/fd/{descriptor}", num_bytes)
    (everybody,) = agree([int(mapped is not None)])
    if file >= 0:
        os.close(file)
    if mapped is None or not everybody:
        raise SharingFailed
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _create(num_bytes: int) -> int:
    """Returns the descriptor of a file in memory; -1 if the system gives none."""
    try:
        descriptor = os.memfd_create("cached-prefixes", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
    except OSError:
        return -1
    return descriptor


def _open(path: str, num_bytes: int) -> mmap.mmap | None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    mapped = _map(descriptor, num_bytes)
    os.close(descriptor)
    return mapped


def _map(descriptor: int, num_bytes: int) -> mmap.mmap | None:
    try:
        return mmap.mmap(descriptor, num_bytes)
    except (OSError, ValueError):
        return None
