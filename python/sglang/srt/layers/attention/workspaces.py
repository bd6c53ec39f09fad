"""Workspaces of attention backends: memory that a kernel writes and reads within a step, and that nothing reads in the
next one. So it can be given back while a rank sleeps, and is zero again when it wakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_region: Callable[[], AbstractContextManager[None]] = nullcontext


@contextmanager
def allocated_in(region: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Has the workspaces of backends that the block creates allocated inside `region()`."""
    global _region
    before, _region = _region, region
    try:
        yield
    finally:
        _region = before


def zero_workspace(num_bytes: int, device: torch.device | str) -> torch.Tensor:
    """Returns [num_bytes] uint8 zeros."""
    with _region():
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
