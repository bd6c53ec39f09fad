"""Steps in which the threads of a warp work together: shfl, vote, match, redux, ldmatrix, stmatrix, mma.

All threads of a warp execute such an instruction together, or none does.
"""

from __future__ import annotations

import numpy as np

from sglang.ledger.ptx.machine import Machine, unwritten
from sglang.ledger.ptx.mma import multiply, product, scale_factors
from sglang.ledger.ptx.operands import Slots
from sglang.ledger.ptx.parser import Instruction, Number, Vector
from sglang.ledger.ptx.problems import Hazard, Unsupported
from sglang.ledger.ptx.steps_alu import Step
from sglang.ledger.ptx.steps_memory import shared_read, shared_write
from sglang.ledger.ptx.types import Array, Opcode


def warp_step(instruction: Instruction, slots: Slots) -> Step:
    """Returns the step of an instruction of a warp. Raises Unsupported."""
    op = Opcode(instruction.opcode)
    if instruction.guard is not None:
        raise Unsupported(f"{instruction.opcode} with a guard")
    return _STEPS[op.name](op, instruction, slots)


def whole_warps(m: Machine) -> Array | None:
    """Returns the lanes of the warps that execute; None: all. Raises Hazard if a part of a warp does."""
    if m.mask is None:
        return None
    warps = m.mask.reshape(-1, 32)
    some, all_of = warps.any(axis=1), warps.all(axis=1)
    if (some & ~all_of).any():
        raise Hazard("divergence", "only some threads of a warp execute an instruction of all of them")
    return np.flatnonzero(m.mask)


def _assign(m: Machine, slot: int, value: Array) -> None:
    m.write(slot, value)


