"""The stream of models with gated residual streams (Qwen3.8-Flash-Next): several vectors a token, normed and mixed anew
before every block, whose output is added to each of them by a gate of its own."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.errors import UserError
from sglang.srt.layers.native_streams import place
from sglang.srt.layers.ops import LinearOp
from sglang.srt.layers.parameter import Init, Scope, TensorPart
from sglang.srt.layers.quantization.activations import Activations
from sglang.srt.layers.residual import FFN, MIXER, NGRAMS, Block, Join
from sglang.srt.layers.stream_kernels import StreamKernels
from sglang.srt.plan.layer_spec import GatedStreams
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.weight_names import PartKey

PLACES = {MIXER: "attn_mix", FFN: "mlp_mix"}
"""Names of the modules around a block, by the name of the norm before the block."""
DOWN, INJECT = "input_mix_weight_down", "block_inject_weight"
"""Checkpoints' names of the two halves of the first product."""


class GatedStream:
    """`streams` [T, N, H], to which `out` [T, H] of the last block is added by `placement` [T, N] (None: there is
    none)."""

    __slots__ = ("out", "placement", "streams")

    def __init__(self, streams: torch.Tensor) -> None:
        self.streams = streams
        self.out: torch.Tensor | None = None
        self.placement: torch.Tensor | None = None

    def summed(self) -> torch.Tensor:
        """Returns the streams with the last block's output in them."""
        if self.out is not None:
            assert self.placement is not None
            place(self.streams, self.out, self.placement)
            self.out = self.placement = None
        return self.streams


class GatedJoin:
    """The way of the streams into a block and out of it. `inject` False: behind the last block."""

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
        self.linear: LinearOp = scope.plan.entry("linear")
        self.kernels: StreamKernels = scope.plan.entry("gated_streams")

    def attach(self, block: Block) -> None:
        """The sum over the ranks stays with the block."""

    def before(self, stream: GatedStream) -> torch.Tensor:
        normed = self.kernels.place_and_norm(stream.streams, stream.out, stream.placement, self.weight, self.eps)
        products = self.linear(normed.flatten(1), self.down)
        low, stream.placement = self.kernels.bend(products, self.spec.rank, self.spec.streams)
        stream.out = None
        return self.kernels.mix(self.linear(low, self.up), normed)

    def after(self, stream: GatedStream, out: torch.Tensor) -> None:
        stream.out = out


class WholeJoin:
    """Gives a block the streams as they are, [T, N, H], and adds what it makes of them, which is as large."""

    def attach(self, block: Block) -> None:
        """The block takes 16 bits and sums over the ranks itself."""

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
        """Every stream begins as the embedding."""
        return GatedStream(embedded[:, None].expand(-1, self.spec.streams, -1).contiguous())

    def partial_sum(self, stream: Any) -> torch.Tensor:
        """Raises UserError."""
        raise UserError(f"{self.model.architecture}: rows that images add behind layers are not served")

    def aux_hidden_state(self, stream: GatedStream) -> torch.Tensor:
        """A copy of all streams, [T, N * H]: drafts of this model read those behind its last layer."""
        return stream.streams.flatten(1).clone()

    def to_intermediate(self, stream: GatedStream) -> torch.Tensor:
        return stream.summed().flatten(1)

    def resume(self, received: torch.Tensor) -> GatedStream:
        return GatedStream(received.unflatten(1, (self.spec.streams, -1)).clone())

    def finish(self, stream: GatedStream) -> torch.Tensor:
        assert self.end is not None, "the last stage has it"
        return self.end.before(stream)
