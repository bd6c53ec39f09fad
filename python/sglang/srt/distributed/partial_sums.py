"""Deferred all-reduces of a block's partial sums: started where the total is needed, or earlier and only received
there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class DeferredAllReduce(Protocol):
    """Performs the all-reduce of the partial sums that a block returned: their group, or an all-reduce already on its
    way."""

    def all_reduce(self, x: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """Returns the sum of `x` over the ranks. exact: never quantized."""

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the norm of the sum plus `residual`, and that sum, both [T, H]; None if no kernel fuses them."""


class PendingAllReduce:
    """An all-reduce that was already sent. Callers pass the same partial sums again, which are ignored."""

    def __init__(self, receive: Callable[[], torch.Tensor]) -> None:
        self._receive = receive

    def all_reduce(self, x: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """Waits for the total and returns it."""
        return self._receive()

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns None: no kernel fuses a norm with an all-reduce on its way."""
        return None
