"""Steps that read and write memory: ld, st, atom, red (9.7.9.8 to 9.7.9.13, 9.7.13.5), cp.async (9.7.9.25)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sglang.ledger.ptx.machine import Machine, unwritten
from sglang.ledger.ptx.memory import BlockMemory
from sglang.ledger.ptx.numbers import bf16_values
from sglang.ledger.ptx.operands import PARAMETER_STEP, Slots
from sglang.ledger.ptx.parser import Instruction, Number, Operand
from sglang.ledger.ptx.problems import Hazard, Unsupported
from sglang.ledger.ptx.steps_alu import Step
from sglang.ledger.ptx.types import SIGNED, UNSIGNED, Array, Opcode, Type

_HINTS = ("L1::", "L2::", "cs", "cg", "ca", "cv", "wb", "wt", "lu", "nc", "level::")
_ORDERS = ("weak", "relaxed", "acquire", "release", "acq_rel", "volatile")
_SCOPES = ("cta", "cluster", "gpu", "sys")
ROUNDING = 2.0**-7
"""By how much of their size two roundings of a sum may differ: the last place of bfloat16."""
_COUNTS = {"v2": 2, "v4": 4, "v8": 8}


def memory_step(instruction: Instruction, slots: Slots) -> Step:
    """Returns the step of ld, st, atom, red and cp.async. Raises Unsupported."""
    op = Opcode(instruction.opcode)
    if op.name == "cp":
        return _copying(op, instruction, slots)
    cached = any(m.startswith("L2::cache_hint") for m in op.modifiers)
    op.drop(*(h for h in _HINTS if "::" in h))
    op.take(*_ORDERS)
    op.take(*_SCOPES)
    named = op.take("global", "shared", "shared::cta", "param", "local", "const").removesuffix("::cta")
    space = named or "global"  # a generic address, of which only those of global memory are known here
    op.take(*(h for h in _HINTS if "::" not in h))
    operands = list(instruction.operands)
    if cached:
        operands.pop()  # the policy
    guard = None if instruction.guard is None else slots.source(instruction.guard, 1)
    if op.name == "ld" and space == "param":
        return _parameter(op, operands, slots)
    if op.name in ("atom", "red"):
        return _atomic(op, space, operands, slots, guard, instruction.negated)
    count = _COUNTS.get(op.take(*_COUNTS), 1)
    kind = op.type()
    op.end()
    if op.name == "ld":
        return _load(space, kind, count, operands, slots, guard, instruction.negated)
    if op.name == "st":
        return _store(space, kind, count, operands, slots, guard, instruction.negated)
    raise Unsupported(instruction.opcode)


def _parameter(op: Opcode, operands: list[Operand], slots: Slots) -> Step:
    """ld.param: a parameter, or a part of a struct, whose address may be in a register and differ between lanes."""
    count = _COUNTS.get(op.take(*_COUNTS), 1)
    kind = op.type()
    op.end()
    target, address = operands
    targets = [slots.register(item) for item in slots.items(target)]
    if len(targets) != count:
        raise Unsupported(f"ld.param of {len(targets)} registers")
    base, offset = slots.address(address)
    size, widen = kind.bits // 8, [_widening(kind, slots.types[slot]) for slot in targets]

    def part(m: Machine, address: int) -> Array:
        slot, first = divmod(address, PARAMETER_STEP)
        value = m.registers[slot]
        assert value is not None
        if slots.types[slot].kind == "struct":
            return value[first : first + size].view(UNSIGNED[kind.bits])
        if first or count > 1:
            raise Unsupported("a part of a parameter")
        return value

    def run(m: Machine) -> None:
        addresses = m.registers[base]
        assert addresses is not None
        if m.mask is not None and addresses.size > 1:
            addresses = np.where(m.mask, addresses, addresses[m.mask][0])
        for i, (slot, wide) in enumerate(zip(targets, widen, strict=True)):
            out: Array | None = None
            for each in np.unique(addresses):
                value = part(m, int(each) + offset + i * size)
                out = value if out is None else np.where(addresses == each, value, out)
            assert out is not None
            m.write(slot, wide(out))

    return run


def _widening(kind: Type, register: Type) -> Callable[[Array], Array]:
    """Returns what gives a loaded value the size of its register (9.4.1)."""
    if register.bits == kind.bits or register.kind == "p":
        return lambda x: x
    if kind.kind == "s":
        return lambda x: x.view(SIGNED[kind.bits]).astype(SIGNED[register.bits]).view(UNSIGNED[register.bits])
    return lambda x: x.astype(UNSIGNED[register.bits])


def _addresses(m: Machine, base: int, offset: int, guard: int | None, negated: bool) -> tuple[Array | None, Array]:
    """Returns the lanes that execute (None: all), and their addresses."""
    value = m.registers[base]
    assert value is not None
    address = value + value.dtype.type(offset & (1 << 8 * value.itemsize) - 1) if offset else value
    active = m.active(guard, negated)
    if active is None:
        return None, m.full(address)
    lanes = np.flatnonzero(active)
    return lanes, m.full(address)[lanes]


def _load(
    space: str, kind: Type, count: int, operands: list[Operand], slots: Slots, guard: int | None, negated: bool
) -> Step:
    targets = [slots.register(item) for item in slots.items(operands[0])]
    base, offset = slots.address(operands[1])
    size, hint = kind.bits // 8, [0]
    widen = [_widening(kind, slots.types[slot]) for slot in targets]
    if len(targets) != count or space == "const":
        raise Unsupported(f"ld.{space} of {len(targets)} registers")

    def read(m: Machine, lanes: Array | None, addresses: Array) -> list[Array]:
        if space == "global":
            m.count_global(addresses, lanes, size * count)
            return m.memory.load(addresses.astype(np.uint64, copy=False), size, count, hint)
        if space == "shared":
            return shared_read(m, lanes, addresses, size, count)
        return _local_read(m, lanes, addresses, size, count)

    def run(m: Machine) -> None:
        value = m.registers[base]
        if space == "global" and guard is None and value is not None and value.size == 1:
            lanes, addresses = None, value + value.dtype.type(offset & (1 << 64) - 1) if offset else value
            for slot, x, wide in zip(targets, read(m, None, addresses), widen, strict=True):
                m.write(slot, wide(x))
            return
        lanes, addresses = _addresses(m, base, offset, guard, negated)
        if lanes is not None and lanes.size == 0:
            return
        values = read(m, lanes, addresses)
        for slot, x, wide in zip(targets, values, widen, strict=True):
            if lanes is None:
                m.registers[slot] = wide(x)
            else:
                old = m.registers[slot]
                new = wide(x)
                out = unwritten(m.lanes, new.dtype) if old is None else np.array(m.full(old))
                out[lanes] = new
                m.registers[slot] = out

    return run


def _store(
    space: str, kind: Type, count: int, operands: list[Operand], slots: Slots, guard: int | None, negated: bool
) -> Step:
    sources = [slots.source(item, kind.bits) for item in slots.items(operands[1])]
    base, offset = slots.address(operands[0])
    size, hint, narrow = kind.bits // 8, [0], UNSIGNED[kind.bits]
    if len(sources) != count:
        raise Unsupported(f"st.{space} of {len(sources)} registers")

    def run(m: Machine) -> None:
        values = [m.full(m.registers[slot]).astype(narrow, copy=False) for slot in sources]  # type: ignore[arg-type]
        lanes, addresses = _addresses(m, base, offset, guard, negated)
        if lanes is not None:
            if lanes.size == 0:
                return
            values = [value[lanes] for value in values]
        if space == "global":
            m.count_global(addresses, lanes, size * count)
            blocks = m.block_of_lane if lanes is None else m.block_of_lane[lanes]
            m.memory.store(addresses.astype(np.uint64, copy=False), values, size, hint, m.first_block + blocks)
        elif space == "shared":
            shared_write(m, lanes, addresses, values, size)
        elif space == "local":
            _local_write(m, lanes, addresses, values, size)
        else:
            raise Unsupported(f"st.{space}")

    return run


def shared_read(
    m: Machine, lanes: Array | None, addresses: Array, size: int, count: int, by_warp: bool = False
) -> list[Array]:
    """Returns neighbouring elements of shared memory for each lane, or for its warp."""
    offsets = m.shared.offsets(addresses, lanes, size * count)
    who = m.all_lanes if lanes is None else lanes
    m.watch.read(offsets, size * count, who, by_warp)
    if m.counts is not None:
        m.counts.shared_access(offsets, who, size * count)
    view, first = m.shared.views[size], offsets // size
    return [view[first + i] for i in range(count)]


def shared_write(
    m: Machine, lanes: Array | None, addresses: Array, values: list[Array], size: int, by_warp: bool = False
) -> None:
    """Writes neighbouring elements to shared memory for each lane. Of lanes that write another value to one place the
    outcome is undefined."""
    offsets = m.shared.offsets(addresses, lanes, size * len(values))
    who = m.all_lanes if lanes is None else lanes
    if m.counts is not None:
        m.counts.shared_access(offsets, who, size * len(values))
    view = m.shared.views[size]
    for i, value in enumerate(values):
        at = offsets // size + i
        m.watch.write(offsets + i * size, size, who, view[at] != value, by_warp=by_warp)
        view[at] = value
        lost = view[at] != value
        if lost.any():
            if not _differ_by_rounding(view[at][lost], value[lost]):
                byte = int(at[lost][0]) * size
                raise Hazard("race", f"two threads write byte {byte} of shared memory in one instruction")
            m.choices += 1


def _differ_by_rounding(a: Array, b: Array) -> bool:
    """Returns whether what two threads write are results of one sum in two roundings. Compilers fuse the product of a
    thread's addend into its sum with another thread's, so that the two get sums that differ in the last places. Which
    one stays is undefined; either is right, and so is any of two that are not a number."""
    if a.dtype.itemsize < 4:
        x, y = (bf16_values(v.astype(np.uint16)) for v in (a, b))
    else:
        x, y = (np.ascontiguousarray(v).view(np.float32) for v in (a, b))
    near = np.abs(x - y) <= np.maximum(np.abs(x), np.abs(y)) * ROUNDING
    return bool((near | (np.isnan(x) & np.isnan(y))).all())


def _local_places(memory: BlockMemory, lanes: Array | None, addresses: Array, size: int, count: int) -> Array:
    return memory.offsets(addresses, lanes, size * count)


def _local_read(m: Machine, lanes: Array | None, addresses: Array, size: int, count: int) -> list[Array]:
    offsets = _local_places(m.local, lanes, addresses, size, count)
    if not all(m.local_written[offsets + i].all() for i in range(size * count)):
        raise Hazard("uninitialized", "local memory")
    return [m.local.views[size][offsets // size + i] for i in range(count)]


def _local_write(m: Machine, lanes: Array | None, addresses: Array, values: list[Array], size: int) -> None:
    offsets = _local_places(m.local, lanes, addresses, size, len(values))
    for i in range(size * len(values)):
        m.local_written[offsets + i] = True
    for i, value in enumerate(values):
        m.local.views[size][offsets // size + i] = value


def _combine(name: str, kind: Type) -> Callable[[Array, Array], Array]:
    """Returns what an atomic operation writes, of what was there and its operand."""
    plain: dict[str, Callable[[Array, Array], Array]] = {
        "add": np.add, "min": np.minimum, "max": np.maximum,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "exch": lambda a, b: b,
    }  # fmt: skip
    if name not in plain or kind.kind in ("bf", "x"):
        raise Unsupported(f"atom.{name}.{kind.name}")
    function, seen = plain[name], kind.numpy
    return lambda a, b: function(a.view(seen), b.view(seen)).view(kind.storage)


def _atomic(op: Opcode, space: str, operands: list[Operand], slots: Slots, guard: int | None, negated: bool) -> Step:
    """One lane after the other: any order is right, since the ISA gives none."""
    name = op.need("add", "min", "max", "and", "or", "xor", "exch", "cas")
    op.take("noftz")
    kind = op.type()
    op.end()
    target = slots.register(operands.pop(0)) if op.name == "atom" else None
    base, offset = slots.address(operands.pop(0))
    sources = [slots.source(operand, kind.bits) for operand in operands]
    combine = _combine(name, kind) if name != "cas" else None
    size = kind.bits // 8

    def run(m: Machine) -> None:
        lanes, addresses = _addresses(m, base, offset, guard, negated)
        who = m.all_lanes if lanes is None else lanes
        if who.size == 0:
            return
        values = [m.full(m.registers[slot])[who] for slot in sources]  # type: ignore[arg-type]
        old = np.zeros(who.size, UNSIGNED[kind.bits])
        if space == "shared":
            places = m.shared.offsets(addresses, lanes, size) // size
            view = m.shared.views[size]
            m.watch.atomic(places * size, size, who)
            if m.counts is not None:
                m.counts.shared_access(places * size, who, size)
        else:
            m.count_global(addresses, who, size)
        for i in range(who.size):
            if space == "global":
                view, at = m.memory.cell(int(addresses[i]), size)
            else:
                at = int(places[i])
            before = view[at : at + 1].copy()
            old[i] = before[0]
            if combine is None:
                if before[0] == values[0][i]:
                    view[at] = values[1][i]
            else:
                view[at] = combine(before, values[0][i : i + 1])[0]
        if target is not None:
            previous = m.registers[target]
            out = unwritten(m.lanes, old.dtype) if previous is None else np.array(m.full(previous))
            out[who] = old
            m.registers[target] = out

    if space not in ("global", "shared"):
        raise Unsupported(f"{op.text} in {space} memory")
    return run


def _copying(op: Opcode, instruction: Instruction, slots: Slots) -> Step:
    """cp.async: what is copied is read at once, and is in shared memory when its group has been waited for."""
    op.need("async")
    if op.take("commit_group"):
        op.end()
        return _commit
    if op.take("wait_group"):
        op.end()
        (number,) = instruction.operands
        assert isinstance(number, Number)
        most = number.value
        return lambda m: _wait(m, most)
    if op.take("wait_all"):
        op.end()
        return _wait_for_all
    cached = any(m.startswith("L2::cache_hint") for m in op.modifiers)
    op.drop("L2::")
    op.need("ca", "cg")
    op.need("shared", "shared::cta")
    op.need("global")
    op.end()
    operands = list(instruction.operands)[: -1 if cached else None]
    target, source, number, *given = operands
    assert isinstance(number, Number)
    size = number.value
    to, to_offset = slots.address(target)
    base, offset = slots.address(source)
    length = slots.source(given[0], 32) if given else slots.constant(size, 32)
    guard = None if instruction.guard is None else slots.source(instruction.guard, 1)
    negated, hint = instruction.negated, [0]
    unit = min(size, 8)

    def run(m: Machine) -> None:
        lanes, places = _addresses(m, to, to_offset, guard, negated)
        _, addresses = _addresses(m, base, offset, guard, negated)
        who = m.all_lanes if lanes is None else lanes
        if who.size == 0:
            return
        offsets = m.shared.offsets(places, lanes, size)
        wanted = m.registers[length]
        assert wanted is not None
        lengths = m.full(wanted)[who]
        values = np.zeros((who.size, size // unit), UNSIGNED[8 * unit])
        whole = lengths >= size
        if not (whole | (lengths == 0)).all():
            raise Unsupported("cp.async of a part of its bytes")
        if whole.any():
            read = m.memory.load(addresses[whole].astype(np.uint64, copy=False), unit, size // unit, hint)
            for i, part in enumerate(read):
                values[whole, i] = part
            m.count_global(addresses[whole], who[whole], size)
        if m.counts is not None:
            m.counts.shared_access(offsets, who, size)
        m.watch.write(offsets, size, who, None, coming=True)
        m.copies.pending.append((who, offsets, values, unit, m.copies.groups[who].copy()))

    return run


def _commit(m: Machine) -> None:
    if m.mask is None:
        m.copies.groups += 1
    else:
        m.copies.groups[m.mask] += 1


def _wait_for_all(m: Machine) -> None:
    _commit(m)
    _wait(m, 0)


def _wait(m: Machine, most: int) -> None:
    """Completes all but the last groups of each lane."""
    left = []
    for lanes, offsets, values, unit, groups in m.copies.pending:
        done = groups < m.copies.groups[lanes] - most
        if m.mask is not None:
            done &= m.mask[lanes]
        if not done.any():
            left.append((lanes, offsets, values, unit, groups))
            continue
        if done.all():
            arrived, at, what = lanes, offsets, values
        else:
            arrived, at, what = lanes[done], offsets[done], values[done]
            rest = ~done
            left.append((lanes[rest], offsets[rest], values[rest], unit, groups[rest]))
        view = m.shared.views[unit]
        for i in range(what.shape[1]):
            view[at // unit + i] = what[:, i]
        m.watch.arrived(at, unit * what.shape[1], arrived)
    m.copies.pending = left
