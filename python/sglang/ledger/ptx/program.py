"""A module as steps: basic blocks of functions that change a machine, each with how it ends.

`program(module)` knows every instruction of a module or refuses it by name, with its line.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sglang.ledger.ptx.operands import Slots
from sglang.ledger.ptx.parser import Instruction, Module, Number, Symbol
from sglang.ledger.ptx.problems import Unsupported
from sglang.ledger.ptx.steps_alu import Step, computing_step, is_computed, nothing, setting
from sglang.ledger.ptx.steps_memory import memory_step
from sglang.ledger.ptx.steps_warp import WARP_NAMES, warp_step
from sglang.ledger.ptx.types import TYPES, Opcode

_MEMORY = ("ld", "st", "atom", "red", "cp")
_HINTS = ("prefetch", "discard", "applypriority", "griddepcontrol", "membar", "fence", "nanosleep")
_ENDS = ("bra", "ret", "exit", "trap")


@dataclass(slots=True)
class BasicBlock:
    """Instructions that are executed one after the other. `end`: "next", "branch", "exit", "barrier" or "trap"."""

    steps: list[Step] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    end: str = "next"
    target: int = -1
    """Of a branch: a block."""
    guard: int | None = None
    negated: bool = False
    last: Instruction | None = None
    """The branch, the barrier or the exit."""


@dataclass(slots=True)
class Program:
    module: Module
    slots: Slots
    blocks: list[BasicBlock]
    word: int
    """The smallest access to shared memory, in bytes."""

    @property
    def blocks_agree(self) -> bool:
        """Returns whether blocks may leave word for each other, by atomic operations or ordered stores."""
        opcodes = (instruction.opcode.split(".") for instruction in self.module.instructions)
        return any(words[0] in ("atom", "red") or {"acquire", "release"} & set(words) for words in opcodes)


def program(module: Module) -> Program:
    """Returns the module's steps. Raises Unsupported."""
    slots = Slots(module)
    starts = _starts(module)
    number = {start: i for i, start in enumerate(starts)}
    blocks = []
    for first, behind in zip(starts, [*starts[1:], len(module.instructions)], strict=True):
        block = BasicBlock()
        for instruction in module.instructions[first:behind]:
            try:
                _add(block, instruction, module, slots, number)
            except (Unsupported, KeyError, ValueError) as error:
                place = f"{module.name}, {instruction.source}, line {instruction.line}"
                raise Unsupported(f"{place}: {instruction.text} ({error})") from error
        blocks.append(block)
    slots.poison_what_nothing_writes()
    return Program(module, slots, blocks, _word(module))


def _starts(module: Module) -> list[int]:
    """Returns where basic blocks begin: at labels that are jumped to, and behind what ends one."""
    starts = {0}
    for i, instruction in enumerate(module.instructions):
        if _ends(instruction):
            starts.add(i + 1)
            target = instruction.operands[0] if instruction.operands else None
            if isinstance(target, Symbol) and target.name in module.labels:
                starts.add(module.labels[target.name])
    return sorted(start for start in starts if start < len(module.instructions))


def _ends(instruction: Instruction) -> bool:
    name, _, rest = instruction.opcode.partition(".")
    return name in _ENDS or (name in ("bar", "barrier") and not rest.startswith("warp"))


def _add(block: BasicBlock, instruction: Instruction, module: Module, slots: Slots, number: dict[int, int]) -> None:
    if _ends(instruction):
        _end(block, instruction, module, slots, number)
        return
    block.steps.append(step_of(instruction, slots))
    block.instructions.append(instruction)


def step_of(instruction: Instruction, slots: Slots) -> Step:
    """Returns the step of an instruction that ends no basic block. Raises Unsupported."""
    name = instruction.opcode.partition(".")[0]
    if name in _MEMORY:
        return memory_step(instruction, slots)
    if name in WARP_NAMES or name == "bar":
        return warp_step(instruction, slots)
    if name in _HINTS:
        return nothing
    if name == "createpolicy":
        return setting(slots.register(instruction.operands[0]), 0)
    if instruction.opcode == "cvta.to.global.u64":  # generic addresses of global memory are its own here (9.7.9.20)
        return computing_step(replace(instruction, opcode="mov.b64"), slots)
    if is_computed(instruction):
        return computing_step(instruction, slots)
    raise Unsupported("this instruction")


def _end(block: BasicBlock, instruction: Instruction, module: Module, slots: Slots, number: dict[int, int]) -> None:
    op = Opcode(instruction.opcode)
    block.last = instruction
    if instruction.guard is not None:
        block.guard, block.negated = slots.source(instruction.guard, 1), instruction.negated
    if op.name == "bra":
        op.take("uni")
        op.end()
        target = instruction.operands[0]
        assert isinstance(target, Symbol)
        place = module.labels[target.name]
        block.end, block.target = "branch", number.get(place, -1)
        if place >= len(module.instructions):
            raise Unsupported("a branch to the end")
    elif op.name in ("bar", "barrier"):
        op.take("cta"), op.need("sync"), op.take("aligned")
        op.end()
        if instruction.guard is not None or len(instruction.operands) != 1:
            raise Unsupported("a barrier of some threads")
        if not isinstance(instruction.operands[0], Number):
            raise Unsupported("a barrier whose number is in a register")
        block.end = "barrier"
    else:
        block.end = "trap" if op.name == "trap" else "exit"


def _word(module: Module) -> int:
    """Returns the size of the smallest access to shared memory."""
    sizes = [16]
    for instruction in module.instructions:
        op = Opcode(instruction.opcode)
        if op.name in _MEMORY and any(m.startswith("shared") for m in op.modifiers):
            sizes.append(TYPES[op.modifiers[-1]].bits // 8 if op.modifiers[-1] in TYPES else 4)
        elif op.name in ("ldmatrix", "stmatrix"):
            sizes.append(8)
    return min(sizes)
