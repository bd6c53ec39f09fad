"""Gated residual streams (Qwen3.8-Flash-Next): several vectors per token, which are normalized and mixed into the input
of every block, and to each of which the block's output is added through a gate."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.blocks.gated_streams.reference import GATED_STREAMS_OP, place
from sglang.srt.blocks.gated_streams.spec import GatedStreams
from sglang.srt.errors import UserError
from sglang.srt.layers.ops import LINEAR
from sglang.srt.layers.parameter import Init, Scope, TensorPart
from sglang.srt.layers.quantization.activations import Activations
from sglang.srt.layers.residual import FFN, MIXER, NGRAMS, Block, Join
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.weight_names import PartKey

PLACES = {MIXER: "attn_mix", FFN: "mlp_mix"}
"""Names of the modules around a block, by the name of the norm before the block."""
DOWN, INJECT = "input_mix_weight_down", "block_inject_weight"
"""Checkpoint names of the two halves of the first projection."""


class GatedStream:
    """The streams [T, N, H], to which the pending `out` [T, H] of the last block is to be added with the gates
    `placement` [T, N]; both None if nothing is pending."""

    __slots__ = ("out", "placement", "streams")

    def __init__(self, streams: torch.Tensor) -> None:
        self.streams = streams
        self.out: torch.Tensor | None = None
        self.placement: torch.Tensor | None = None

    def summed(self) -> torch.Tensor:
        """Returns the streams after adding the last block's output."""
        if self.out is not None:
            assert self.placement is not None
            place(self.streams, self.out, self.placement)
            self.out = self.placement = None
        return self.streams


class GatedJoin:
    """Connects a block to the streams. `inject` False: the final mix after the last block."""

    def __init__(
        self, scope: Scope, norm: Scope, model: ModelDescription, spec: GatedStreams, inject: bool = True
    ) -> None:
        self.spec, self.eps = spec, model.norm_eps
        width = spec.streams * model.hidden_size
        norm_part = TensorPart((width,), convert=lambda stored: (stored.float() + 1.0).view(spec.streams, -1))
        self.weight = norm.param(
            "weight", (spec.streams, model.hidden_size), {PartKey(): norm_part}, Init.ONES, torch.float32
        )
        rows = {DOWN: spec.rank, **({INJECT: spec.streams} if inject else {})}
        parts, end = {}, 0
        for name, count in rows.items():
            parts[PartKey(name)] = TensorPart((count, width), dest=(slice(end, end + count), slice(None)))
            end += count
        self.down = scope.sub("gates").param("weight", (end, width), parts)
        self.up = scope.sub("up").param("weight", (width, spec.rank))
        self.linear = scope.plan.entry(LINEAR)
        self.kernels = scope.plan.entry(GATED_STREAMS_OP)

    def attach(self, block: Block) -> None:
        """Does nothing: the block does its own all-reduce."""

    def before(self, stream: GatedStream) -> torch.Tensor:
        normed = self.kernels.place_and_norm(stream.streams, stream.out, stream.placement, self.weight, self.eps)
        products = self.linear(normed.flatten(1), self.down)
        low, stream.placement = self.kernels.bend(products, self.spec.rank, self.spec.streams)
        stream.out = None
        return self.kernels.mix(self.linear(low, self.up), normed)

    def after(self, stream: GatedStream, out: torch.Tensor) -> None:
        stream.out = out


class WholeJoin:
    """Gives a block the streams unchanged, [T, N, H], and adds its output of the same shape."""

    def attach(self, block: Block) -> None:
        """Does nothing: the block takes 16-bit rows and does its own all-reduce."""

    def before(self, stream: GatedStream) -> Activations:
        return stream.summed()

    def after(self, stream: GatedStream, out: torch.Tensor) -> None:
        stream.streams += out


class GatedResidual:
    """Implements ResidualStream."""

    def __init__(self, scope: Scope, model: ModelDescription, spec: GatedStreams) -> None:
        self.model, self.spec = model, spec
        self.end: GatedJoin | None = None
        if model.last_stage:
            self.end = GatedJoin(scope.sub("head_mix"), scope.sub("norm"), model, spec, inject=False)

    def join(self, scope: Scope, block: str) -> Join:
        if block == NGRAMS:
            return WholeJoin()
        mix = scope.sub(PLACES[block])
        return GatedJoin(mix, mix.sub("norm"), self.model, self.spec)

    def begin(self, embedded: torch.Tensor) -> GatedStream:
        """Starts every stream as a copy of the embedding."""
        return GatedStream(embedded[:, None].expand(-1, self.spec.streams, -1).contiguous())

    def partial_sum(self, stream: Any) -> torch.Tensor:
        """Raises UserError: image features added after layers are not supported."""
        raise UserError(f"{self.model.architecture}: rows that images add behind layers are not served")

    def aux_hidden_state(self, stream: GatedStream) -> torch.Tensor:
        """Returns a copy of all streams, [T, N * H], which this model's drafts read after the last layer."""
        return stream.streams.flatten(1).clone()

    def to_intermediate(self, stream: GatedStream) -> torch.Tensor:
        return stream.summed().flatten(1)

    def resume(self, received: torch.Tensor) -> GatedStream:
        return GatedStream(received.unflatten(1, (self.spec.streams, -1)).clone())

    def finish(self, stream: GatedStream) -> torch.Tensor:
        assert self.end is not None, "the last stage has it"
        return self.end.before(stream)
