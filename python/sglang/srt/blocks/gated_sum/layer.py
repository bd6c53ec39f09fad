"""A residual stream whose channels weight what they have and what a block adds (Muse-Spark)."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.blocks.gated_sum.reference import GATED_SUM, add_gated
from sglang.srt.blocks.gated_sum.spec import GatedSum
from sglang.srt.errors import UserError
from sglang.srt.layers.layernorm import norm_weight
from sglang.srt.layers.ops import RMSNORM
from sglang.srt.layers.parameter import Init, Scope, TensorPart
from sglang.srt.layers.residual import FFN, Block
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.weight_names import PartKey


class Norm:
    """The norm of the stream before a block, or behind the last one."""

    def __init__(self, scope: Scope, model: ModelDescription, zero_centred: bool) -> None:
        self.weight, self.eps = norm_weight(scope, model.hidden_size, zero_centred), model.norm_eps
        self.alone = scope.plan.entry(RMSNORM)


class GatedSumStream:
    """The stream [T, H], to which the output `out` [T, H] of the block of `join` is to be added; both None if nothing
    is pending."""

    __slots__ = ("join", "out", "values")

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.out: torch.Tensor | None = None
        self.join: GatedSumJoin | None = None

    def normed(self, norm: Norm) -> torch.Tensor:
        """Adds the last block's output and returns the norm of the stream."""
        if self.out is None:
            return norm.alone(self.values, norm.weight, norm.eps)
        assert self.join is not None
        out, self.out = self.out, None
        return self.join.add(self.values, out, norm)

    def summed(self) -> torch.Tensor:
        """Returns the stream after adding the last block's output."""
        if self.out is not None:
            assert self.join is not None
            add_gated(self.values, self.out, self.join.scale, self.join.gate, self.join.spec.eps_after)
            self.out = None
        return self.values


class GatedSumJoin:
    """Connects a block to the stream.

    Checkpoint names: the block's norm, with "_after" the weight of the norm of a feed-forward block's output, with
    "_gate" the gate.
    """

    def __init__(self, scope: Scope, block: str, model: ModelDescription, spec: GatedSum) -> None:
        size, self.spec = model.hidden_size, spec
        self.norm = Norm(scope.sub(block), model, model.zero_centred_norms)
        self.scale: torch.Tensor | None = None
        if block == FFN:
            self.scale = norm_weight(scope.sub(f"{block}_after"), size, zero_centred=True)
        part = TensorPart((size,), convert=lambda stored: stored.float() / spec.temperature)
        self.gate = scope.sub(f"{block}_gate").param("gate", (size,), {PartKey(): part}, Init.ZEROS, torch.float32)
        self._add = scope.plan.entry(GATED_SUM)

    def attach(self, block: Block) -> None:
        """Does nothing: the block does its own all-reduce, before its output is normed."""

    def before(self, stream: GatedSumStream) -> torch.Tensor:
        return stream.normed(self.norm)

    def after(self, stream: GatedSumStream, out: torch.Tensor) -> None:
        stream.out, stream.join = out, self

    def add(self, values: torch.Tensor, out: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Adds the block's output to the stream's values in place, and returns their norm."""
        return self._add(values, out, self.scale, self.gate, self.spec.eps_after, norm.weight, norm.eps)


class GatedSumResidual:
    """Implements ResidualStream."""

    def __init__(self, scope: Scope, model: ModelDescription, spec: GatedSum) -> None:
        self.model, self.spec = model, spec
        centred = model.zero_centred_norms and not model.plain_final_norm
        self.norm = Norm(scope.sub("norm"), model, centred) if model.last_stage else None

    def join(self, scope: Scope, block: str) -> GatedSumJoin:
        return GatedSumJoin(scope, block, self.model, self.spec)

    def begin(self, embedded: torch.Tensor) -> GatedSumStream:
        return GatedSumStream(embedded)

    def partial_sum(self, stream: Any) -> torch.Tensor:
        """Raises UserError: image features added after layers are not supported."""
        raise UserError(f"{self.model.architecture}: rows that images add behind layers are not served")

    def aux_hidden_state(self, stream: GatedSumStream) -> torch.Tensor:
        return stream.values.clone()  # later blocks write over it

    def to_intermediate(self, stream: GatedSumStream) -> torch.Tensor:
        return stream.summed()

    def resume(self, received: torch.Tensor) -> GatedSumStream:
        return GatedSumStream(received)

    def finish(self, stream: GatedSumStream) -> torch.Tensor:
        assert self.norm is not None, "the last stage has it"
        return stream.normed(self.norm)
