"""Kernels of experts in main memory: the rows where a step finds them, and copies of experts there.

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
from sglang.srt.mem_cache.main_memory import device_address

if TYPE_CHECKING:
    from sglang.srt.layers.moe.slot_ops import ExpertCopies, Moves, SlotTables, Wave

EXPERTS = 1024
"""Most experts of a layer, and most slots; a test holds it to the reference's."""
CHUNK = 1024
WORDS = 2048
"""Words of 4 bytes that a program copies at once."""
NARROW = 2048
"""Bytes that a program copies at once of what is not a multiple of 16 bytes."""
PROGRAMS = 128
"""Programs of a copy. They keep a megabyte in flight, eight times what a bus of 64 GB/s holds."""
PROGRAMS_BESIDE = 32
"""Programs of a copy beside other kernels. A product's program may take all registers of a processor, so that it cannot
run where one of these is. They keep twice in flight what the bus holds: on an H200, 16 have 49.5 GB/s, 128 have 51."""
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


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_slots", "first_slot", "first_spare"])
def choose_slots_kernel(
    ids,  # [num_pairs] int32
    slot_of_expert,
    expert_of_slot,
    last_used,
    clock,
    totals,  # [2] int64
    victims,  # [num_slots] int32 scratch
    row_of_expert,
    moves,
    num_moves,
    num_pairs,
    num_experts,
    num_slots,
    first_slot,
    first_spare,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Everything in one program."""
    now = tl.load(clock) + 1
    expert = tl.arange(0, EXPERTS)
    used = _used_experts(ids, num_pairs, EXPERTS, CHUNK) & (expert < num_experts)
    slot = tl.load(slot_of_expert + expert, mask=expert < num_experts, other=-1)
    missing, in_slot = used & (slot < 0), used & (slot >= 0)
    tl.store(last_used + tl.maximum(slot, 0), now + tl.zeros((EXPERTS,), tl.int64), mask=in_slot)
    tl.debug_barrier()
    # The rank of a slot by age: as many slots are older, or as old and before it. Those of this step come last.
    place = tl.arange(0, EXPERTS)
    age = tl.load(last_used + place, mask=place < num_slots, other=0) * EXPERTS + place
    rank = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_slots, 16):
        other = start + tl.arange(0, 16)
        others = tl.load(last_used + other, mask=other < num_slots, other=0) * EXPERTS + other
        older = (others[:, None] < age[None, :]) & (other < num_slots)[:, None]
        rank += tl.sum(older.to(tl.int32), axis=0)
    count = tl.sum(missing.to(tl.int32))
    free = num_slots - tl.sum(in_slot.to(tl.int32))
    tl.store(victims + rank, place, mask=(place < num_slots) & (rank < tl.minimum(count, free)))
    tl.debug_barrier()
    move = tl.maximum(tl.cumsum(missing.to(tl.int32), 0) - 1, 0)
    stays = missing & (move < free)
    taken = tl.load(victims + move, mask=stays, other=0)
    leaving = tl.load(expert_of_slot + taken, mask=stays, other=-1)
    tl.debug_barrier()
    tl.store(slot_of_expert + tl.maximum(leaving, 0), tl.full((EXPERTS,), -1, tl.int32), mask=stays & (leaving >= 0))
    tl.store(slot_of_expert + expert, taken, mask=stays)
    tl.store(expert_of_slot + taken, expert, mask=stays)
    tl.store(last_used + taken, now + tl.zeros((EXPERTS,), tl.int64), mask=stays)
    row = tl.where(in_slot, first_slot + slot, tl.where(stays, first_slot + taken, first_spare + move - free))
    tl.store(row_of_expert + expert, tl.where(used, row, -1), mask=expert < num_experts)
    tl.store(moves + 2 * move, expert, mask=missing)
    tl.store(moves + 2 * move + 1, row, mask=missing)
    tl.store(num_moves, count)
    tl.store(clock, now)
    tl.store(totals, tl.load(totals) + tl.sum(used.to(tl.int32)))
    tl.store(totals + 1, tl.load(totals + 1) + count)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "first_slot", "first_spare", "first", "count", "every"])
def stage_experts_kernel(
    ids,
    slot_of_expert,
    row_of_expert,
    moves,
    num_moves,
    num_pairs,
    num_experts,
    first_slot,
    first_spare,
    first,
    count,
    every,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program. every: 1 for all experts, whatever the ids."""
    expert = tl.arange(0, EXPERTS)
    used = (_used_experts(ids, num_pairs, EXPERTS, CHUNK) | (every != 0)) & (expert < num_experts)
    slot = tl.load(slot_of_expert + expert, mask=expert < num_experts, other=-1)
    missing = used & (slot < 0)
    move = tl.cumsum(missing.to(tl.int32), 0) - 1 - first
    comes = missing & (move >= 0) & (move < count)
    in_slot = used & (slot >= 0) & (first == 0)
    row = tl.where(comes, first_spare + move, tl.where(in_slot, first_slot + slot, -1))
    tl.store(row_of_expert + expert, row, mask=expert < num_experts)
    tl.store(moves + 2 * tl.maximum(move, 0), expert, mask=comes)
    tl.store(moves + 2 * tl.maximum(move, 0) + 1, row, mask=comes)
    tl.store(num_moves, tl.sum(comes.to(tl.int32)))


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
    """strips [S, 4] int64: the address of the strip in expert 0 of main memory and in row 0 of the target, bytes from
    one expert to the next, and its bytes; the first `num_wide` of them are aligned. Grid: any number of programs."""
    for tile in range(tl.program_id(0), tl.load(num_moves) * num_strips, tl.num_programs(0)):
        strip, move = strips + tile % num_strips * 4, moves + tile // num_strips * 2
        stride, size = tl.load(strip + 2), tl.load(strip + 3)
        begin = tl.load(strip) + tl.load(move).to(tl.int64) * stride
        end = tl.load(strip + 1) + tl.load(move + 1).to(tl.int64) * stride
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
def mask_pairs_kernel(ids, row_of_expert, out, num_pairs, CHUNK: tl.constexpr):
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    some = tl.load(ids + at, mask=at < num_pairs, other=-1)
    row = tl.load(row_of_expert + tl.maximum(some, 0), mask=some >= 0, other=-1)
    tl.store(out + at, tl.where(row < 0, -1, some), mask=at < num_pairs)


def prepare_copies(copies: ExpertCopies) -> ExpertCopies:
    """Returns copies with the strips of whole experts: wide ones of tensors whose experts are aligned, then narrow ones
    of the others."""
    wide: list[list[int]] = []
    narrow: list[list[int]] = []
    for tensors in zip(copies.bank, copies.target, strict=True):
        stride = tensors[0][0].numel() * tensors[0].element_size()
        addresses = [device_address(tensor) for tensor in tensors]
        aligned = not any(number % ALIGNED for number in (stride, *addresses))
        step, strips = (4 * WORDS, wide) if aligned else (NARROW, narrow)
        for at in range(0, stride, step):
            strips.append([*(address + at for address in addresses), stride, min(step, stride - at)])
    table = torch.tensor(wide + narrow, dtype=torch.int64, device=copies.target[0].device)
    return dataclasses.replace(copies, strips=table, num_wide=len(wide))


def choose_slots(ids: torch.Tensor, tables: SlotTables, moves: Moves) -> None:
    """Does as the reference. `ids` contiguous."""
    choose_slots_kernel[(1,)](
        ids, tables.slot_of_expert, tables.expert_of_slot, tables.last_used, tables.clock, tables.totals,
        tables.scratch, moves.row_of_expert, moves.rows, moves.count, ids.numel(), len(tables.slot_of_expert),
        len(tables.expert_of_slot), moves.first_slot, moves.first_spare, EXPERTS=EXPERTS, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip


def stage_experts(ids: torch.Tensor, tables: SlotTables, moves: Moves, wave: Wave) -> None:
    """Does as the reference. `ids` contiguous."""
    stage_experts_kernel[(1,)](
        ids, tables.slot_of_expert, moves.row_of_expert, moves.rows, moves.count,
        0 if wave.every else ids.numel(), len(tables.slot_of_expert), moves.first_slot, moves.first_spare,
        wave.first, wave.count, int(wave.every), EXPERTS=EXPERTS, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip


def copy_experts(copies: ExpertCopies, moves: Moves, beside: bool = False) -> None:
    """Does as the reference, by the strips of `prepare_copies`."""
    assert copies.strips is not None
    copy_experts_kernel[(PROGRAMS_BESIDE if beside else PROGRAMS,)](
        moves.rows, moves.count, copies.strips, copies.num_wide, len(copies.strips),
        WORDS=WORDS, NARROW=NARROW, num_warps=4,
    )  # fmt: skip


def mask_pairs(ids: torch.Tensor, moves: Moves) -> torch.Tensor:
    """Does as the reference. `ids` contiguous."""
    out = torch.empty_like(ids)
    mask_pairs_kernel[(triton.cdiv(ids.numel(), CHUNK),)](ids, moves.row_of_expert, out, ids.numel(), CHUNK=CHUNK)
    return out


EXPERT_SLOTS = SlotKernels(prepare_copies, choose_slots, stage_experts, copy_experts, mask_pairs)
