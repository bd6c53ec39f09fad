"""Hyper-connections: residual streams of several vectors per token, mixed before and after every block.

Source: Hyper-Connections (arXiv 2409.19606), with the mixing matrix constrained as in DeepSeek-V4's report, section
2.2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sglang.srt.blocks.hyper_connections.reference import HYPER_CONNECTION, placed, weights_behind
from sglang.srt.blocks.hyper_connections.spec import HyperConnections
from sglang.srt.errors import UserError
from sglang.srt.layers.layernorm import norm_weight
from sglang.srt.layers.ops import RMSNORM
from sglang.srt.layers.parameter import Init, Scope
from sglang.srt.layers.quantization.activations import Activations, values_of
from sglang.srt.layers.residual import FFN, MIXER, NGRAMS, Block, Join
from sglang.srt.plan.model_description import ModelDescription

PLACES: Mapping[str, tuple[str, str]] = {MIXER: ("attn_mix", "hc_attn"), FFN: ("mlp_mix", "hc_ffn")}
"""Names of a block's connection, by the name of the norm before the block: the module, and the prefix of its
parameters' names in checkpoints."""
HEAD = ("head_mix", "hc_head")
"""Names of the connection after the last layer: the module, and the prefix of its parameters' names in checkpoints."""


class HyperStream:
    """The streams [T, N, H], with the pending `out` [T, H] of the last block and the `placement` that adds it (None:
    nothing is pending). A lagged placement is kept until the next one, since it contains the next block's input
    weights."""

    __slots__ = ("out", "placement", "streams")

    def __init__(self, streams: torch.Tensor) -> None:
        self.streams = streams
        self.out: torch.Tensor | None = None
        self.placement: torch.Tensor | None = None


class HyperJoin:
    """A connection and the norm after it. `pieces`: sizes of the groups of its outputs per token that have a scale of
    their own."""

    def __init__(
        self,
        scope: Scope,
        place: tuple[str, str],
        norm: str,
        model: ModelDescription,
        spec: HyperConnections,
        pieces: tuple[int, ...],
    ) -> None:
        self.spec, self.eps = spec, model.norm_eps
        module, prefix = place
        mixer = scope.sub(module)

        def parameter(kind: str, shape: tuple[int, ...], init: Init = Init.NORMAL) -> torch.Tensor:
            return mixer.param(f"{prefix}_{kind}", shape, init=init, dtype=torch.float32)

        self.matrix = parameter("fn", (sum(pieces), spec.streams * model.hidden_size))
        self.base = parameter("base", (sum(pieces),), Init.ZEROS)
        self.scale = parameter("scale", (len(pieces),), Init.ONES)
        self.weight = norm_weight(scope.sub(norm), model.hidden_size, model.zero_centred_norms)
        self.connect = scope.plan.entry(HYPER_CONNECTION)

    def attach(self, block: Block) -> None:
        """Does nothing: the block does its own all-reduce."""

    def before(self, stream: HyperStream) -> Activations:
        spec = self.spec
        stream.streams, x, stream.placement = self.connect(
            stream.streams,
            stream.out,
            stream.placement,
            self.matrix,
            self.base,
            self.scale,
            self.weight,
            self.eps,
            spec.eps,
            spec.rounds,
            spec.lagged,
            spec.magnitude,
        )
        stream.out = None
        return x

    def after(self, stream: HyperStream, out: torch.Tensor) -> None:
        stream.out = out


class WholeJoin:
    """Gives a block the streams unchanged, [T, N, H], and adds its output of the same shape."""

    def attach(self, block: Block) -> None:
        """Does nothing: the block takes 16-bit rows and does its own all-reduce."""

    def before(self, stream: HyperStream) -> Activations:
        stream.streams, stream.out = _whole(stream), None
        return stream.streams

    def after(self, stream: HyperStream, out: torch.Tensor) -> None:
        stream.streams = stream.streams + out


