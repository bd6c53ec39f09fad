"""What a faulty line does beside the right one: whether it has an effect at all, and whether any could be seen.

Before a line's first effect the faulty execution is the right one. So both instructions are executed there, in the same
state, and compared: if they never differ, nothing that follows does. And where they differ in registers, these can be
spoiled, filled with ones (a NaN, the last address): if no result changes of that, no fault there can show.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang.ledger.ptx.machine import Machine, unwritten
from sglang.ledger.ptx.operands import Slots
from sglang.ledger.ptx.parser import Address, Instruction, Number, Pair, Register, Vector
from sglang.ledger.ptx.program import Program, step_of
from sglang.ledger.ptx.steps_alu import Step

NO_EFFECT = "no effect"
"""The faulty line did in every thread what the right one does, each time."""
DEAD = "dead"
"""No result depends on what the threads compute there in which the two lines differ."""


@dataclass(slots=True)
class Effect:
    seen: bool = False
    """Whether the faulty line did something else, in any thread."""
    can_spoil: bool = False


def watch(code: Program, line: int, right: Instruction, spoiling: bool) -> Effect | None:
    """Makes a faulty program compare its line with the right instruction; None: the line has no step. `spoiling`: what
    differs is filled with ones."""
    for block in code.blocks:
        for i, faulty in enumerate(block.instructions):
            if faulty.line == line:
                effect = Effect()
                block.steps[i] = _compared(block.steps[i], faulty, right, code.slots, effect, spoiling)
                return effect
    return None


def watch_barrier(code: Program, line: int) -> Effect:
    """Makes a right program note whether a barrier of it is one of threads that have touched shared memory since the
    last barrier of their block; one without is for nothing."""
    effect = Effect()

    def look(m: Machine) -> None:
        blocks = m.block_of_lane if m.mask is None else m.block_of_lane[m.mask]
        effect.seen = effect.seen or bool(m.watch.touched[blocks].any())

    for block in code.blocks:
        for i, instruction in enumerate(block.instructions):
            if instruction.line == line:
                block.steps.insert(i, look)
                block.instructions.insert(i, instruction)
                return effect
        if block.last is not None and block.last.line == line:
            block.steps.append(look)
            block.instructions.append(block.last)
            return effect
    raise AssertionError(f"no barrier in line {line}")


def _compared(
    step: Step, faulty: Instruction, right: Instruction, slots: Slots, effect: Effect, spoiling: bool
) -> Step:
    name = right.opcode.partition(".")[0]
    if right.opcode.startswith("cp.async.wait_group"):
        return _waiting(step, right, effect)
    if name in ("st", "red", "atom"):
        return _storing(step, faulty, right, slots, effect)
    if name == "cp":
        return _copying(step, right, slots, effect, spoiling)
    right_step = step_of(right, slots)
    results = [slots.register(register) for register in _registers(right.operands[0])]
    effect.can_spoil = all(slots.types[slot].kind != "p" for slot in results)

    def run(m: Machine) -> None:
        before = [m.registers[slot] for slot in results]
        right_step(m)
        wanted = [m.registers[slot] for slot in results]
        for slot, value in zip(results, before, strict=True):
            m.registers[slot] = value
        step(m)
        for slot, want in zip(results, wanted, strict=True):
            value = m.registers[slot]
            assert value is not None and want is not None
            away = m.full(value) != m.full(want)
            effect.seen = effect.seen or bool(away.any())
            if spoiling and away.any():
                m.registers[slot] = np.where(away, unwritten(1, value.dtype), m.full(value))

    return run


def _waiting(step: Step, right: Instruction, effect: Effect) -> Step:
    """Compares which copies are waited for: the faulty line leaves one group more. Loops prefetch behind their ends,
    where all threads copy zeros."""
    (most,) = right.operands
    assert isinstance(most, Number)

    def run(m: Machine) -> None:
        for lanes, _, values, _, groups in m.copies.pending:
            left = groups == m.copies.groups[lanes] - most.value - 1
            effect.seen = effect.seen or bool(values[left].any())
        step(m)

    return run


def _storing(step: Step, faulty: Instruction, right: Instruction, slots: Slots, effect: Effect) -> Step:
    """Compares which threads store what to where. One that stores elsewhere, or that adds, has an effect."""
    guard = None if right.guard is None else slots.source(right.guard, 1)
    masked = guard is not None and faulty.guard is None and right.opcode.startswith("st.")
    registers = [slots.source(register, 32) for operand in right.operands for register in _registers(operand)]

    def run(m: Machine) -> None:
        if not masked:
            effect.seen = True
        elif not effect.seen:
            chosen, every = m.active(guard, right.negated), np.ones(m.lanes, dtype=bool) if m.mask is None else m.mask
            values = [m.registers[slot] for slot in registers]
            stored = np.stack([m.full(value).astype(np.uint64) for value in values if value is not None], axis=1)
            wanted = every if chosen is None else chosen
            known = {tuple(row) for row in stored[wanted].tolist()}
            effect.seen = any(tuple(row) not in known for row in stored[every & ~wanted].tolist())
        step(m)

    return run


def _copying(step: Step, right: Instruction, slots: Slots, effect: Effect, spoiling: bool) -> Step:
    """Compares what is copied to shared memory: the right line copies zeros for threads whose length is none."""
    length = slots.source(right.operands[3], 32)
    effect.can_spoil = True

    def run(m: Machine) -> None:
        before = len(m.copies.pending)
        step(m)
        for lanes, _, values, _, _ in m.copies.pending[before:]:
            lengths = m.registers[length]
            assert lengths is not None
            away = (m.full(lengths)[lanes] == 0)[:, None] & (values != 0)
            effect.seen = effect.seen or bool(away.any())
            if spoiling:
                values[away] = np.iinfo(values.dtype).max

    return run


def _registers(operand: object) -> list[Register]:
    if isinstance(operand, Register):
        return [operand]
    if isinstance(operand, Vector):
        return [register for item in operand.items for register in _registers(item)]
    if isinstance(operand, Address):
        return _registers(operand.base)
    return [*_registers(operand.first), *_registers(operand.second)] if isinstance(operand, Pair) else []
