"""Where an instruction finds its operands: every register, constant and special register has a slot, a number."""

from __future__ import annotations

import numpy as np

from sglang.ledger.ptx.memory import SHARED_BASE
from sglang.ledger.ptx.parser import Address, Instruction, Module, Number, Operand, Pair, Register, Symbol, Vector
from sglang.ledger.ptx.problems import Unsupported
from sglang.ledger.ptx.types import TYPES, UNSIGNED, Array, Type

SPECIAL = ("%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z",
           "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid", "%warpid", "%lanemask_lt")  # fmt: skip
"""What a launch gives (10); all of 32 bits."""


PARAMETER_STEP = 1 << 12
"""Between the addresses of two parameters; they are the slots' numbers times this. No parameter is larger."""


class Slots:
    """The slots of a module's registers, constants and special registers."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self.initial: list[Array | None] = []
        self.types: list[Type] = []
        self.names: list[str] = []
        self._numbers: dict[object, int] = {}
        self.parameters = {name: self._add(name, kind, None) for name, kind in module.parameters}
        self.special: dict[str, int] = {}
        self._written: set[int] = set()
        self.arrays, self.shared_bytes, self.local_bytes = _places(module)
        for name, kind in module.registers.items():
            self._numbers[name] = self._add(name, kind, None)

    def _add(self, name: str, kind: Type, value: Array | None) -> int:
        self.initial.append(value)
        self.types.append(kind)
        self.names.append(name)
        return len(self.initial) - 1

    def register(self, operand: Operand) -> int:
        """Returns the slot of a register that is written."""
        if isinstance(operand, Symbol) and operand.name == "_":
            return self._add("_", TYPES["b64"], None)
        if not isinstance(operand, Register):
            raise Unsupported(f"a result in {operand}")
        self._written.add(self._numbers[operand.name])
        return self._numbers[operand.name]

    def poison_what_nothing_writes(self) -> None:
        """Gives registers that no instruction writes, LLVM's undefined values, all ones: NaN, the last address."""
        for name in self._module.registers:
            slot = self._numbers[name]
            if slot not in self._written:
                kind = self.types[slot]
                ones = np.zeros(1, dtype=bool) if kind.kind == "p" else ~np.zeros(1, dtype=UNSIGNED[kind.bits])
                self.initial[slot] = ones

    def source(self, operand: Operand, bits: int) -> int:
        """Returns the slot of an operand of an instruction that reads `bits` of it (1: a predicate)."""
        if isinstance(operand, Register):
            return self._numbers[operand.name]
        if isinstance(operand, Number):
            return self.constant(operand.value, bits)
        if isinstance(operand, Symbol):
            if operand.name in SPECIAL:
                return self._special(operand.name)
            if operand.name in self.parameters:
                return self.constant(self.parameters[operand.name] * PARAMETER_STEP, bits)
            if operand.name in self.arrays:
                return self.constant(self.arrays[operand.name], bits)
            if operand.name == "WARP_SZ":
                return self.constant(32, bits)
        raise Unsupported(f"the operand {operand}")

    def constant(self, value: int, bits: int) -> int:
        """Returns the slot of a constant."""
        key = (value, bits)
        if key not in self._numbers:
            data = np.array([bool(value)]) if bits == 1 else np.array([value & (1 << bits) - 1], dtype=UNSIGNED[bits])
            self._numbers[key] = self._add(str(value), TYPES["pred" if bits == 1 else f"b{bits}"], data)
        return self._numbers[key]

    def _special(self, name: str) -> int:
        if name not in self.special:
            self.special[name] = self._add(name, TYPES["b32"], None)
        return self.special[name]

    def address(self, operand: Operand) -> tuple[int, int]:
        """Returns the slot of an address's base and its offset."""
        if not isinstance(operand, Address):
            raise Unsupported(f"the address {operand}")
        if operand.base is None:
            return self.constant(operand.offset, 64), 0
        return self.source(operand.base, 32), operand.offset

    def items(self, operand: Operand) -> tuple[Operand, ...]:
        """Returns the elements of a vector, or the operand alone."""
        return operand.items if isinstance(operand, Vector) else (operand,)

    def result_and_predicate(self, operand: Operand) -> tuple[int, int | None]:
        """Returns the slots of a result d, or of d|p."""
        if isinstance(operand, Pair):
            return self.register(operand.first), self.register(operand.second)
        return self.register(operand), None


def _places(module: Module) -> tuple[dict[str, int], int, int]:
    """Returns the addresses of arrays in shared and local memory, and how much of both a module declares."""
    places: dict[str, int] = {}
    ends = {"shared": SHARED_BASE, "local": 0}
    for array in module.arrays.values():
        if array.space in ends:
            at = -(-ends[array.space] // array.align) * array.align
            places[array.name] = at
            ends[array.space] = at + array.size
    return places, ends["shared"] - SHARED_BASE, ends["local"]


def registers_read(instruction: Instruction) -> list[str]:
    """Returns the names of the registers that an instruction reads, for messages."""
    names: list[str] = []

    def add(operand: object) -> None:
        if isinstance(operand, Register):
            names.append(operand.name)
        elif isinstance(operand, Vector):
            for item in operand.items:
                add(item)
        elif isinstance(operand, Address):
            add(operand.base)

    writes_memory = instruction.opcode.startswith(("st.", "stmatrix.", "red.", "cp."))
    for operand in instruction.operands[0 if writes_memory else 1 :]:
        add(operand)
    return names
