"""Experts in main memory: which of them a step finds in the slots of GPU memory, and what is copied for it.

A layer has `slots` for some of its experts. A step with no more (token, expert) pairs than slots takes those that it
lacks into the slots that were used longest ago. A larger one has the experts that it needs copied, from slots or from
main memory, to buffers that layers share, and leaves the slots alone. Everything is decided on the device, without the
host, so it can be captured in a CUDA graph.

The ops in plain torch: the CPU kernels, and the reference for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from sglang.srt.kernels.op import Op

MAX_EXPERTS = 1024
"""Most experts of a layer, the shared one included."""

Prepare = TypeVar("Prepare", covariant=True)
Choose = TypeVar("Choose", covariant=True)
Stage = TypeVar("Stage", covariant=True)
CopyExperts = TypeVar("CopyExperts", covariant=True)
LookUp = TypeVar("LookUp", covariant=True)


@dataclass(frozen=True, slots=True)
class SlotTables:
    """The slots of a layer with E experts and K slots, on the device. `slot_of_expert` [E] int32, -1: in main memory
    alone; `expert_of_slot` [K] int32, -1: empty; `last_used` [K] int64, in steps counted by `clock` [1] int64;
    `totals` [2] int64: experts that steps chose since the start, and of these the ones that were in no slot;
    `scratch` [K] int32 of the kernel."""

    slot_of_expert: torch.Tensor
    expert_of_slot: torch.Tensor
    last_used: torch.Tensor
    clock: torch.Tensor
    totals: torch.Tensor
    scratch: torch.Tensor

    @classmethod
    def filled(cls, num_experts: int, num_slots: int, device: torch.device) -> SlotTables:
        """Returns the tables where the slots hold the last experts, the shared one among them."""
        first = num_experts - num_slots
        experts = torch.arange(num_experts, dtype=torch.int32, device=device)
        return cls(
            torch.where(experts >= first, experts - first, -1).to(torch.int32),
            experts[first:].clone(),
            torch.zeros(num_slots, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(2, dtype=torch.int64, device=device),
            torch.empty(num_slots, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class Moves:
    """The experts to copy: `rows` [M, 2] int32, of which the first `count` [1] int32 count. The first column is an
    expert of main memory, or ~slot of a slot; the second the row where it goes."""

    rows: torch.Tensor
    count: torch.Tensor

    @classmethod
    def room_for(cls, num: int, device: torch.device) -> Moves:
        """Returns moves of up to `num` experts, none yet."""
        rows = torch.zeros((num, 2), dtype=torch.int32, device=device)
        return cls(rows, torch.zeros(1, dtype=torch.int32, device=device))


@dataclass(frozen=True, slots=True)
class ExpertCopies:
    """Tensors of equal kinds (weights, scales, ...) with a row for each expert: those in main memory, in slots, and the
    ones to fill. `strips` and `num_wide`: as the Triton kernel takes them (`layers/triton_ops/expert_slots`)."""

    bank: Sequence[torch.Tensor]
    slots: Sequence[torch.Tensor]
    target: Sequence[torch.Tensor]
    strips: torch.Tensor | None = None
    num_wide: int = 0


@dataclass(frozen=True, slots=True)
class SlotKernels(Generic[Prepare, Choose, Stage, CopyExperts, LookUp]):
    """What is prepared for copies when a model is loaded, and the four kernels, with the types of those here."""

    prepare: Prepare
    choose: Choose
    stage: Stage
    copy: CopyExperts
    look_up: LookUp


def prepare_copies(copies: ExpertCopies) -> ExpertCopies:
    """Returns copies with what the kernel needs beside the tensors: nothing."""
    return copies


def choose_slots(ids: torch.Tensor, tables: SlotTables, moves: Moves) -> None:
    """Gives a slot to each expert of ids [T, k] int32 (-1: none), which are at most as many as slots: those that have
    none take, by their numbers, the slots that were used longest ago, of equally old ones the first. `moves` becomes
    what is to be copied from main memory."""
    used = sorted({*ids.flatten().tolist()} - {-1})
    slot_of, last_used = tables.slot_of_expert.tolist(), tables.last_used.tolist()
    tables.clock.add_(1)
    now = int(tables.clock)
    for slot in (slot_of[expert] for expert in used):
        if slot >= 0:
            last_used[slot] = now
    missing = [expert for expert in used if slot_of[expert] < 0]
    oldest = sorted(range(len(last_used)), key=lambda slot: (last_used[slot], slot))
    expert_of = tables.expert_of_slot.tolist()
    for move, (expert, slot) in enumerate(zip(missing, oldest, strict=False)):
        if expert_of[slot] >= 0:
            slot_of[expert_of[slot]] = -1
        slot_of[expert], expert_of[slot], last_used[slot] = slot, expert, now
        moves.rows[move] = torch.tensor([expert, slot])
    moves.count.fill_(len(missing))
    tables.totals.add_(torch.tensor([len(used), len(missing)], device=tables.totals.device))
    for table, values in (
        (tables.slot_of_expert, slot_of),
        (tables.expert_of_slot, expert_of),
        (tables.last_used, last_used),
    ):
        table.copy_(torch.tensor(values))


def stage_experts(ids: torch.Tensor, tables: SlotTables, moves: Moves, every: bool) -> None:
    """Makes `moves` of the experts of ids [T, k] int32, or of all (`every`), each to the row of its number, from its
    slot if it has one."""
    slot_of = tables.slot_of_expert.tolist()
    used = range(len(slot_of)) if every else sorted({*ids.flatten().tolist()} - {-1})
    for move, expert in enumerate(used):
        source = expert if slot_of[expert] < 0 else ~slot_of[expert]
        moves.rows[move] = torch.tensor([source, expert])
    moves.count.fill_(len(used))


def copy_experts(copies: ExpertCopies, moves: Moves) -> None:
    """Copies experts as `moves` says."""
    for source, row in moves.rows[: int(moves.count)].tolist():
        for bank, slots, target in zip(copies.bank, copies.slots, copies.target, strict=True):
            target[row] = bank[source] if source >= 0 else slots[~source]


def look_up(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Returns table[ids] for ids [T, k] int32, -1 where they are -1. Kernels that load weights before the kernel ahead
    of them has ended follow this one, so that what was copied before it is there."""
    return torch.where(ids < 0, -1, table[ids.clamp_min(0).long()])


EXPERT_SLOTS = SlotKernels(prepare_copies, choose_slots, stage_experts, copy_experts, look_up)
EXPERT_SLOTS_OP = Op("expert_slots", EXPERT_SLOTS)