class LaggedEnd:
    """The end of lagged streams: merges them with the weights that the last block's placement contains, then applies
    the norm."""

    def __init__(self, scope: Scope, model: ModelDescription) -> None:
        self.eps = model.norm_eps
        self.weight = norm_weight(scope.sub("norm"), model.hidden_size, model.zero_centred_norms)
        self.norm = scope.plan.entry(RMSNORM)

    def before(self, stream: HyperStream) -> torch.Tensor:
        streams = stream.streams = _whole(stream)
        stream.out = None
        weights = weights_behind(stream.placement, streams)
        joined = (weights[..., None] * streams).sum(1).to(streams.dtype)
        return self.norm(joined, self.weight, self.eps)


def end_of(scope: Scope, model: ModelDescription, spec: HyperConnections) -> HyperJoin | LaggedEnd:
    """Builds the module that merges the streams after the last layer into normalized rows [T, H]."""
    return LaggedEnd(scope, model) if spec.lagged else HyperJoin(scope, HEAD, "norm", model, spec, (spec.streams,))


class HyperResidual:
    """Residual streams with hyper-connections. Implements ResidualStream."""

    def __init__(self, scope: Scope, model: ModelDescription, spec: HyperConnections) -> None:
        self.model, self.spec = model, spec
        self.end: HyperJoin | LaggedEnd | None = None
        self.weight: torch.Tensor | None = None
        if model.last_stage and spec.mean_head:
            self.weight = norm_weight(scope.sub("norm"), model.hidden_size, model.zero_centred_norms)
            self.norm = scope.plan.entry(RMSNORM)
        elif model.last_stage:
            self.end = end_of(scope, model, spec)

    def join(self, scope: Scope, block: str) -> Join:
        if block == NGRAMS:
            return WholeJoin()
        return HyperJoin(scope, PLACES[block], block, self.model, self.spec, self.spec.pieces)

    def begin(self, embedded: torch.Tensor) -> HyperStream:
        """Starts every stream as a copy of the embedding."""
        return HyperStream(embedded[:, None].expand(-1, self.spec.streams, -1).contiguous())

    def partial_sum(self, stream: HyperStream) -> torch.Tensor:
        """Raises UserError: image features added after layers are not supported."""
        raise UserError(f"{self.model.architecture}: rows that images add behind layers are not served")

    def aux_hidden_state(self, stream: HyperStream) -> torch.Tensor:
        """Returns the mean of the streams, which DeepSeek's DSpark reads."""
        return stream.streams.mean(dim=1)

    def to_intermediate(self, stream: HyperStream) -> torch.Tensor:
        rows = _whole(stream).flatten(1)
        if not self.spec.lagged:
            return rows
        weights = weights_behind(stream.placement, stream.streams)
        return torch.cat((rows, weights.contiguous().view(rows.dtype)), dim=1)

    def resume(self, received: torch.Tensor) -> HyperStream:
        num, size = self.spec.streams, self.model.hidden_size
        stream = HyperStream(received[:, : num * size].unflatten(1, (num, size)).contiguous())
        if self.spec.lagged:
            places = torch.zeros((len(received), num * (num + 2)), dtype=torch.float32, device=received.device)
            places[:, num * (num + 1) :] = received[:, num * size :].contiguous().view(torch.float32)
            stream.placement = places
        return stream

    def finish(self, stream: HyperStream) -> torch.Tensor:
        if self.weight is not None:
            stream.streams, stream.out = _whole(stream), None
            return self.norm(stream.streams.mean(dim=1), self.weight, self.model.norm_eps)
        assert self.end is not None, "the last stage has it"
        return values_of(self.end.before(stream))


def _whole(stream: HyperStream) -> torch.Tensor:
    """Returns the streams [T, N, H] after adding the last block's output."""
    if stream.out is None:
        return stream.streams
    assert stream.placement is not None
    return placed(stream.streams, stream.out, stream.placement)
