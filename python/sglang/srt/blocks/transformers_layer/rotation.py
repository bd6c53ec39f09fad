"""Rotates queries and keys of a class in the kernel that stores keys, by the angles of the class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_of_step: AnglesOfStep | None = None


class AnglesOfStep:
    """The angles that a class rotates by in a step. While one is entered, `deferred` functions do not rotate: they keep
    the angles for the attention that follows."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._next: int | None = None

    def __enter__(self) -> AnglesOfStep:
        global _of_step
        _of_step = self
        return self

    def __exit__(self, *raised: object) -> None:
        global _of_step
        _of_step = None

    def give(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Takes cosines and sines [1, T, R] with each angle twice. The layers of a step have few different ones."""
        if id(cos) not in self._tables:
            half = cos.shape[-1] // 2
            table = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1).float()
            self._tables[id(cos)] = torch.arange(len(table), device=table.device), table, cos  # kept for its identity
        self._next = id(cos)

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns each token's row [T], and the rows [T, R] fp32, cosines and then sines."""
        assert self._next is not None, "the class has just called its function"
        rows, table, _ = self._tables[self._next]
        self._next = None
        return rows, table


def deferred(rotate: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function in the place of a class's own `rotate`, which it calls where no step is computed."""
    if getattr(rotate, "is_deferred", False):
        return rotate

    def keep_angles(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any, **named: Any
    ) -> Any:
        if _of_step is None:
            return rotate(q, k, cos, sin, *more, **named)
        _of_step.give(cos, sin)
        return q, k

    keep_angles.is_deferred = True  # type: ignore[attr-defined]
    return keep_angles
