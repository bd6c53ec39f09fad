"""Kernels of experts in main memory: slots for a step, copies of experts, and the rows where a step finds them.

Copies read main memory directly, which is page-locked and has an address on the device. Reference:
`layers/moe/slot_ops`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang.srt.layers.moe.slot_ops import SlotKernels
from sglang.srt.layers.triton_ops import pdl
from sglang.srt.mem_cache.main_memory import device_address

if TYPE_CHECKING:
    from sglang.srt.layers.moe.slot_ops import ExpertCopies, Moves, SlotTables

EXPERTS = 1024
"""Most experts of a layer, and most slots; a test holds it to the reference's."""
CHUNK = 1024
WORDS = 2048
"""Words of 4 bytes that a program copies at once."""
NARROW = 2048
"""Bytes that a program copies at once of what is not a multiple of 16 bytes."""
PROGRAMS = 128
"""Programs of a copy. They keep a megabyte in flight, eight times what a bus of 64 GB/s holds."""
ALIGNED = 16
"""Bytes that a thread loads at once."""


@triton.jit
def _used_experts(ids, num_pairs, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    counts = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        some = tl.load(ids + at, mask=at < num_pairs, other=-1)
        counts += tl.histogram(tl.maximum(some, 0), EXPERTS, mask=some >= 0)
    return counts > 0


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_slots"])
def choose_slots_kernel(
    ids,  # [num_pairs] int32
    slot_of_expert,
    expert_of_slot,
    last_used,
    clock,
    totals,  # [2] int64
    victims,  # [num_slots] int32 scratch
    moves,
    num_moves,
    num_pairs,
    num_experts,
    num_slots,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Everything in one program."""
    now = tl.load(clock) + 1
    expert = tl.arange(0, EXPERTS)
    used = _used_experts(ids, num_pairs, EXPERTS, CHUNK) & (expert < num_experts)
    slot = tl.load(slot_of_expert + expert, mask=expert < num_experts, other=-1)
    missing = used & (slot < 0)
    tl.store(last_used + tl.maximum(slot, 0), now + tl.zeros((EXPERTS,), tl.int64), mask=used & (slot >= 0))
    tl.debug_barrier()
    # The rank of a slot by age: as many slots are older, or as old and before it.
    place = tl.arange(0, EXPERTS)
    age = tl.load(last_used + place, mask=place < num_slots, other=0) * EXPERTS + place
    rank = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_slots, 16):
        other = start + tl.arange(0, 16)
        others = tl.load(last_used + other, mask=other < num_slots, other=0) * EXPERTS + other
        older = (others[:, None] < age[None, :]) & (other < num_slots)[:, None]
        rank += tl.sum(older.to(tl.int32), axis=0)
    count = tl.sum(missing.to(tl.int32))
    tl.store(victims + rank, place, mask=(place < num_slots) & (rank < count))
    tl.debug_barrier()
    move = tl.cumsum(missing.to(tl.int32), 0) - 1
    taken = tl.load(victims + tl.maximum(move, 0), mask=missing, other=0)
    leaving = tl.load(expert_of_slot + taken, mask=missing, other=-1)
    tl.debug_barrier()
    tl.store(slot_of_expert + tl.maximum(leaving, 0), tl.full((EXPERTS,), -1, tl.int32), mask=missing & (leaving >= 0))
    tl.store(slot_of_expert + expert, taken, mask=missing)
    tl.store(expert_of_slot + taken, expert, mask=missing)
    tl.store(last_used + taken, now + tl.zeros((EXPERTS,), tl.int64), mask=missing)
    tl.store(moves + 2 * tl.maximum(move, 0), expert, mask=missing)
    tl.store(moves + 2 * tl.maximum(move, 0) + 1, taken, mask=missing)
    tl.store(num_moves, count)
    tl.store(clock, now)
    tl.store(totals, tl.load(totals) + tl.sum(used.to(tl.int32)))
    tl.store(totals + 1, tl.load(totals + 1) + count)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "every"])
def stage_experts_kernel(
    ids,
    slot_of_expert,
    moves,
    num_moves,
    num_pairs,
    num_experts,
    every,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program. every: 1 for all experts, whatever the ids."""
    expert = tl.arange(0, EXPERTS)
    used = (_used_experts(ids, num_pairs, EXPERTS, CHUNK) | (every != 0)) & (expert < num_experts)
    slot = tl.load(slot_of_expert + expert, mask=expert < num_experts, other=-1)
    move = tl.cumsum(used.to(tl.int32), 0) - 1
    tl.store(moves + 2 * tl.maximum(move, 0), tl.where(slot < 0, expert, -1 - slot), mask=used)
    tl.store(moves + 2 * tl.maximum(move, 0) + 1, expert, mask=used)
    tl.store(num_moves, tl.sum(used.to(tl.int32)))


@triton.jit(do_not_specialize=["num_wide", "num_strips"], do_not_specialize_on_alignment=["moves", "strips"])
def copy_experts_kernel(
    moves,  # [M, 2] int32
    num_moves,
    strips,
    num_wide,
    num_strips,
    WORDS: tl.constexpr,
    NARROW: tl.constexpr,
):
    """strips [S, 5] int64: the address of the strip in expert 0 of main memory, of the slots and of the target, bytes
    from one expert to the next, and its bytes; the first `num_wide` of them are aligned. Grid: any number of
    programs."""
    for tile in range(tl.program_id(0), tl.load(num_moves) * num_strips, tl.num_programs(0)):
        strip, move = strips + tile % num_strips * 5, moves + tile // num_strips * 2
        source, row = tl.load(move), tl.load(move + 1)
        stride, size = tl.load(strip + 3), tl.load(strip + 4)
        in_slot = source < 0
        origin = tl.load(strip + in_slot.to(tl.int32))
        begin = origin + tl.where(in_slot, -1 - source, source).to(tl.int64) * stride
        end = tl.load(strip + 2) + row.to(tl.int64) * stride
        if tile % num_strips < num_wide:
            words = tl.multiple_of(size // 4, 4)
            at = tl.arange(0, WORDS)
            wide = tl.multiple_of(begin.to(tl.pointer_type(tl.int32)), 16) + at
            tl.store(
                tl.multiple_of(end.to(tl.pointer_type(tl.int32)), 16) + at,
                tl.load(wide, mask=at < words),
                mask=at < words,
            )
        else:
            byte = tl.arange(0, NARROW)
            some = tl.load(begin.to(tl.pointer_type(tl.uint8)) + byte, mask=byte < size)
            tl.store(end.to(tl.pointer_type(tl.uint8)) + byte, some, mask=byte < size)


@triton.jit(do_not_specialize=["num_pairs"])
def look_up_kernel(ids, table, out, num_pairs, CHUNK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    some = tl.load(ids + at, mask=at < num_pairs, other=-1)
    row = tl.load(table + tl.maximum(some, 0), mask=some >= 0, other=-1)
    tl.store(out + at, row, mask=at < num_pairs)


def prepare_copies(copies: ExpertCopies) -> ExpertCopies:
    """Returns copies with the strips of whole experts: wide ones of tensors whose experts are aligned, then narrow ones
    of the others."""
    wide: list[list[int]] = []
    narrow: list[list[int]] = []
    for tensors in zip(copies.bank, copies.slots, copies.target, strict=True):
        stride = tensors[0][0].numel() * tensors[0].element_size()
        addresses = [device_address(tensor) for tensor in tensors]
        aligned = not any(number % ALIGNED for number in (stride, *addresses))
        step, strips = (4 * WORDS, wide) if aligned else (NARROW, narrow)
        for at in range(0, stride, step):
            strips.append([*(address + at for address in addresses), stride, min(step, stride - at)])
    table = torch.tensor(wide + narrow, dtype=torch.int64, device=copies.target[0].device)
    return dataclasses.replace(copies, strips=table, num_wide=len(wide))


def choose_slots(ids: torch.Tensor, tables: SlotTables, moves: Moves) -> None:
    """Does as the reference. `ids` contiguous, at most as many as there are slots."""
    choose_slots_kernel[(1,)](
        ids, tables.slot_of_expert, tables.expert_of_slot, tables.last_used, tables.clock, tables.totals,
        tables.scratch, moves.rows, moves.count, ids.numel(), len(tables.slot_of_expert), len(tables.expert_of_slot),
        EXPERTS=EXPERTS, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip


def stage_experts(ids: torch.Tensor, tables: SlotTables, moves: Moves, every: bool) -> None:
    """Does as the reference. `ids` contiguous."""
    stage_experts_kernel[(1,)](
        ids, tables.slot_of_expert, moves.rows, moves.count, 0 if every else ids.numel(),
        len(tables.slot_of_expert), int(every), EXPERTS=EXPERTS, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip


def copy_experts(copies: ExpertCopies, moves: Moves) -> None:
    """Does as the reference, by the strips of `strips_of`."""
    assert copies.strips is not None
    copy_experts_kernel[(PROGRAMS,)](
        moves.rows, moves.count, copies.strips, copies.num_wide, len(copies.strips),
        WORDS=WORDS, NARROW=NARROW, num_warps=4,
    )  # fmt: skip


def look_up(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Does as the reference. `ids` contiguous."""
    out = torch.empty_like(ids)
    if ids.numel():
        look_up_kernel[(triton.cdiv(ids.numel(), CHUNK),)](ids, table, out, ids.numel(), CHUNK=CHUNK, **pdl.options())
    return out


EXPERT_SLOTS = SlotKernels(prepare_copies, choose_slots, stage_experts, copy_experts, look_up)
