"""Sums over ranks that a block leaves to what follows it: at once where they are asked for, or on their way before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Summands(Protocol):
    """What adds up the summands that the ranks have of a block's output: their group, or a sum on its way."""

    def all_reduce(self, x: torch.Tensor, exact: bool = False) -> torch.Tensor: ...

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None: ...


class SumOnItsWay:
    """The sum of a summand that was sent off; who asks for it gives the same summand."""

    def __init__(self, receive: Callable[[], torch.Tensor]) -> None:
        self._receive = receive

    def all_reduce(self, x: torch.Tensor, exact: bool = False) -> torch.Tensor:
        return self._receive()

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None