def _shuffle(op: Opcode, instruction: Instruction, slots: Slots) -> Step:
    """shfl.sync (9.7.9.6): a value of another lane of the segment, and whether there is one."""
    op.need("sync")
    mode = op.need("up", "down", "bfly", "idx")
    op.need("b32")
    op.end()
    target, *rest = instruction.operands
    slot, predicate = slots.result_and_predicate(target)
    value, by, bound, members = (slots.source(operand, 32) for operand in rest)
    lane = np.arange(32)

    def run(m: Machine) -> None:
        registers = m.registers
        a = m.full(registers[value])  # type: ignore[arg-type]
        b, c = (m.full(registers[i]).astype(np.int64) for i in (by, bound))  # type: ignore[arg-type]
        _check_members(m, m.full(registers[members]))  # type: ignore[arg-type]
        place = np.tile(lane, m.lanes // 32)
        distance, clamp, segment = b & 31, c & 31, (c >> 8) & 31
        highest = (place & segment) | (clamp & ~segment)
        lowest = place & segment
        if mode == "up":
            other, exists = place - distance, place - distance >= highest
        elif mode == "down":
            other, exists = place + distance, place + distance <= highest
        elif mode == "bfly":
            other, exists = place ^ distance, (place ^ distance) <= highest
        else:
            other = lowest | (distance & ~segment)
            exists = other <= highest
        source = np.where(exists, other, place) + (m.all_lanes - place)
        if m.mask is not None and not m.mask[source[m.mask]].all():
            raise Hazard("divergence", "shfl reads a lane that does not execute it")
        _assign(m, slot, a[source])
        if predicate is not None:
            _assign(m, predicate, exists)

    return run


def _check_members(m: Machine, members: Array) -> None:
    """Raises Hazard if lanes that the mask of members names do not execute the instruction."""
    if m.mask is None:
        return
    executing = m.mask.reshape(-1, 32)
    bits = (executing.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=1).astype(np.uint32)
    missing = np.repeat(~bits, 32) & members
    if (missing[m.mask] != 0).any():
        raise Hazard("divergence", "a lane that is named does not execute an instruction of the warp")


def _ballot(m: Machine, predicate: Array) -> Array:
    """Returns for each lane the bits of its warp's lanes for which the predicate holds."""
    chosen = m.full(predicate) if m.mask is None else m.full(predicate) & m.mask
    bits = (chosen.reshape(-1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=1)
    return np.repeat(bits.astype(np.uint32), 32)


def _vote(op: Opcode, instruction: Instruction, slots: Slots) -> Step:
    """vote.sync (9.7.13.10) of all lanes that the mask names."""
    op.need("sync")
    mode = op.need("ballot", "any", "all", "uni")
    op.need("b32", "pred")
    op.end()
    target, source, mask = instruction.operands
    slot, predicate, members = slots.register(target), slots.source(source, 1), slots.source(mask, 32)

    def run(m: Machine) -> None:
        named = m.full(m.registers[members])  # type: ignore[arg-type]
        _check_members(m, named)
        bits = _ballot(m, m.registers[predicate]) & named  # type: ignore[arg-type]
        if mode == "ballot":
            _assign(m, slot, bits)
        elif mode == "any":
            _assign(m, slot, bits != 0)
        elif mode == "all":
            _assign(m, slot, bits == named)
        else:
            _assign(m, slot, (bits == named) | (bits == 0))

    return run


def _active_mask(op: Opcode, instruction: Instruction, slots: Slots) -> Step:
    """activemask (9.7.13.12)."""
    op.need("b32")
    op.end()
    slot = slots.register(instruction.operands[0])
    return lambda m: _assign(m, slot, _ballot(m, np.ones(m.lanes, dtype=bool)))


def _reduce(op: Opcode, instruction: Instruction, slots: Slots) -> Step:
    """redux.sync (9.7.13.13) over all lanes of the warp."""
    op.need("sync")
    name = op.need("add", "min", "max", "and", "or", "xor")
    kind = op.type()
    op.end()
    function = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
                "xor": np.bitwise_xor}[name]  # fmt: skip
    if kind.bits != 32 or kind.kind == "f":
        raise Unsupported(op.text)
    target, source, mask = instruction.operands
    slot, value, members = slots.register(target), slots.source(source, 32), slots.source(mask, 32)

    def run(m: Machine) -> None:
        if (m.full(m.registers[members]) != np.uint32(0xFFFFFFFF)).any():  # type: ignore[arg-type]
            raise Unsupported("redux of a part of a warp")
        whole_warps(m)
        x = np.ascontiguousarray(m.full(m.registers[value])).view(kind.numpy)  # type: ignore[arg-type]
        with np.errstate(over="ignore"):
            total = function.reduce(x.reshape(-1, 32), axis=1).astype(kind.numpy)
        _assign(m, slot, np.repeat(total, 32).view(np.uint32))

    return run


def _matrices(op: Opcode) -> tuple[int, bool]:
    op.need("sync"), op.need("aligned")
    number = int(op.need("x1", "x2", "x4")[1])
    transposed = op.take("trans") != ""
    op.need("shared", "shared::cta")
    return number, transposed


def _row_addresses(m: Machine, slots_address: tuple[int, int], lanes: Array | None, rows: int) -> Array:
    """Returns the addresses of rows: [warps, 32], of which the first `rows` are used."""
    base, offset = slots_address
    value = m.registers[base]
    assert value is not None
    address = m.full(value + value.dtype.type(offset & (1 << 8 * value.itemsize) - 1) if offset else value)
    return (address if lanes is None else address[lanes]).reshape(-1, 32)[:, :rows]


def _load_matrices(op: Opcode, instruction: Instruction, slots: Slots) -> Step:
    """ldmatrix (9.7.14.5.15): 8 x 8 elements of 16 bits, or 16 x 16 of 8 bits, whose rows lanes have the addresses of.
    A row of 8 elements goes to four lanes, two elements each. 8 x 16 elements of 4 bits become bytes: a row is 8 bytes,
    with 8 behind that are not used."""
    number, transposed = _matrices(op)
    shape = op.need("m8n8", "m8n16", "m16n16")
    if shape == "m8n16":
        op.need("b8x16"), op.need("b4x16_p64")
    else:
        op.need("b16" if shape == "m8n8" else "b8")
    op.end()
    if shape == "m8n16" and transposed:
        raise Unsupported(op.text)
    if shape == "m16n16" and not transposed:
        raise Unsupported(op.text)
    target, address = instruction.operands
    assert isinstance(target, Vector)
    results = [slots.register(item) for item in target.items]
    place = slots.address(address)
    rows = number * (16 if shape == "m16n16" else 8)

    def run(m: Machine) -> None:
        lanes = whole_warps(m)
        addresses = _row_addresses(m, place, lanes, rows)
        warps = len(addresses)
        who = (m.all_lanes if lanes is None else lanes).reshape(-1, 32)[:, :rows].reshape(-1)
        if shape == "m8n16":
            (packed,) = shared_read(m, who, addresses.reshape(-1), 8, 1, by_warp=True)
            nibbles = np.ascontiguousarray(packed).view(np.uint8)
            words = np.stack([nibbles & np.uint8(15), nibbles >> np.uint8(4)], axis=-1)
        else:
            words = np.stack(shared_read(m, who, addresses.reshape(-1), 8, 2, by_warp=True), axis=1)
        elements: Array
        if shape != "m16n16":
            elements = words.view(np.uint16).reshape(warps, number, 8, 8)
            if transposed:
                elements = elements.transpose(0, 1, 3, 2)
            registers = np.ascontiguousarray(elements).view(np.uint32).reshape(warps, number, 32).transpose(1, 0, 2)
        else:  # lane t has row t / 4 of the transposed matrix, and row t / 4 + 8
            elements = words.view(np.uint8).reshape(warps, number, 16, 16).transpose(0, 1, 3, 2)
            halves = np.ascontiguousarray(elements).view(np.uint32).reshape(warps, number, 2, 32)
            registers = halves.reshape(warps, number * 2, 32).transpose(1, 0, 2)
        for slot, value in zip(results, registers, strict=True):
            _scatter(m, slot, np.ascontiguousarray(value).reshape(-1), lanes)

    return run


def _scatter(m: Machine, slot: int, value: Array, lanes: Array | None) -> None:
    """Writes a register of the lanes that execute, of values of these lanes only."""
    if lanes is None:
        m.registers[slot] = value
        return
    old = m.registers[slot]
    out = unwritten(m.lanes, value.dtype) if old is None else np.array(m.full(old))
    out[lanes] = value
    m.registers[slot] = out


def _store_matrices(op: Opcode, instruction: Instruction, slots: Slots) -> Step:
    """stmatrix (9.7.14.5.16): what ldmatrix of 8 x 8 elements does, the other way."""
    number, transposed = _matrices(op)
    op.need("m8n8"), op.need("b16")
    op.end()
    address, source = instruction.operands
    assert isinstance(source, Vector)
    sources = [slots.source(item, 32) for item in source.items]
    place, rows = slots.address(address), number * 8

    def run(m: Machine) -> None:
        lanes = whole_warps(m)
        addresses = _row_addresses(m, place, lanes, rows)
        warps = len(addresses)
        words = np.empty((warps, number, 32), dtype=np.uint32)
        for i, slot in enumerate(sources):
            words[:, i] = _gathered(m, slot, lanes).reshape(-1, 32)
        elements = words.view(np.uint16).reshape(warps, number, 8, 8)
        if transposed:
            elements = np.ascontiguousarray(elements.transpose(0, 1, 3, 2))
        values = elements.view(np.uint64).reshape(warps * rows, 2)
        who = (m.all_lanes if lanes is None else lanes).reshape(-1, 32)[:, :rows].reshape(-1)
        shared_write(m, who, addresses.reshape(-1), [values[:, 0], values[:, 1]], 8, by_warp=True)

    return run


def _gathered(m: Machine, slot: int, lanes: Array | None) -> Array:
    """Returns a register's content in the lanes that execute."""
    value = m.registers[slot]
    assert value is not None
    return m.full(value) if lanes is None else m.full(value)[lanes]


def _mma(op: Opcode, instruction: Instruction, slots: Slots) -> Step:
    """mma.sync (9.7.14.5.14)."""
    form = product(op)
    d, a, b, c, *scales = instruction.operands
    results = [slots.register(item) for item in slots.items(d)]
    sources = [[slots.source(item, 32) for item in slots.items(operand)] for operand in (a, b, c)]
    factors: list[tuple[str, int, int, int]] = []
    if form.scales:
        for which, data, selector in (("a", scales[0], scales[1]), ("b", scales[2], scales[3])):
            assert isinstance(selector, Vector)
            byte, thread = (item.value if isinstance(item, Number) else -1 for item in selector.items)
            if byte < 0 or byte + form.scales > 4 or not 0 <= thread < (2 if which == "a" else 4):
                raise Unsupported(f"{instruction.opcode} with the selector {{{byte}, {thread}}}")
            (word,) = slots.items(data)
            factors.append((which, slots.source(word, 32), byte, thread))

    def run(m: Machine) -> None:
        lanes = whole_warps(m)
        left, right, sums = ([_gathered(m, slot, lanes) for slot in group] for group in sources)
        scaled = None
        if factors:
            left_scales, right_scales = (
                scale_factors(which, form, _gathered(m, slot, lanes), byte, thread)
                for which, slot, byte, thread in factors
            )
            scaled = left_scales, right_scales
        for slot, value in zip(results, multiply(form, left, right, sums, scaled), strict=True):
            _scatter(m, slot, value, lanes)

    return run


def _warp_barrier(op: Opcode, instruction: Instruction, slots: Slots) -> Step:
    """bar.warp.sync (9.7.13.2)."""
    op.need("warp"), op.need("sync")
    op.end()
    members = slots.source(instruction.operands[0], 32)

    def run(m: Machine) -> None:
        _check_members(m, m.full(m.registers[members]))  # type: ignore[arg-type]
        m.watch.warp_barrier(m.all_lanes if m.mask is None else np.flatnonzero(m.mask))

    return run


def _match(op: Opcode, instruction: Instruction, slots: Slots) -> Step:
    """match.any.sync (9.7.13.11): the lanes of the warp with the same value."""
    op.need("any"), op.need("sync")
    op.need("b32")
    op.end()
    target, source, mask = instruction.operands
    slot, value, members = slots.register(target), slots.source(source, 32), slots.source(mask, 32)

    def run(m: Machine) -> None:
        named = m.full(m.registers[members])  # type: ignore[arg-type]
        _check_members(m, named)
        x = m.full(m.registers[value]).reshape(-1, 32)  # type: ignore[arg-type]
        same = (x[:, :, None] == x[:, None, :]).astype(np.uint64) << np.arange(32, dtype=np.uint64)
        _assign(m, slot, same.sum(axis=2).astype(np.uint32).reshape(-1) & named)

    return run


_STEPS = {
    "shfl": _shuffle,
    "vote": _vote,
    "activemask": _active_mask,
    "redux": _reduce,
    "match": _match,
    "ldmatrix": _load_matrices,
    "stmatrix": _store_matrices,
    "mma": _mma,
    "bar": _warp_barrier,
}
WARP_NAMES = frozenset(_STEPS) - {"bar"}
