"""Memory by tag that can be given back while tensors, and graphs, keep its addresses: what the saver asks of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Arenas(Protocol):
    """The arenas of one rank, one for each tag of `utils.engine_state`."""

    graph_pool: Any
    """The pool of graphs, as torch takes it; None: torch's own."""

    def region(self, tag: str) -> AbstractContextManager[None]:
        """Allocates in the arena of `tag` inside the block. What the block allocated and freed is given back at its
        end."""

    def size(self, tag: str) -> int:
        """Returns the bytes of an arena, asleep or awake."""

    def segments(self, tag: str) -> list[torch.Tensor]:
        """Returns the memory of an arena that is awake as [bytes] uint8, always in the same order."""

    def unmap(self, tag: str) -> None:
        """Gives the memory back. Nothing may use it until `map`."""

    def map(self, tag: str) -> None:
        """Takes memory at the same addresses, whose content is undefined. Raises MemoryError; then nothing is taken."""

    def free_bytes(self) -> int | None:
        """Returns the bytes that the device has free; None: that limits nothing."""
