"""Residual streams between the blocks of a model: one class per kind of residual in `plan.layer_spec`.

The class is built once per model and owns the parameters after the last layer; `join` builds those around each block of
a layer. `begin` creates the stream from the embeddings, every block changes it through its join, and `finish` ends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from sglang.srt.distributed.groups import Group
from sglang.srt.distributed.partial_sums import DeferredAllReduce
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.parameter import Init, Scope
from sglang.srt.layers.quantization.activations import Activations, RowFormat, values_of
from sglang.srt.plan.layer_spec import Sum
from sglang.srt.plan.model_description import ModelDescription

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch

NGRAMS, MIXER, FFN, INPUTS = "ngrams", "input_norm", "mlp_norm", "inputs"
"""The blocks of a layer, by the name of the norm before them; INPUTS and NGRAMS have no norm."""


class Block(Protocol):
    """A block of a layer, (x [T, H], batch) -> [T, H]. If its `row_format` is not None, it also accepts x quantized
    that way."""

    def __call__(self, x: Activations, batch: ForwardBatch) -> torch.Tensor: ...

    def defer_all_reduce(self) -> Group | None:
        """Makes the block return partial sums from now on; returns the group to sum over. Returns None if the block
        keeps doing its own all-reduce."""


class Join(Protocol):
    """The connection of one block to the stream, from which it takes its input and to which it adds its output."""

    def attach(self, block: Block) -> None:
        """Defers the block's all-reduce to the next norm if possible, and remembers the row format in which it takes
        its input."""

    def before(self, stream: Any) -> Activations:
        """Returns the block's input [T, H]."""

    def after(self, stream: Any, out: torch.Tensor) -> None:
        """Adds the block's output `out` [T, H] to the stream."""


class ResidualStream(Protocol):
    """A model's kind of residual stream."""

    def join(self, scope: Scope, block: str) -> Join:
        """Builds the join of a layer's block (NGRAMS, MIXER, FFN or INPUTS); `scope` is the layer's."""

    def begin(self, embedded: torch.Tensor) -> Any:
        """Returns the stream before the first layer, from embeddings [T, H]."""

    def partial_sum(self, stream: Any) -> torch.Tensor:
        """Returns a term [T, H] of the stream after a layer; adding to it in place adds to the stream."""

    def aux_hidden_state(self, stream: Any) -> torch.Tensor:
        """Returns a copy of the stream [T, H], or of the mean of several streams. Called when a layer has just taken
        its input, or after `finish`."""

    def to_intermediate(self, stream: Any) -> torch.Tensor:
        """Returns the stream as [T, streams * H] for the next pipeline stage, whose `resume` restores it."""

    def resume(self, received: torch.Tensor) -> Any:
        """Returns the stream of tensors that the previous stage sent."""

    def finish(self, stream: Any) -> torch.Tensor:
        """Returns the hidden states [T, H] after the final norm."""


class SumStream:
    """A residual stream as two terms that the next norm adds: `added` [T, H], the last block's output, and `total`, the
    sum before it (None: there is none). With `group`, `added` holds partial sums, which the norm all-reduces."""

    __slots__ = ("added", "group", "total")

    def __init__(self, embedded: torch.Tensor) -> None:
        self.added = embedded
        self.total: torch.Tensor | None = None
        self.group: DeferredAllReduce | None = None

    def normed(self, norm: RMSNorm, wanted: RowFormat | None = None) -> Activations:
        """Adds the terms and returns their norm; many rows are also quantized as `wanted` says."""
        normed, self.total = norm.quantized(self.added, self.total, wanted, self.group)
        self.group = None
        return normed

    def summed(self) -> torch.Tensor:
        """Adds the terms and returns the stream."""
        added = self.added if self.group is None else self.group.all_reduce(self.added)
        self.group = None
        self.total = added if self.total is None else self.total + added
        return self.total


class SumJoin:
    """Adds the block's output to the stream. Without `norm` the block takes the stream itself. `scale` [1] multiplies
    the stream after the block. `attach` may set `group`, and the block then returns partial sums, and `row_format`, in
    which the block takes its rows."""

    def __init__(self, norm: RMSNorm | None, norm_after: RMSNorm | None, scale: torch.Tensor | None = None) -> None:
        self.norm, self.norm_after, self.scale = norm, norm_after, scale
        self.group: Group | None = None
        self.row_format: RowFormat | None = None

    def attach(self, block: Block) -> None:
        self.row_format = getattr(block, "row_format", None)
        # A second norm or a scale after the block needs the complete sum.
        if self.norm_after is None and self.scale is None:
            self.group = block.defer_all_reduce()

    def before(self, stream: SumStream) -> Activations:
        return stream.summed() if self.norm is None else stream.normed(self.norm, self.row_format)

    def after(self, stream: SumStream, out: torch.Tensor) -> None:
        stream.group = None if self.group is None else self.group.begin_sum(out)
        stream.added = out if self.norm_after is None else self.norm_after(out, None)[0]
        if self.scale is not None:
            assert stream.total is not None
            stream.added = (stream.total + stream.added) * self.scale
            stream.total = None


class SumResidual:
    """The usual residual stream: each block's output is added. Implements ResidualStream."""

    def __init__(self, scope: Scope, model: ModelDescription, spec: Sum) -> None:
        self.model, self.spec = model, spec
        centred = model.zero_centred_norms and not model.plain_final_norm
        self.norm = RMSNorm(scope.sub("norm"), model.hidden_size, model.norm_eps, centred) if model.last_stage else None

    def _norm(self, scope: Scope, eps: float = 0.0) -> RMSNorm:
        model = self.model
        return RMSNorm(scope, model.hidden_size, eps or model.norm_eps, model.zero_centred_norms)

    def join(self, scope: Scope, block: str) -> SumJoin:
        spec = self.spec
        normed = {MIXER: spec.mixer_norms, FFN: spec.ffn_norms, INPUTS: False}[block]
        before = self._norm(scope.sub(block)) if normed else None
        after = self._norm(scope.sub(f"{block}_after"), spec.eps_after) if spec.norms_after else None
        last = INPUTS if self.model.per_layer_inputs is not None else FFN
        scaled = spec.layer_scale and block == last
        return SumJoin(before, after, scope.sub("end").param("layer_scalar", (1,), init=Init.ONES) if scaled else None)

    def begin(self, embedded: torch.Tensor) -> SumStream:
        return SumStream(embedded)

    def partial_sum(self, stream: SumStream) -> torch.Tensor:
        """Returns the sum before the last block, which is equal on all ranks, while the last output may still be
        partial sums."""
        return stream.added if stream.total is None else stream.total

    def aux_hidden_state(self, stream: SumStream) -> torch.Tensor:
        assert stream.total is not None, "a norm has added up"
        return stream.total.clone()  # later norms write over it

    def to_intermediate(self, stream: SumStream) -> torch.Tensor:
        return stream.summed()

    def resume(self, received: torch.Tensor) -> SumStream:
        return SumStream(received)

    def finish(self, stream: SumStream) -> torch.Tensor:
        assert self.norm is not None, "the last stage has it"
        return values_of(stream.normed(self.norm))
