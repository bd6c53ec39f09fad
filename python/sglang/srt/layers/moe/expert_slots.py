"""The experts of a layer in main memory, and what a step gets of them in GPU memory (`slot_ops`).

A step computes with the experts in the layer's slots, and with the others in a buffer that layers share. Of long
prompts nearly every expert is needed: there the next experts arrive in one buffer while those in the other are
computed with. Where a buffer does not hold all that may be missing, a step computes in waves.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from sglang.srt.errors import UserError
from sglang.srt.layers.moe.expert_buffers import ExpertBuffers, ExpertPool, Pair, each_tensor, tensors_of
from sglang.srt.layers.moe.slot_ops import EXPERT_SLOTS_OP, MAX_EXPERTS, ExpertCopies, Moves, SlotTables, Wave
from sglang.srt.mem_cache.main_memory import register
from sglang.srt.mem_cache.node_memory import ANYWHERE, RowNodes, map_on_nodes
from sglang.srt.plan.expert_slot_plan import BUFFERS

if TYPE_CHECKING:
    from sglang.srt.layers.moe.expert_weights import ExpertWeights, Waves
    from sglang.srt.plan.plan import Plan

EVERY_EXPERT = 8
"""Pairs for each expert from which on a step needs all of them: hardly any is left out then."""
PAGE = mmap.PAGESIZE
GIB = 1024**3


class ExpertSlots:
    """The slots of one layer. `bank`: the experts in main memory, as kernels read them; `num_buffered`: the most that
    a buffer holds."""

    def __init__(
        self,
        plan: Plan,
        bank: Pair,
        num_slots: int,
        num_buffered: int,
        shared: ExpertBuffers,
        device: torch.device,
        row_nodes: Sequence[RowNodes] = (ANYWHERE, ANYWHERE),
    ) -> None:
        num_experts = bank[0].num_experts
        if num_experts > MAX_EXPERTS:
            raise UserError(f"{num_experts} experts of a layer cannot lie in main memory: there may be {MAX_EXPERTS}")
        self.kernels = plan.entry(EXPERT_SLOTS_OP)
        self.num_experts, self.num_slots = num_experts, num_slots
        self.num_buffered = min(num_buffered, num_experts - num_slots)
        if device.type == "cuda":
            up, down = (
                each_tensor(weights, partial(_page_locked, placed=placed))
                for weights, placed in zip(bank, row_nodes, strict=True)
            )
            bank = up, down
        self.bank = bank
        self.tables = SlotTables.filled(num_experts, num_slots, device)
        self.shared, self.number = shared, len(shared.layers)
        shared.join(self, device)

    def place(self, pool: ExpertPool, weights: Pair, first_slot: int, first_spare: Sequence[int]) -> None:
        """Takes GPU memory: `weights` of a pool have the layer's slots from row `first_slot` on, and each buffer from
        one of `first_spare` on."""
        self.pool = pool
        filled, bank = [*tensors_of(weights)], [*tensors_of(self.bank)]
        for tensor, experts in zip(filled, bank, strict=True):
            tensor[first_slot : first_slot + self.num_slots].copy_(experts[self.num_experts - self.num_slots :])
        device = filled[0].device
        self.moves = [Moves.room_for(self.num_experts, device, first_slot, spare) for spare in first_spare]
        self.weights: list[Pair] = [
            (
                replace(weights[0], row_of_expert=moves.row_of_expert),
                replace(weights[1], row_of_expert=moves.row_of_expert),
            )
            for moves in self.moves
        ]
        self.copies = self.kernels.prepare(ExpertCopies(bank, filled))

    def of_step(self, ids: torch.Tensor) -> tuple[ExpertWeights, ExpertWeights, Waves | None]:
        """Returns weights of both products that have the experts of ids [T, k] int32 (contiguous; -1: none); of a step
        in waves, these."""
        if self.number == 0:
            self.shared.forget_copies_ahead()
        waves = StepWaves(self, ids)
        if not waves.every and min(ids.numel(), self.num_experts) <= self.num_slots + self.num_buffered:
            buffer = self.number % BUFFERS
            self.pool.claim(buffer)
            self.kernels.choose(ids, self.tables, self.moves[buffer])
            self.kernels.copy(self.copies, self.moves[buffer])
            return *self.weights[buffer], None
        if waves.count == 1:
            return *waves.fill(0), None
        return *self.weights[0], waves


@dataclass(frozen=True, slots=True)
class StepWaves:
    """The waves of a step that leaves the slots alone: what is in no slot goes through the buffers, one after the
    other."""

    layer: ExpertSlots
    ids: torch.Tensor

    @property
    def every(self) -> bool:
        """Returns whether the step is taken to need every expert."""
        return self.ids.numel() >= EVERY_EXPERT * self.layer.num_experts

    @property
    def count(self) -> int:
        """Returns the number of waves."""
        layer = self.layer
        return -(-min(self.ids.numel(), layer.num_experts - layer.num_slots) // layer.num_buffered)

    def __iter__(self) -> Iterator[tuple[ExpertWeights, ExpertWeights, torch.Tensor]]:
        for wave in range(self.count):
            w13, w2 = self.fill(wave)
            yield w13, w2, self.layer.kernels.mask(self.ids, self.layer.moves[self._buffer(wave)])

    def fill(self, wave: int) -> Pair:
        """Returns the weights of a wave; has them copied unless that has been done ahead in this step."""
        layer, pool, buffer = self.layer, self.layer.pool, self._buffer(wave)
        ahead = self.every and pool.ahead[buffer] == (layer.number, wave)
        if not ahead:
            pool.claim(buffer)
            self._copy(wave)
        elif pool.arrived:
            pool.arrived[buffer].wait()
        if self.every:
            self._begin_next(wave)
        return layer.weights[buffer]

    def _buffer(self, wave: int) -> int:
        return (self.layer.number * self.count + wave) % BUFFERS

    def _copy(self, wave: int, beside: bool = False) -> None:
        layer, moves, buffered = self.layer, self.layer.moves[self._buffer(wave)], self.layer.num_buffered
        layer.kernels.stage(self.ids, layer.tables, moves, Wave(wave * buffered, buffered, self.every))
        layer.kernels.copy(layer.copies, moves, beside)

    def _begin_next(self, wave: int) -> None:
        """Begins to copy the next wave or the next layer's first one, on a stream of its own."""
        following, number, shared = self, wave + 1, self.layer.shared
        if number == self.count:
            if self.layer.number + 1 == len(shared.layers):
                return
            following, number = StepWaves(shared.layers[self.layer.number + 1], self.ids), 0
        pool, buffer, what = following.layer.pool, following._buffer(number), (following.layer.number, number)
        stream = shared.stream
        if stream is None or not following.every or pool.ahead[buffer] == what:
            return
        if torch.cuda.is_current_stream_capturing():
            return
        stream.wait_stream(torch.cuda.current_stream())  # whoever reads the buffer has been launched
        with torch.cuda.stream(stream):
            following._copy(number, beside=True)
            pool.arrived[buffer].record()
        pool.ahead[buffer] = what


def _page_locked(tensor: torch.Tensor, placed: RowNodes) -> torch.Tensor:
    """Page-locks a tensor; one that is not alone on its pages is copied before. Raises UserError where the system
    refuses."""
    storage = tensor.untyped_storage()
    if storage.data_ptr() % PAGE or not tensor.is_contiguous() or storage.nbytes() != tensor.nbytes:
        tensor = map_on_nodes(tensor.shape, tensor.dtype, placed).copy_(tensor)
    if code := register(tensor):
        raise UserError(_why_not_locked(tensor.nbytes, code))
    return tensor


def _why_not_locked(num_bytes: int, code: int) -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    said = "none" if limit == resource.RLIM_INFINITY else f"{limit / GIB:.3f} GiB"
    return (
        f"{num_bytes / GIB:.2f} GiB of main memory cannot be page-locked for the experts of a layer (CUDA error {code};"
        f" the limit of locked memory, ulimit -l, is {said}). Raise it (ulimit -l unlimited; docker run --ulimit"
        " memlock=-1), free memory of the machine or raise the container's limit, give WSL2 more (it locks half of its"
        " memory= in .wslconfig), or keep the experts in the memory of more GPUs (--tp-size)."
    )
