"""Steps that compute registers from registers of the same thread: arithmetic, conversions, moves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sglang.ledger.ptx.conversions import convert
from sglang.ledger.ptx.floats import floating, is_floating
from sglang.ledger.ptx.integers import INTEGERS, Semantics, integer
from sglang.ledger.ptx.machine import Machine
from sglang.ledger.ptx.operands import Slots
from sglang.ledger.ptx.parser import Instruction, Not, Pair, Vector
from sglang.ledger.ptx.problems import Unsupported
from sglang.ledger.ptx.types import UNSIGNED, Array, Opcode

Step = Callable[[Machine], None]


def semantics(op: Opcode) -> Semantics:
    """Returns what computes an opcode from registers. Raises Unsupported."""
    if op.name == "cvt":
        return convert(op)
    comparing = op.name in ("setp", "selp", "mov")
    return floating(op) if is_floating(op) and not comparing else integer(op)


def is_computed(instruction: Instruction) -> bool:
    """Returns whether an instruction computes registers from registers."""
    name = instruction.opcode.partition(".")[0]
    return name in INTEGERS or name == "cvt" or (is_floating(Opcode(instruction.opcode)) and name not in _ELSEWHERE)


_ELSEWHERE = ("ld", "st", "atom", "red", "mma", "shfl", "redux")


def computing_step(instruction: Instruction, slots: Slots) -> Step:
    """Returns the step of an instruction that computes registers from registers."""
    op = Opcode(instruction.opcode)
    guard = None if instruction.guard is None else slots.source(instruction.guard, 1)
    negated = instruction.negated
    if op.name == "mov" and any(isinstance(operand, Vector) for operand in instruction.operands):
        return _moving_vector(instruction, slots, guard, negated)
    rule = semantics(op)
    operands = list(instruction.operands)
    target = operands.pop(0)
    if isinstance(target, Pair):
        raise Unsupported(f"{instruction.opcode} with two results")
    slot = slots.register(target)
    if op.name in ("min", "max") and len(operands) == 3:  # of three operands (9.7.3.13): as one after the other
        pair = rule.run
        rule = Semantics(lambda a, b, c: pair(pair(a, b), c), rule.sources[:1] * 3, rule.results)
    if len(operands) != len(rule.sources):
        raise Unsupported(f"{instruction.opcode} with {len(operands)} operands")
    flips = [isinstance(operand, Not) for operand in operands]
    sources = [
        slots.source(operand.register if isinstance(operand, Not) else operand, bits)
        for operand, bits in zip(operands, rule.sources, strict=True)
    ]
    run = rule.run
    if any(flips):
        plain, flipped = run, flips

        def run(*values: Array) -> Array:
            return plain(*(~x if flip else x for x, flip in zip(values, flipped, strict=True)))

    kind = slots.types[slot]
    if kind.kind != "p" and kind.bits > rule.results[0]:
        narrow, wide = run, UNSIGNED[kind.bits]
        signed = op.name == "cvt" and Opcode(instruction.opcode).modifiers[-2].startswith("s")

        def run(*values: Array) -> Array:
            value = narrow(*values)
            return (
                value.view(f"i{value.itemsize}").astype(f"i{wide().itemsize}").view(wide)
                if signed
                else value.astype(wide)
            )

    return _assigning(run, sources, slot, guard, negated)


def _assigning(run: Callable[..., Array], sources: list[int], slot: int, guard: int | None, negated: bool) -> Step:
    """Returns the step that writes a function of some registers to another one."""
    if guard is not None:

        def guarded(m: Machine) -> None:
            registers = m.registers
            value = run(*[registers[i] for i in sources])
            active = m.active(guard, negated)
            if active is None:
                registers[slot] = value
            else:
                m.write_where(slot, value, active)

        return guarded
    if len(sources) == 1:
        (a,) = sources

        def one(m: Machine) -> None:
            value = run(m.registers[a])
            if m.mask is None:
                m.registers[slot] = value
            else:
                m.write_where(slot, value, m.mask)

        return one
    if len(sources) == 2:
        a, b = sources

        def two(m: Machine) -> None:
            registers = m.registers
            value = run(registers[a], registers[b])
            if m.mask is None:
                registers[slot] = value
            else:
                m.write_where(slot, value, m.mask)

        return two

    def several(m: Machine) -> None:
        registers = m.registers
        value = run(*[registers[i] for i in sources])
        if m.mask is None:
            registers[slot] = value
        else:
            m.write_where(slot, value, m.mask)

    return several


def _moving_vector(instruction: Instruction, slots: Slots, guard: int | None, negated: bool) -> Step:
    """mov of a register to parts, or of parts to a register, lower bits first (9.7.9.4)."""
    bits = Opcode(instruction.opcode).type().bits
    target, source = instruction.operands
    if isinstance(source, Vector):
        part = bits // len(source.items)
        parts = [slots.source(item, part) for item in source.items]
        whole, wide = slots.register(target), UNSIGNED[bits]

        def joined(*values: Array) -> Array:
            out = values[0].astype(wide)
            for i, value in enumerate(values[1:], 1):
                out = out | (value.astype(wide) << wide(part * i))
            return out

        return _assigning(joined, parts, whole, guard, negated)
    assert isinstance(target, Vector)
    part = bits // len(target.items)
    narrow = UNSIGNED[part]
    whole = slots.source(source, bits)
    targets = [slots.register(item) for item in target.items]

    def split(m: Machine) -> None:
        value, active = m.registers[whole], m.active(guard, negated)
        assert value is not None
        for i, slot in enumerate(targets):
            item = (value >> value.dtype.type(part * i)).astype(narrow) if i else value.astype(narrow)
            if active is None:
                m.registers[slot] = item
            else:
                m.write_where(slot, item, active)

    return split


def nothing(m: Machine) -> None:
    """Does what changes no result: hints, fences between what is executed in order anyway."""


def setting(slot: int, value: int) -> Step:
    """Returns the step that writes a constant."""

    def run(m: Machine) -> None:
        m.write(slot, np.array([value], dtype=np.uint64))

    return run
