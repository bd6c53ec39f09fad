"""The types of PTX (5.2.1) as numpy has them, and opcodes taken apart.

A register holds unsigned integers of its size; an instruction looks at them as the type that it names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang.ledger.ptx.problems import Unsupported

Array = Any
"""A numpy array. Its type is no part of the annotation: registers are seen as one type and another."""
UNSIGNED: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


@dataclass(frozen=True, slots=True)
class Type:
    """`kind`: b (bits), u, s (integers), f (IEEE), bf (bfloat16), p (predicates), x (packed or narrow formats),
    struct (bytes of a parameter)."""

    name: str
    kind: str
    bits: int

    @property
    def storage(self) -> Any:
        """Returns numpy's type of a register with such a value."""
        return np.bool_ if self.kind == "p" else UNSIGNED[self.bits]

    @property
    def numpy(self) -> Any:
        """Returns numpy's type of the value, where numpy has it."""
        if self.kind == "f":
            return {16: np.float16, 32: np.float32, 64: np.float64}[self.bits]
        return SIGNED[self.bits] if self.kind == "s" else self.storage


def _types() -> dict[str, Type]:
    types = [Type("pred", "p", 1), Type("bf16", "bf", 16), Type("tf32", "x", 32)]
    types += [Type(f"{kind}{bits}", kind, bits) for kind in "bus" for bits in (8, 16, 32, 64)]
    types += [Type(f"f{bits}", "f", bits) for bits in (16, 32, 64)]
    packed = {"f16x2": 32, "bf16x2": 32, "f32x2": 64, "u16x2": 32, "s16x2": 32}
    packed |= {"e4m3x2": 16, "e5m2x2": 16, "e2m3x2": 16, "e3m2x2": 16, "ue8m0x2": 16, "e2m1x2": 8}
    packed |= {"e4m3": 8, "e5m2": 8, "e2m3": 8, "e3m2": 8, "e2m1": 8, "ue8m0": 8, "ue4m3": 8}
    return {t.name: t for t in [*types, *(Type(name, "x", bits) for name, bits in packed.items())]}


TYPES = _types()


def bytes_type(size: int) -> Type:
    """Returns the type of a parameter that is a struct."""
    return Type("struct", "struct", 8 * size)


class Opcode:
    """An opcode such as "ld.global.v4.b32", whose modifiers are taken one by one. What is left over is unknown."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.name, *self.modifiers = text.split(".")

    def take(self, *names: str) -> str:
        """Removes and returns the first modifier that is one of the names; "" if there is none."""
        for i, modifier in enumerate(self.modifiers):
            if modifier in names:
                return self.modifiers.pop(i)
        return ""

    def need(self, *names: str) -> str:
        """Removes and returns a modifier that must be there."""
        name = self.take(*names)
        if not name:
            raise Unsupported(f"{self.text} without one of {', '.join(names)}")
        return name

    def drop(self, *beginnings: str) -> None:
        """Removes modifiers that change no result, such as cache hints."""
        self.modifiers = [m for m in self.modifiers if not m.startswith(beginnings)]

    def type(self) -> Type:
        """Removes and returns the last modifier, a type."""
        if not self.modifiers or self.modifiers[-1] not in TYPES:
            raise Unsupported(f"{self.text} without a type")
        return TYPES[self.modifiers.pop()]

    def end(self) -> None:
        """Raises Unsupported if a modifier is left."""
        if self.modifiers:
            raise Unsupported(f"{self.text}: the modifier .{self.modifiers[0]}")
