"""GPU memory for experts that lie in main memory: the slots of every layer, and the buffers that layers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sglang.srt.layers.moe.expert_weights import ExpertWeights
from sglang.srt.plan.expert_slot_plan import BUFFERS

ALIGNED = 16
"""Bytes at whose multiples the tensors of a layer begin, as kernels are compiled for."""

Pair = tuple[ExpertWeights, ExpertWeights]
"""Weights of both products."""


class ExpertPool:
    """Rows for the experts of all layers of one form: the slots of the first layer, of the second, ..., then the
    buffers. So a product finds a layer's slots and the buffers in one tensor."""

    def __init__(self, layers: Sequence[Any], device: torch.device) -> None:
        """layers: of one form, each an `ExpertSlots`."""
        num_slots, buffered = layers[0].num_slots, layers[0].num_buffered
        first_buffer = len(layers) * num_slots
        self.ahead: list[tuple[int, int] | None] = [None] * BUFFERS
        """By buffer: the layer and the wave whose experts were copied there ahead, in this step."""
        self.arrived = [torch.cuda.Event() for _ in range(BUFFERS)] if device.type == "cuda" else []
        """Events by buffer, after these copies."""

        def empty(tensor: torch.Tensor) -> torch.Tensor:
            rows = first_buffer + BUFFERS * buffered
            return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=device)

        w13, w2 = (each_tensor(weights, empty) for weights in layers[0].bank)
        strides = [tensor[0].numel() * tensor.element_size() for tensor in tensors_of((w13, w2))]
        step = math.lcm(*(ALIGNED // math.gcd(ALIGNED, stride) for stride in strides))
        for number, layer in enumerate(layers):
            slot = number * num_slots
            begin = slot // step * step
            spare = [first_buffer - begin + buffer * buffered for buffer in range(BUFFERS)]
            weights = tuple(_since(begin, part, of_layer) for part, of_layer in zip((w13, w2), layer.bank, strict=True))
            layer.place(self, (weights[0], weights[1]), slot - begin, spare)

    def claim(self, buffer: int) -> None:
        """Forgets what was copied to a buffer ahead, once it is there: nothing else may write meanwhile."""
        if self.ahead[buffer] is not None and self.arrived:
            self.arrived[buffer].wait()
        self.ahead[buffer] = None


@dataclass(slots=True)
class ExpertBuffers:
    """What the layers whose experts lie in main memory share: pools by form, and the stream of copies that are made
    ahead of a layer."""

    expected: int = 0
    """Number of these layers."""
    layers: list[Any] = field(default_factory=list)
    """Those whose experts are loaded, each an `ExpertSlots`, in the order of a step."""
    pools: list[ExpertPool] = field(default_factory=list)
    stream: torch.cuda.Stream | None = None

    def totals(self) -> tuple[int, int] | None:
        """Returns how many experts steps chose that computed with slots, and how many of these had to be copied; None
        without such layers. Waits for the device."""
        if not self.layers:
            return None
        asked, copied = torch.stack([layer.tables.totals for layer in self.layers]).sum(0).tolist()
        return asked, copied

    def join(self, layer: Any, device: torch.device) -> None:
        """Adds a layer. With the last one all get their places in GPU memory."""
        self.layers.append(layer)
        if len(self.layers) < self.expected:
            return
        by_form: dict[object, list[Any]] = {}
        for each in self.layers:
            form = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors_of(each.bank))
            by_form.setdefault(form, []).append(each)
        self.pools = [ExpertPool(layers, device) for layers in by_form.values()]
        if device.type == "cuda":
            # Before others: programs of a product that has begun would otherwise take every processor until it ends.
            self.stream = torch.cuda.Stream(device, priority=-1)

    def forget_copies_ahead(self) -> None:
        """Begins a step: graphs may have written to the buffers since the last one."""
        for pool in self.pools:
            pool.ahead = [None] * BUFFERS


def tensors_of(pair: Pair) -> Iterator[torch.Tensor]:
    """Yields the tensors that have a row for each expert."""
    for weights in pair:
        tensors = (weights.data, weights.scale, weights.global_scale, weights.bias)
        yield from (tensor for tensor in tensors if tensor is not None)


def each_tensor(weights: ExpertWeights, change: Callable[[torch.Tensor], torch.Tensor]) -> ExpertWeights:
    """Returns the weights with other tensors in the place of those that have a row for each expert."""
    scale, factor, bias = weights.scale, weights.global_scale, weights.bias
    return replace(
        weights,
        data=change(weights.data),
        scale=None if scale is None else change(scale),
        global_scale=None if factor is None else change(factor),
        bias=None if bias is None else change(bias),
    )


def _since(begin: int, pool: ExpertWeights, of_layer: ExpertWeights) -> ExpertWeights:
    """Returns a pool's rows from `begin` on, with what all experts of a layer share."""
    scale = None if of_layer.input_scale is None else of_layer.input_scale.to(pool.data.device)
    return replace(each_tensor(pool, lambda tensor: tensor[begin:]), input_scale=scale)
