"""The description of an op: its name in the tables and its torch reference, whose signature all its kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Op(Generic[T]):
    """An op. `Plan.entry` returns the kernel chosen for it as a T, so type checks hold calls to the reference.

    name: its key in `kernels.tables.TABLES`
    reference: the op in plain torch: a function, or a value with several functions
    """

    name: str
    reference: T
