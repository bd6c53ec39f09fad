"""The experts of a layer in main memory, and what a step gets of them in GPU memory (`slot_ops`).

With few (token, expert) pairs a step computes with the layer's slots. With more it computes with a buffer of all
experts, which layers share: those that the step needs are copied there. Of long prompts every expert is needed, so
where there are two buffers the next layer's experts arrive while this layer computes.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sglang.srt.errors import UserError
from sglang.srt.layers.moe.expert_buffers import ExpertBuffers
from sglang.srt.layers.moe.expert_weights import ExpertWeights
from sglang.srt.layers.moe.slot_ops import EXPERT_SLOTS_OP, MAX_EXPERTS, ExpertCopies, Moves, SlotTables
from sglang.srt.mem_cache.main_memory import map_memory, register

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan

EVERY_EXPERT = 8
"""Pairs for each expert from which on a step needs all of them: hardly any is left out then."""
PAGE = mmap.PAGESIZE
GIB = 1024**3

Pair = tuple[ExpertWeights, ExpertWeights]
"""Weights of both products."""


class ExpertSlots:
    """The slots of one layer. `bank`: the experts in main memory, as kernels read them."""

    def __init__(
        self, plan: Plan, bank: Pair, num_slots: int, num_buffers: int, shared: ExpertBuffers, device: torch.device
    ) -> None:
        num_experts = bank[0].num_experts
        if num_experts > MAX_EXPERTS:
            raise UserError(f"{num_experts} experts of a layer cannot lie in main memory: there may be {MAX_EXPERTS}")
        self.kernels = plan.entry(EXPERT_SLOTS_OP)
        self.num_experts, self.num_slots, self.shared = num_experts, num_slots, shared
        if device.type == "cuda":
            bank = (_each_tensor(bank[0], _page_locked), _each_tensor(bank[1], _page_locked))
        self.bank = bank
        self.slots = _like(bank, num_slots, device)
        self.tables = SlotTables.filled(num_experts, num_slots, device)
        for slots, experts in zip(_tensors(self.slots), _tensors(bank), strict=True):
            slots.copy_(experts[num_experts - num_slots :])
        form = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in _tensors(bank))
        self.number = shared.join(self, device if num_buffers > 1 else None)
        self.buffers: list[Pair] = shared.of_form(
            form, lambda: [_like(bank, num_experts, device) for _ in range(num_buffers)]
        )
        self.moves, self.moves_ahead = (Moves.room_for(num_experts, device) for _ in range(2))
        self.to_slots = self._copies(self.slots)
        self.to_buffers = [self._copies(buffer) for buffer in self.buffers]
        self.same_rows = torch.arange(num_experts, dtype=torch.int32, device=device)

    def _copies(self, target: Pair) -> ExpertCopies:
        bank, slots, filled = ([*_tensors(pair)] for pair in (self.bank, self.slots, target))
        return self.kernels.prepare(ExpertCopies(bank, slots, filled))

    def of_step(self, ids: torch.Tensor) -> tuple[ExpertWeights, ExpertWeights, torch.Tensor]:
        """Returns weights of both products that have the experts of ids [T, k] int32 (contiguous; -1: none), and the
        rows where these have them, [T, k] int32."""
        if ids.numel() <= self.num_slots:
            self.kernels.choose(ids, self.tables, self.moves)
            self.kernels.copy(self.to_slots, self.moves)
            return *self.slots, self.kernels.look_up(ids, self.tables.slot_of_expert)
        every = ids.numel() >= EVERY_EXPERT * self.num_experts
        place = self.number % len(self.buffers)
        self._fill(place, ids, every)
        if every:
            self._begin_next(ids)
        return *self.buffers[place], self.kernels.look_up(ids, self.same_rows)

    def _fill(self, place: int, ids: torch.Tensor, every: bool) -> None:
        """Fills a buffer, unless that has been done ahead in this step."""
        shared = self.shared
        if self.number == 0:  # a step begins: graphs may have written to the buffers since the last one
            shared.copied_ahead.clear()
        if every and shared.copied_ahead.get(place) == self.number:
            if shared.stream is not None:
                shared.arrived[place].wait()
            return
        self.kernels.stage(ids, self.tables, self.moves, every)
        self.kernels.copy(self.to_buffers[place], self.moves)
        shared.copied_ahead.pop(place, None)

    def _begin_next(self, ids: torch.Tensor) -> None:
        """Begins to copy the next layer's experts to the other buffer, on a stream of its own."""
        shared, number = self.shared, self.number + 1
        stream = shared.stream
        if stream is None or number == len(shared.layers) or torch.cuda.is_current_stream_capturing():
            return
        following = shared.layers[number]
        place = number % len(following.buffers)
        if following.num_experts * EVERY_EXPERT > ids.numel() or shared.copied_ahead.get(place) == number:
            return
        stream.wait_stream(torch.cuda.current_stream())  # whoever reads the buffer has been launched
        with torch.cuda.stream(stream):
            following.kernels.stage(ids, following.tables, following.moves_ahead, True)
            following.kernels.copy(following.to_buffers[place], following.moves_ahead)
            shared.arrived[place].record()
        shared.copied_ahead[place] = number


def _tensors(pair: Pair) -> Iterator[torch.Tensor]:
    for weights in pair:
        tensors = (weights.data, weights.scale, weights.global_scale, weights.bias)
        yield from (tensor for tensor in tensors if tensor is not None)


def _like(pair: Pair, num: int, device: torch.device) -> Pair:
    """Returns weights of `num` experts on the device, with what all experts share."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty((num, *tensor.shape[1:]), dtype=tensor.dtype, device=device)

    def of(weights: ExpertWeights) -> ExpertWeights:
        scale = None if weights.input_scale is None else weights.input_scale.to(device)
        experts = weights.num_experts if num < weights.num_experts else 0
        return replace(_each_tensor(weights, empty), input_scale=scale, experts_of_layer=experts)

    return of(pair[0]), of(pair[1])


def _each_tensor(weights: ExpertWeights, change: Callable[[torch.Tensor], torch.Tensor]) -> ExpertWeights:
    """Returns the weights with other tensors in the place of those that have a row for each expert."""
    scale, factor, bias = weights.scale, weights.global_scale, weights.bias
    return replace(
        weights,
        data=change(weights.data),
        scale=None if scale is None else change(scale),
        global_scale=None if factor is None else change(factor),
        bias=None if bias is None else change(bias),
    )


def _page_locked(tensor: torch.Tensor) -> torch.Tensor:
    """Page-locks a tensor; one that is not alone on its pages is copied before. Raises UserError where the system
    refuses."""
    storage = tensor.untyped_storage()
    if storage.data_ptr() % PAGE or not tensor.is_contiguous() or storage.nbytes() != tensor.nbytes:
        memory = map_memory(tensor.nbytes)
        memory.copy_(tensor.contiguous().view(-1).view(torch.uint8))
        tensor = memory.view(tensor.dtype).view(tensor.shape)
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
