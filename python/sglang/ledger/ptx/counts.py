"""Counts what a launch asks of a card's units: instructions of warps, sectors of global memory, shared memory's turns.

Instructions are PTX's: the assembler joins some and makes several of others. A warp's access to global memory moves
whole sectors of 32 bytes. Shared memory has 32 banks of 4 bytes: a warp's access takes a turn for each other word of
one bank, and eight or 16 bytes a thread are asked for by halves or quarters of a warp.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang.ledger.compile import matrix_instructions
from sglang.ledger.ptx.types import Array

SECTOR = 32
BANKS, WORD = 32, 4
_MERGED = 1 << 20
"""Sectors that are noted more than once before the lists are made shorter."""

_NAMES = {
    "mma": "mma",
    "ldmatrix": "shared", "stmatrix": "shared",
    "shfl": "shuffle", "vote": "shuffle", "match": "shuffle", "redux": "shuffle", "activemask": "shuffle",
    "ex2": "special", "lg2": "special", "rcp": "special", "rsqrt": "special", "sqrt": "special", "sin": "special",
    "cos": "special", "tanh": "special", "div": "special",
    "cvt": "convert",
    "bra": "control", "bar": "control", "barrier": "control", "ret": "control", "exit": "control", "trap": "control",
    "mov": "move", "selp": "move", "cvta": "move",
}  # fmt: skip
"""Class of an instruction by its name, where the name tells it."""
_SPACES = {"global": "global", "shared": "shared", "local": "local", "param": "move"}
_FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"}


def class_of(opcode: str) -> str:
    """Returns the class of an instruction: "mma", "global", "shared", "local", "shuffle", "special", "convert",
    "control", "move", "float" or "integer"."""
    name, *modifiers = opcode.split(".")
    if name in ("ld", "st", "atom", "red"):
        spaces = (_SPACES.get(m.partition("::")[0]) for m in modifiers)
        return next((space for space in spaces if space), "global")
    if name == "cp":
        return "global" if "global" in modifiers else "control"
    if name == "div" and not _FLOATS & set(modifiers):
        return "integer"
    return _NAMES.get(name) or ("float" if _FLOATS & set(modifiers) else "integer")


@dataclass(slots=True)
class Counts:
    """What one launch did. Add the instructions of warps by opcode; accesses add themselves."""

    classes: Counter[str] = field(default_factory=Counter)
    mma: Counter[str] = field(default_factory=Counter)
    """Of warps, by the ledger's names of matrix instructions ("m16n8k16 bf16")."""
    asked: int = 0
    """Bytes of global memory that threads read or write."""
    sectors: int = 0
    """That these accesses move."""
    turns: int = 0
    """Of shared memory: 128 bytes at most."""
    conflicts: int = 0
    """Turns above the least possible."""
    _seen: list[Array] = field(default_factory=list)
    _noted: int = 0

    def instructions(self, opcode: str, warps: int) -> None:
        """Adds an instruction that so many warps executed."""
        self.classes[class_of(opcode)] += warps
        for kind in matrix_instructions(opcode):
            self.mma[kind] += warps

    def global_access(self, addresses: Array, lanes: Array, size: int) -> None:
        """Adds an access of `size` bytes by each lane."""
        if addresses.size == 0:
            return
        sector = addresses.astype(np.int64) // SECTOR
        warp = lanes // 32
        order = np.lexsort((sector, warp))
        sector, warp = sector[order], warp[order]
        first = np.ones(sector.size, dtype=bool)
        first[1:] = (sector[1:] != sector[:-1]) | (warp[1:] != warp[:-1])
        self.asked += size * addresses.size
        self.sectors += int(np.count_nonzero(first))
        self._seen.append(np.unique(sector))
        self._noted += self._seen[-1].size
        if self._noted > _MERGED:
            self._seen = [np.unique(np.concatenate(self._seen))]
            self._noted = 0

    def shared_access(self, offsets: Array, lanes: Array, size: int) -> None:
        """Adds an access of `size` bytes by each lane, at offsets that are multiples of 128 apart by block."""
        if offsets.size == 0:
            return
        words = max(size // WORD, 1)
        phase = lanes // (32 // words)
        word = (offsets // WORD)[:, None] + np.arange(words)
        keys = np.unique((phase[:, None].astype(np.int64) << 40) | word)
        phases, which = np.unique(keys >> 40, return_inverse=True)
        of_bank = np.bincount(which * BANKS + keys % BANKS, minlength=phases.size * BANKS)
        turns = int(of_bank.reshape(-1, BANKS).max(axis=1).sum())
        self.turns += turns
        self.conflicts += turns - phases.size

    @property
    def touched(self) -> int:
        """Returns the bytes of all different sectors."""
        return SECTOR * int(np.unique(np.concatenate(self._seen)).size) if self._seen else 0

    def content(self) -> dict[str, Any]:
        """Returns the figures by name, as the record has them."""
        return {
            "instructions": dict(sorted(self.classes.items())),
            "mma": dict(sorted(self.mma.items())),
            "global": {"asked": self.asked, "sectors": self.sectors, "touched": self.touched},
            "shared": {"turns": self.turns, "conflicts": self.conflicts},
        }
