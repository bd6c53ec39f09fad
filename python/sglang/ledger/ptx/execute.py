"""Executes a program for some blocks of a grid together.

All lanes that are at the earliest basic block execute it, under a mask; so threads that have parted meet again where
their paths do (compilers order code so). A barrier holds lanes until all of their block have come.
"""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

import numpy as np

from sglang.ledger.ptx.machine import Machine
from sglang.ledger.ptx.operands import registers_read
from sglang.ledger.ptx.parser import Instruction
from sglang.ledger.ptx.problems import Hazard
from sglang.ledger.ptx.program import BasicBlock, Program
from sglang.ledger.ptx.types import Array

MOST_BLOCKS = 2_000_000
"""Basic blocks that one execution may run before it counts as endless."""


def execute(program: Program, m: Machine, executed: Counter[int], warps: Counter[int]) -> None:
    """Runs all lanes to their ends; adds to `executed` and `warps` how many lanes and warps ran each basic block.
    Raises Hazard."""
    with np.errstate(all="ignore"):
        _Execution(program, m, executed, warps).run()


class _Execution:
    def __init__(self, program: Program, m: Machine, executed: Counter[int], warps: Counter[int]) -> None:
        self._program, self._m, self._executed, self._warps = program, m, executed, warps
        self._live = np.ones(m.lanes, dtype=bool)
        self._ready: dict[int, Array] = {0: self._live.copy()}
        self._waiting: dict[int, Array] = {}
        """Lanes at a barrier, by the block that ends with it."""

    def run(self) -> None:
        m, left = self._m, MOST_BLOCKS
        while self._ready or self._waiting:
            if not self._ready:
                self._stuck()
            number = min(self._ready)
            lanes = self._ready.pop(number)
            count = int(np.count_nonzero(lanes))
            m.mask = None if count == m.lanes else lanes
            self._executed[number] += count
            self._warps[number] += int(np.count_nonzero(lanes.reshape(-1, 32).any(axis=1)))
            block = self._program.blocks[number]
            self._steps(block)
            self._end(number, block, lanes)
            left -= 1
            if left == 0:
                raise Hazard("endless", f"{self._program.module.name} ran {MOST_BLOCKS} basic blocks")

    def _steps(self, block: BasicBlock) -> None:
        m, i = self._m, 0
        try:
            for i, step in enumerate(block.steps):  # noqa: B007 (which one it was is read below)
                step(m)
        except Hazard as hazard:
            self._at(block.instructions[i], hazard.kind, str(hazard))
        except (AttributeError, TypeError, AssertionError) as error:
            instruction = block.instructions[i]
            unwritten = [name for name in registers_read(instruction) if self._is_unwritten(name)]
            if not unwritten:
                raise RuntimeError(f"{instruction.text} (line {instruction.line}): {error}") from error
            self._at(instruction, "uninitialized", f"the register {', '.join(unwritten)}")

    def _is_unwritten(self, name: str) -> bool:
        slots = self._program.slots
        return any(n == name and self._m.registers[i] is None for i, n in enumerate(slots.names))

    def _at(self, instruction: Instruction | None, kind: str, what: str) -> NoReturn:
        name = self._program.module.name
        where = f"{name}, {instruction.source}, line {instruction.line}: {instruction.text}" if instruction else name
        raise Hazard(kind, f"{what.removeprefix(kind + ': ')} ({where})") from None

    def _end(self, number: int, block: BasicBlock, lanes: Array) -> None:
        if block.end == "barrier":
            self._waiting[number] = self._waiting[number] | lanes if number in self._waiting else lanes
            self._release(number)
            return
        if block.end == "next":
            self._go(number + 1, lanes)
            return
        taken, rest = self._parted(block, lanes)
        if block.end == "branch":
            self._go(block.target, taken)
        elif block.end == "trap" and taken.any():
            self._at(block.last, "out of bounds", "the kernel's own check failed")
        else:
            self._live &= ~taken
        self._go(number + 1, rest)

    def _parted(self, block: BasicBlock, lanes: Array) -> tuple[Array, Array]:
        """Returns the lanes for which the end's guard holds, and the others."""
        if block.guard is None:
            return lanes, np.zeros_like(lanes)
        predicate = self._m.registers[block.guard]
        if predicate is None:
            self._at(block.last, "uninitialized", "the register of the guard")
        holds = self._m.full(~predicate if block.negated else predicate)
        return lanes & holds, lanes & ~holds

    def _go(self, number: int, lanes: Array) -> None:
        if not lanes.any():
            return
        if number >= len(self._program.blocks):
            self._live &= ~lanes
            return
        self._ready[number] = self._ready[number] | lanes if number in self._ready else lanes

    def _release(self, number: int) -> None:
        """Lets the threads of blocks go on whose threads are all at this barrier."""
        waiting = self._waiting[number].reshape(-1, self._m.threads)
        complete = waiting.all(axis=1)
        if not complete.any():
            return
        for block in np.flatnonzero(complete):
            self._m.watch.barrier(int(block))
        gone = np.repeat(complete, self._m.threads)
        self._go(number + 1, self._waiting[number] & gone)
        left = self._waiting[number] & ~gone
        if left.any():
            self._waiting[number] = left
        else:
            del self._waiting[number]

    def _stuck(self) -> NoReturn:
        number = min(self._waiting)
        lanes = self._waiting[number]
        block = int(np.flatnonzero(lanes)[0]) // self._m.threads
        here = lanes.reshape(-1, self._m.threads)[block]
        self._at(
            self._program.blocks[number].last, "barrier",
            f"{int(here.sum())} of {self._m.threads} threads of block {block} reach it",
        )  # fmt: skip
