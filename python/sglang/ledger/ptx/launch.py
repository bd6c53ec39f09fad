"""Runs a kernel over torch tensors: PTX, a grid, and the values of its parameters.

launch(ptx, grid=(4, 1, 1), arguments={"x_ptr": x, "size": 100, "scale": 0.5}, shared_bytes=0)
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang.ledger.ptx.counts import Counts
from sglang.ledger.ptx.execute import execute
from sglang.ledger.ptx.machine import Machine
from sglang.ledger.ptx.memory import GlobalMemory, host_bytes
from sglang.ledger.ptx.parser import parse
from sglang.ledger.ptx.problems import Unsupported
from sglang.ledger.ptx.program import Program, program
from sglang.ledger.ptx.types import Array, Type

MOST_LANES = 8192
"""Threads that are executed together: more cost numpy's caches, fewer cost its calls."""


@dataclass(slots=True)
class Executed:
    """What a launch did: lanes that ran each form of instruction, and bytes of global memory that were touched."""

    instructions: Counter[str] = field(default_factory=Counter)
    bytes_read: int = 0
    bytes_written: int = 0
    choices: int = 0
    """Stores whose outcome is one of two roundings of a sum."""
    lines: set[int] = field(default_factory=set)
    """Of the module's text, that some thread reached."""
    counts: Counts | None = None
    """What the launch asked of a card's units; None: nobody asked."""


@functools.lru_cache(maxsize=256)
def compiled(ptx: str) -> Program:
    """Returns a module as steps. Raises Unsupported."""
    return program(parse(ptx))


def launch(
    ptx: str, grid: tuple[int, int, int], arguments: Mapping[str, Any], shared_bytes: int = 0, threads: int = 0,
    counting: bool = False,
) -> Executed:  # fmt: skip
    """Runs all blocks of a grid. `arguments` has a value for each of the kernel's parameters, in order: tensors on the
    CPU, numbers, structs of ctypes, None or 0 for a null pointer; those that are missing at the end are null. With
    `counting` what it asks of a card's units is counted, which takes longer. Raises Hazard, Unsupported."""
    return run(compiled(ptx), GlobalMemory(), grid, arguments, shared_bytes, threads, Counts() if counting else None)


def run(
    code: Program, memory: GlobalMemory, grid: tuple[int, int, int], arguments: Mapping[str, Any],
    shared_bytes: int = 0, threads: int = 0, asked: Counts | None = None,
) -> Executed:  # fmt: skip
    """Runs a program as `launch` does; the tensors become allocations of `memory`. Adds to `asked`, if given."""
    memory.alone = memory.alone and not code.blocks_agree
    slots = _with_parameters(code, memory, arguments)
    threads = code.module.threads or threads
    blocks = [(x, y, z) for z, y, x in itertools.product(*(range(n) for n in reversed(grid)))]
    at_once = max(MOST_LANES // threads, 1)
    counts, warps = Counter[int](), Counter[int]()
    choices = 0
    for first in range(0, len(blocks), at_once):
        some = blocks[first : first + at_once]
        machine = Machine(
            slots, threads, some, memory, code.slots.shared_bytes + shared_bytes, code.slots.local_bytes, code.word,
            first, asked,
        )  # fmt: skip
        _set_special(machine, code, some, grid)
        execute(code, machine, counts, warps)
        choices += machine.choices
    done = Executed(bytes_read=memory.bytes_read, bytes_written=memory.bytes_written, choices=choices, counts=asked)
    for number, lanes in counts.items():
        for instruction in code.blocks[number].instructions:
            done.instructions[instruction.opcode] += lanes
            done.lines.add(instruction.line)
            if asked is not None:
                asked.instructions(instruction.opcode, warps[number])
        last = code.blocks[number].last
        if last is not None:
            done.lines.add(last.line)
            if asked is not None:
                asked.instructions(last.opcode, warps[number])
    return done


def _with_parameters(code: Program, memory: GlobalMemory, arguments: Mapping[str, Any]) -> list[Array | None]:
    slots = list(code.slots.initial)
    values = list(arguments.items())
    parameters = code.module.parameters
    if len(values) > len(parameters):
        raise Unsupported(f"{code.module.name} has {len(parameters)} parameters and gets {len(values)}")
    for i, (name, kind) in enumerate(parameters):
        given, value = values[i] if i < len(values) else ("", 0)
        slots[code.slots.parameters[name]] = _parameter(kind, given, value, memory)
    return slots


def _parameter(kind: Type, name: str, value: Any, memory: GlobalMemory) -> Array:
    if isinstance(value, ctypes.Structure):
        return _struct(value, memory)
    if hasattr(value, "data_ptr"):
        storage = value.untyped_storage()
        size, host = storage.nbytes(), storage.data_ptr()
        if size == 0:
            return np.array([_EMPTY], dtype=np.uint64)
        allocation = memory.add(name, host_bytes(host, size), host)
        return np.array([allocation.base + value.data_ptr() - host], dtype=np.uint64)
    if isinstance(value, float) or kind.kind == "f":
        code = {16: "e", 32: "f", 64: "d"}[kind.bits]
        return np.frombuffer(struct.pack(f"<{code}", value), dtype=kind.storage).copy()
    return np.array([int(value or 0) & (1 << kind.bits) - 1], dtype=kind.storage)


def _struct(value: ctypes.Structure, memory: GlobalMemory) -> Array:
    """Returns a struct's bytes, with the executor's addresses in the place of pointers into tensors of this process."""
    data = np.frombuffer(bytes(value), dtype=np.uint8).copy()
    for name, kind, *_ in value._fields_:
        host = getattr(value, name)
        if kind is ctypes.c_void_p and host:
            place = getattr(type(value), name).offset
            data[place : place + 8] = np.array([memory.address_of(name, host)], dtype=np.uint64).view(np.uint8)
    return data


_EMPTY = 1 << 62
"""The address of a tensor without elements: in no array."""


def _set_special(machine: Machine, code: Program, blocks: list[tuple[int, int, int]], grid: tuple[int, ...]) -> None:
    threads = machine.threads
    lane = np.arange(machine.lanes)
    place = np.array(blocks, dtype=np.uint32)
    one = np.ones(1, dtype=np.uint32)
    values: dict[str, Any] = {
        "%tid.x": lane % threads, "%tid.y": 0 * one, "%tid.z": 0 * one,
        "%ntid.x": one * threads, "%ntid.y": one, "%ntid.z": one,
        "%laneid": lane % 32, "%warpid": lane % threads // 32,
        "%lanemask_lt": (1 << (lane % 32)) - 1,
    }  # fmt: skip
    for i, axis in enumerate("xyz"):
        same = (place[:, i] == place[0, i]).all()
        values[f"%ctaid.{axis}"] = place[:1, i] if same else np.repeat(place[:, i], threads)
        values[f"%nctaid.{axis}"] = one * grid[i]
    for name, slot in code.slots.special.items():
        machine.registers[slot] = np.asarray(values[name]).astype(np.uint32)
