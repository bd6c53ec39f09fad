"""Residual streams between the blocks of a model: one class for each kind of residual of `plan.layer_spec`.

The class is built once a model and has the parameters behind the last layer; `join` builds those of each of a layer's
two blocks. The stream itself is made of the embeddings by `begin`, changed by every block through its join, and ended
by `finish`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from sglang.srt.distributed.parallel_state import Group
from sglang.srt.distributed.partial_sums import Summands
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.parameter import Init, Scope
from sglang.srt.layers.quantization.activations import Activations, RowFormat, values_of
from sglang.srt.plan.layer_spec import Sum
from sglang.srt.plan.model_description import ModelDescription

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch

NGRAMS, MIXER, FFN, INPUTS = "ngrams", "input_norm", "mlp_norm", "inputs"
"""The blocks of a layer, by the name of the norm before them; there is none before INPUTS and NGRAMS."""


class Block(Protocol):
    """x [T, H], batch -> [T, H]. A block whose `row_format` is not None also takes x so."""

    def __call__(self, x: Activations, batch: ForwardBatch) -> torch.Tensor: ...

    def defer_all_reduce(self) -> Group | None:
        """Makes the block return this rank's summand from now on; returns the group to sum over. Returns None if the
        block goes on summing."""


class Join(Protocol):
    """Connection of one block to the stream: the block takes its input there and gives its output to it."""

    def attach(self, block: Block) -> None:
        """Take over the sum over the ranks at the end of the block, if that can wait for the next norm, and from now on
        give it its input as its products take it."""

    def before(self, stream: Any) -> Activations:
        """The block's input [T, H]."""

    def after(self, stream: Any, out: torch.Tensor) -> None:
        """`out` [T, H] is what the block made of it."""


class ResidualStream(Protocol):
    def join(self, scope: Scope, block: str) -> Join:
        """Builds the join of a layer's block (NGRAMS, MIXER, FFN or INPUTS); `scope` is the layer's."""

    def begin(self, embedded: torch.Tensor) -> Any:
        """The stream before the first layer, of embeddings [T, H]."""

    def partial_sum(self, stream: Any) -> torch.Tensor:
        """[T, H], a part of the stream behind a layer: what is added to it in place is added to the stream."""

    def aux_hidden_state(self, stream: Any) -> torch.Tensor:
        """A copy of the stream [T, H], or of the mean of several, where a layer has just taken its input, or behind
        `finish`."""

    def to_intermediate(self, stream: Any) -> torch.Tensor:
        """[T, streams * H], of which `resume` of a pipeline's next stage makes the same stream."""

    def resume(self, received: torch.Tensor) -> Any: ...

    def finish(self, stream: Any) -> torch.Tensor:
        """Hidden states [T, H] behind the final norm."""


class SumStream:
    """`added` [T, H] is what the last block made, `total` the sum before it (None: there is none): the norm that comes
    next adds them. With `group` the block made a summand of each rank, and the norm sums these too."""

    __slots__ = ("added", "group", "total")

    def __init__(self, embedded: torch.Tensor) -> None:
        self.added = embedded
        self.total: torch.Tensor | None = None
        self.group: Summands | None = None

    def normed(self, norm: RMSNorm, wanted: RowFormat | None = None) -> Activations:
        """Adds up what there is, and norms it; rows that are many also come as `wanted` says."""
        normed, self.total = norm.quantized(self.added, self.total, wanted, self.group)
        self.group = None
        return normed

    def summed(self) -> torch.Tensor:
        """Adds up what there is."""
        added = self.added if self.group is None else self.group.all_reduce(self.added)
        self.group = None
        self.total = added if self.total is None else self.total + added
        return self.total


class SumJoin:
    """Adds the block's output to the stream. Without `norm` the block takes the stream as it is. `scale` [1] multiplies
    the stream behind the block. `attach` may set `group`, then the block gives a summand of each rank of it, and
    `row_format`, in which the block takes its rows."""

    def __init__(self, norm: RMSNorm | None, norm_after: RMSNorm | None, scale: torch.Tensor | None = None) -> None:
        self.norm, self.norm_after, self.scale = norm, norm_after, scale
        self.group: Group | None = None
        self.row_format: RowFormat | None = None

    def attach(self, block: Block) -> None:
        self.row_format = getattr(block, "row_format", None)
        # What comes between the sum and the next norm needs the sum.
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
        """The last block's output may still be a summand of each rank; the sum before it is the same on all."""
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
