"""Launches on which faults are tried: a right text and its arguments, and whether a faulty text shows.

A test's inputs are often parts of larger arrays, whose other bytes are as harmless as those that count. So a trial
fills the bytes that the right text never reads with ones: a NaN, an index of -1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sglang.ledger.ptx.effect import DEAD, NO_EFFECT, Effect, watch, watch_barrier
from sglang.ledger.ptx.launch import Executed, run
from sglang.ledger.ptx.memory import GlobalMemory
from sglang.ledger.ptx.mutate import Mutation
from sglang.ledger.ptx.parser import Instruction, parse
from sglang.ledger.ptx.problems import Hazard, Unsupported
from sglang.ledger.ptx.program import Program, program

TOLERANCE = 1e-3
"""Of a result's norm; and of one element, of the result's mean size beside what its type rounds."""
_ROUNDED = {torch.bfloat16: 1.6e-2, torch.float16: 1e-3, torch.float32: 1e-3}
"""Of an element, as tests allow."""


class Trial:
    """A launch of a right text, which can be repeated with faulty ones."""

    def __init__(
        self, ptx: str, grid: tuple[int, int, int], arguments: Mapping[str, Any], shared: int, threads: int
    ) -> None:
        """Executes the right text. Raises Unsupported if it takes addresses from a table."""
        self._ptx, self._grid, self._shared, self._threads = ptx, grid, shared, threads
        self._before = copies(arguments)
        self._alone = True
        memory = GlobalMemory(noted=True, alone=True)
        try:
            self._run(program(parse(ptx)), memory, copies(arguments))
        except Hazard:  # blocks of padding have one slot
            self._alone = False
            memory = GlobalMemory(noted=True)
            self._run(program(parse(ptx)), memory, copies(arguments))
        if memory.has_tables:
            raise Unsupported("a launch with a table of addresses")
        self._written = []
        for tensor, allocation in zip(_storages(self._before), memory.allocations, strict=True):
            assert allocation.read is not None and allocation.written is not None
            _bytes(tensor)[torch.from_numpy(~allocation.read)] = 0xFF
            self._written.append(torch.from_numpy(allocation.written))
        self._after = copies(self._before)
        self._run(program(parse(ptx)), GlobalMemory(alone=self._alone), self._after)

    def outcome(self, fault: Mutation) -> str:
        """Returns how a fault shows: a kind of hazard, "result", NO_EFFECT or DEAD; "" if it does not."""
        shown, effect = self._faulty(fault, spoiling=False)
        if shown:
            return shown
        if effect is None:
            effect = self._barrier(fault.line)
        if not effect.seen:
            return NO_EFFECT
        if not effect.can_spoil:
            return ""
        return "" if self._faulty(fault, spoiling=True)[0] else DEAD

    def _faulty(self, fault: Mutation, spoiling: bool) -> tuple[str, Effect | None]:
        """Executes the faulty text; returns how that shows, and what its line did (None: it has no step)."""
        given = copies(self._before)
        try:
            code = program(parse(fault.applied(self._ptx)))
            effect = watch(code, fault.line, self._instruction(fault.line), spoiling)
            self._run(code, GlobalMemory(alone=self._alone), given)
        except Hazard as hazard:
            return hazard.kind, None
        except (Unsupported, RuntimeError, IndexError, AssertionError) as error:
            return type(error).__name__, None
        every = zip(_storages(given), _storages(self._after), self._written, strict=True)
        return "result" if any(differs(*one) for one in every) else "", effect

    def _barrier(self, line: int) -> Effect:
        code = program(parse(self._ptx))
        effect = watch_barrier(code, line)
        self._run(code, GlobalMemory(), copies(self._before))
        return effect

    def _instruction(self, line: int) -> Instruction:
        return next(each for each in parse(self._ptx).instructions if each.line == line)

    def _run(self, code: Program, memory: GlobalMemory, arguments: Mapping[str, Any]) -> Executed:
        return run(code, memory, self._grid, arguments, self._shared, self._threads)


def copies(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns tensors with storages of their own, as large; those that shared one still do."""
    storages: dict[int, Any] = {}
    out: dict[str, Any] = {}
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            out[name] = value
            continue
        key = value.untyped_storage().data_ptr()
        if key not in storages:
            storages[key] = _bytes(value).clone().untyped_storage()
        empty = torch.empty(0, dtype=value.dtype)
        out[name] = empty.set_(storages[key], value.storage_offset(), value.shape, value.stride())
    return out


def differs(ours: torch.Tensor, want: torch.Tensor, written: torch.Tensor) -> bool:
    """Returns whether a test would see another result in what the right text writes, or any change elsewhere."""
    a, b = _bytes(ours), _bytes(want)
    if torch.equal(a, b):
        return False
    kind = ours.dtype
    if kind not in _ROUNDED or len(a) % kind.itemsize or not torch.equal(a[~written], b[~written]):
        return True
    which = written.view(-1, kind.itemsize).any(dim=1)
    x, y = (data.view(kind)[which].double().nan_to_num(1e30, 1e32, -1e32) for data in (a, b))
    away = (x - y).abs()
    allowed = y.abs() * _ROUNDED[kind] + TOLERANCE * float(y.square().mean().sqrt())
    return bool(away.norm() > TOLERANCE * y.norm()) or bool((away > allowed).any())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def _storages(arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """Returns a tensor of each storage that has bytes, in the order of the arguments."""
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    first = {tensor.untyped_storage().data_ptr(): tensor for tensor in reversed(tensors)}
    inside = [tensor for tensor in tensors if first[tensor.untyped_storage().data_ptr()] is tensor]
    return [tensor for tensor in inside if tensor.untyped_storage().nbytes()]
