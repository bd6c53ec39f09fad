"""Memory of one launch: global allocations with names and exact bounds, and each block's shared and local memory.

All accesses are checked: inside of one allocation, aligned to their size. Addresses of global memory are the executor's
own, with nothing between two allocations, so that an access behind one array never lands in another.
"""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass, field

import numpy as np

from sglang.ledger.ptx.problems import Hazard
from sglang.ledger.ptx.types import UNSIGNED, Array

SHARED_BASE = 1 << 10
"""Where shared memory begins: its first KiB is the system's on these GPUs."""
_GAP = 1 << 36
"""Between the beginnings of two allocations."""


@dataclass(slots=True)
class Allocation:
    """Bytes of global memory, as the executor addresses them and where they lie here."""

    name: str
    base: int
    views: dict[int, Array]
    """By size of elements in bytes."""
    size: int
    host: int
    read: Array | None = None
    """Which bytes some thread read; None: nobody asked."""
    written: Array | None = None
    writers: dict[int, Array] = field(default_factory=dict)
    """By size of elements: the block that wrote each one last; -1: none."""


def views_of(data: Array) -> dict[int, Array]:
    """Returns bytes as unsigned integers of 1, 2, 4 and 8 bytes; what is left over at the end is in the smaller ones
    only."""
    return {size: data[: len(data) // size * size].view(UNSIGNED[8 * size]) for size in (1, 2, 4, 8)}


def host_bytes(address: int, size: int) -> Array:
    """Returns this process's memory as an array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _live_tensor(address: int) -> Allocation | None:
    """Returns the memory of the CPU tensor that an address is in."""
    import torch

    for tensor in gc.get_objects():
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
            continue
        storage = tensor.untyped_storage()
        base, size = storage.data_ptr(), storage.nbytes()
        if base <= address < base + size:
            name = f"a tensor of {tuple(tensor.shape)} from a table"
            return Allocation(name, base, views_of(host_bytes(base, size)), size, base)
    return None


class GlobalMemory:
    """The allocations that a launch may touch. `noted`: they note which of their bytes are. `alone`: blocks may not
    write different values to one place, as those of padding do where all of it has one slot."""

    def __init__(self, noted: bool = False, alone: bool = False) -> None:
        self.allocations: list[Allocation] = []
        self._noted = noted
        self.alone = alone
        self._by_host: dict[int, Allocation] = {}
        self._by_table: list[Allocation] = []
        """Those whose addresses a kernel reads from a table: they are as in this process."""
        self.bytes_read = self.bytes_written = 0

    @property
    def has_tables(self) -> bool:
        """Returns whether a kernel read addresses of tensors from a table."""
        return bool(self._by_table)

    def add(self, name: str, data: Array, host: int = 0) -> Allocation:
        """Adds bytes; `host`: their address in this process."""
        if host in self._by_host and host:
            return self._by_host[host]
        base = (len(self.allocations) + 1) * _GAP + host % 256
        allocation = Allocation(name, base, views_of(data), len(data), host)
        if self._noted:
            allocation.read, allocation.written = np.zeros((2, len(data)), dtype=bool)
        self.allocations.append(allocation)
        if host:
            self._by_host[host] = allocation
        return allocation

    def address_of(self, name: str, host: int) -> int:
        """Returns the executor's address of what is at an address of this process. Raises Hazard if no tensor is."""
        tensor = _live_tensor(host)
        if tensor is None:
            raise Hazard("out of bounds", f"{name} is at {host:#x}, where no tensor is")
        allocation = self.add(name, tensor.views[1], tensor.host)
        return allocation.base + host - tensor.host

    def load(self, addresses: Array, size: int, count: int, hint: list[int]) -> list[Array]:
        """Returns `count` neighbouring elements of `size` bytes at each address. `hint` keeps which allocation the
        instruction touched last."""
        self.bytes_read += addresses.size * size * count
        parts: list[Array] = []
        for allocation, chosen in self._allocations(addresses, size * count, hint):
            view = allocation.views[size]
            _note(allocation.read, allocation, addresses, chosen, size * count)
            if chosen is None:
                first = (addresses - np.uint64(allocation.base)) >> np.uint64(size.bit_length() - 1)
                return [view[first + np.uint64(i)] if i else view[first] for i in range(count)]
            parts = parts or [np.zeros(addresses.shape, view.dtype) for _ in range(count)]
            first = (addresses[chosen] - np.uint64(allocation.base)) >> np.uint64(size.bit_length() - 1)
            for i in range(count):
                parts[i][chosen] = view[first + np.uint64(i)]
        return parts

    def store(self, addresses: Array, values: list[Array], size: int, hint: list[int], blocks: Array) -> None:
        """Writes neighbouring elements at each address, each of one of the blocks. Raises Hazard if blocks are alone
        and two write different values to one place: any may be the last."""
        self.bytes_written += addresses.size * size * len(values)
        for allocation, chosen in self._allocations(addresses, size * len(values), hint):
            view = allocation.views[size]
            _note(allocation.written, allocation, addresses, chosen, size * len(values))
            at = addresses if chosen is None else addresses[chosen]
            first = (at - np.uint64(allocation.base)) >> np.uint64(size.bit_length() - 1)
            by = blocks if chosen is None else blocks[chosen]
            for i, value in enumerate(values):
                what = value if chosen is None else value[chosen]
                if self.alone:
                    _write_alone(allocation, size, (first + np.uint64(i)).astype(np.int64), what, by)
                else:
                    view[first + np.uint64(i)] = what

    def cell(self, address: int, size: int) -> tuple[Array, int]:
        """Returns the array and the index of one element, for atomics."""
        addresses = np.array([address], dtype=np.uint64)
        ((allocation, _),) = self._allocations(addresses, size, [0])
        _note(allocation.read, allocation, addresses, None, size)
        _note(allocation.written, allocation, addresses, None, size)
        return allocation.views[size], (address - allocation.base) // size

    def _allocations(self, addresses: Array, size: int, hint: list[int]) -> list[tuple[Allocation, Array | None]]:
        """Returns the allocations that addresses are in, each with which of them; None: all."""
        if addresses.size == 0:
            return []
        low, high = int(addresses.min()), int(addresses.max())
        if (low | high) & (size - 1) or (addresses & np.uint64(size - 1)).any():
            bad = int(addresses[(addresses & np.uint64(size - 1)) != 0][0])
            raise Hazard("misaligned", f"{size} bytes at {self.place(bad)}")
        if hint[0] < len(self.allocations):  # that of an earlier launch, which may have had more
            likely = self.allocations[hint[0]]
            if likely.base <= low and high + size <= likely.base + likely.size:
                return [(likely, None)]
        numbers = self._numbers(addresses)
        parts: list[tuple[Allocation, Array | None]] = []
        for number in np.unique(numbers):
            chosen = numbers == number
            if number < 0 or number >= len(self.allocations):
                parts += self._from_tables(addresses, chosen, size)
                continue
            allocation = self.allocations[number]
            offsets = addresses[chosen].astype(np.int64) - allocation.base
            outside = (offsets < 0) | (offsets + size > allocation.size)
            if outside.any():
                bad = int(offsets[outside][0]) + allocation.base
                raise Hazard("out of bounds", f"{size} bytes at {self.place(bad)}")
            hint[0] = int(number)
            parts.append((allocation, None if chosen.all() else chosen))
        return parts

    def _from_tables(self, addresses: Array, chosen: Array, size: int) -> list[tuple[Allocation, Array | None]]:
        """Returns the tensors of this process that some of the addresses are in. Raises Hazard for the others."""
        parts: list[tuple[Allocation, Array | None]] = []
        left = chosen.copy()
        while left.any():
            address = int(addresses[left][0])
            allocation = next((a for a in self._by_table if a.base <= address < a.base + a.size), None)
            if allocation is None:
                allocation = _live_tensor(address)
                if allocation is None:
                    raise Hazard("out of bounds", f"{size} bytes at {self.place(address)}")
                self._by_table.append(allocation)
            inside = left & (addresses >= np.uint64(allocation.base))
            inside &= addresses + np.uint64(size) <= np.uint64(allocation.base + allocation.size)
            if not inside.any():
                raise Hazard("out of bounds", f"{size} bytes behind {allocation.name}, which has {allocation.size}")
            parts.append((allocation, inside))
            left &= ~inside
        return parts

    def _numbers(self, addresses: Array) -> Array:
        """Returns the number of the allocation whose room each address is in: the gap before and behind it."""
        return ((addresses + np.uint64(_GAP // 2)) // np.uint64(_GAP)).astype(np.int64) - 1

    def place(self, address: int) -> str:
        """Describes an address."""
        number = int(self._numbers(np.array([address], dtype=np.uint64))[0])
        if 0 <= number < len(self.allocations):
            allocation = self.allocations[number]
            return f"byte {address - allocation.base} of {allocation.name}, which has {allocation.size}"
        return f"the address {address:#x}, which is in no array"


def _write_alone(allocation: Allocation, size: int, places: Array, values: Array, blocks: Array) -> None:
    """Writes elements. Raises Hazard if another block has written another value there."""
    view = allocation.views[size]
    if size not in allocation.writers:
        allocation.writers[size] = np.full(len(view), -1, dtype=np.int32)
    writers = allocation.writers[size]
    before = writers[places]
    clash = (before >= 0) & (before != blocks) & (view[places] != values)
    view[places], writers[places] = values, blocks
    clash |= (view[places] != values) & (writers[places] != blocks)
    if clash.any():
        i = int(np.flatnonzero(clash)[0])
        raise Hazard("race", f"two blocks write byte {int(places[i]) * size} of {allocation.name}")


def _note(touched: Array | None, allocation: Allocation, addresses: Array, chosen: Array | None, size: int) -> None:
    """Marks the bytes from each address on."""
    if touched is None:
        return
    at = (addresses if chosen is None else addresses[chosen]).astype(np.int64) - allocation.base
    for i in range(size):
        touched[at + i] = True


class BlockMemory:
    """Shared memory of several blocks, or local memory of several threads: one array, a part for each."""

    def __init__(self, name: str, base: int, size: int, owner_of_lane: Array) -> None:
        owners = int(owner_of_lane.max()) + 1
        self.name, self.base, self.size = name, base, size
        self.stride = -(-size // 16) * 16
        self.views = views_of(np.zeros(max(owners * self.stride, 16), dtype=np.uint8))
        self._first = owner_of_lane.astype(np.int64) * self.stride - base

    def offsets(self, addresses: Array, lanes: Array | None, size: int) -> Array:
        """Returns where the lanes' addresses lie in the array, in bytes."""
        at = addresses.astype(np.int64)
        low, high = int(at.min()), int(at.max())
        if low < self.base or high + size > self.base + self.size:
            bad = low if low < self.base else high
            raise Hazard(
                "out of bounds", f"{size} bytes at byte {bad - self.base} of {self.name}, which has {self.size}"
            )
        if (at & (size - 1)).any():
            bad = int(at[(at & (size - 1)) != 0][0])
            raise Hazard("misaligned", f"{size} bytes at byte {bad - self.base} of {self.name}")
        return at + (self._first if lanes is None else self._first[lanes])
