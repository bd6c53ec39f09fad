"""Experts in main memory: where a step finds them in GPU memory, and what is copied for it.

A layer has `slots` for some of its experts, and shares `spare` rows with other layers. A step takes those of its
experts that are in no slot into the slots that were used longest ago and not by the step itself, and what is more than
these into spare rows. Long prompts leave the slots alone and take everything else into spare rows, in several waves if
these are fewer. Everything is decided on the device, without the host, so it can be captured in a CUDA graph.

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
MaskPairs = TypeVar("MaskPairs", covariant=True)


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
    """Where the experts of a step are, and which are to be copied there. `row_of_expert` [E] int32: rows of the tensors
    of slots and spare rows, -1 for experts that are not there. `rows` [E, 2] int32: an expert of main memory, and the
    row where it goes; the first `count` [1] int32 of these count. `first_slot`, `first_spare`: the rows where the
    layer's slots and the spare rows begin."""

    row_of_expert: torch.Tensor
    rows: torch.Tensor
    count: torch.Tensor
    first_slot: int = 0
    first_spare: int = 0

    @classmethod
    def room_for(cls, num_experts: int, device: torch.device, first_slot: int = 0, first_spare: int = 0) -> Moves:
        """Returns moves of a layer with so many experts, none yet."""
        return cls(
            torch.full((num_experts,), -1, dtype=torch.int32, device=device),
            torch.zeros((num_experts, 2), dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            first_slot,
            first_spare,
        )


@dataclass(frozen=True, slots=True)
class Wave:
    """The experts in no slot whose numbers among all of these begin with `first`, at most `count`; the first wave has
    the experts in slots too. `every`: of all experts, not of those that the step chose."""

    first: int
    count: int
    every: bool


@dataclass(frozen=True, slots=True)
class ExpertCopies:
    """Tensors of equal kinds (weights, scales, ...) with a row for each expert: those in main memory, and the ones to
    fill. `strips` and `num_wide`: as the Triton kernel takes them (`layers/triton_ops/expert_slots`)."""

    bank: Sequence[torch.Tensor]
    target: Sequence[torch.Tensor]
    strips: torch.Tensor | None = None
    num_wide: int = 0


@dataclass(frozen=True, slots=True)
class SlotKernels(Generic[Prepare, Choose, Stage, CopyExperts, MaskPairs]):
    """What is prepared for copies when a model is loaded, and the four kernels, with the types of those here."""

    prepare: Prepare
    choose: Choose
    stage: Stage
    copy: CopyExperts
    mask: MaskPairs


def prepare_copies(copies: ExpertCopies) -> ExpertCopies:
    """Returns copies with what the kernel needs beside the tensors: nothing."""
    return copies


def choose_slots(ids: torch.Tensor, tables: SlotTables, moves: Moves) -> None:
    """Gives a row to each expert of ids [T, k] int32 (-1: none). Those that are in no slot take, by their numbers, the
    slots that were used longest ago, of equally old ones the first, but none that this step uses; the others take spare
    rows. `moves` becomes what is to be copied from main memory."""
    used = sorted({*ids.flatten().tolist()} - {-1})
    slot_of, last_used = tables.slot_of_expert.tolist(), tables.last_used.tolist()
    expert_of = tables.expert_of_slot.tolist()
    tables.clock.add_(1)
    now = int(tables.clock)
    hits = {slot_of[expert] for expert in used} - {-1}
    for slot in hits:
        last_used[slot] = now
    missing = [expert for expert in used if slot_of[expert] < 0]
    free = sorted({*range(len(last_used))} - hits, key=lambda slot: (last_used[slot], slot))
    for expert, slot in zip(missing, free, strict=False):
        if expert_of[slot] >= 0:
            slot_of[expert_of[slot]] = -1
        slot_of[expert], expert_of[slot], last_used[slot] = slot, expert, now
    row_of = [-1] * len(slot_of)
    for expert in used:
        row_of[expert] = moves.first_slot + slot_of[expert]
    for spare, expert in enumerate(missing[len(free) :]):
        row_of[expert] = moves.first_spare + spare
    _write_moves(moves, row_of, missing)
    tables.totals.add_(torch.tensor([len(used), len(missing)], device=tables.totals.device))
    for table, values in (
        (tables.slot_of_expert, slot_of),
        (tables.expert_of_slot, expert_of),
        (tables.last_used, last_used),
    ):
        table.copy_(torch.tensor(values))


def stage_experts(ids: torch.Tensor, tables: SlotTables, moves: Moves, wave: Wave) -> None:
    """Gives a row to each expert of a wave of ids [T, k] int32 (-1: none): its slot, or a spare row."""
    slot_of = tables.slot_of_expert.tolist()
    used = range(len(slot_of)) if wave.every else sorted({*ids.flatten().tolist()} - {-1})
    missing = [expert for expert in used if slot_of[expert] < 0][wave.first : wave.first + wave.count]
    row_of = [-1] * len(slot_of)
    if wave.first == 0:
        for expert in used:
            row_of[expert] = moves.first_slot + slot_of[expert] if slot_of[expert] >= 0 else -1
    for spare, expert in enumerate(missing):
        row_of[expert] = moves.first_spare + spare
    _write_moves(moves, row_of, missing)


def _write_moves(moves: Moves, row_of: list[int], missing: list[int]) -> None:
    moves.row_of_expert.copy_(torch.tensor(row_of))
    for move, expert in enumerate(missing):
        moves.rows[move] = torch.tensor([expert, row_of[expert]])
    moves.count.fill_(len(missing))


def copy_experts(copies: ExpertCopies, moves: Moves, beside: bool = False) -> None:
    """Copies experts as `moves` says. beside: while other kernels of the step run."""
    for expert, row in moves.rows[: int(moves.count)].tolist():
        for bank, target in zip(copies.bank, copies.target, strict=True):
            target[row] = bank[expert]


def mask_pairs(ids: torch.Tensor, moves: Moves) -> torch.Tensor:
    """Returns ids [T, k] int32, -1 for experts that have no row."""
    return torch.where((ids < 0) | (moves.row_of_expert[ids.clamp_min(0).long()] < 0), -1, ids)


EXPERT_SLOTS = SlotKernels(prepare_copies, choose_slots, stage_experts, copy_experts, mask_pairs)
EXPERT_SLOTS_OP = Op("expert_slots", EXPERT_SLOTS)
