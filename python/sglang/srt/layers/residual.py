"""How the stream between the blocks of a model travels: one class for each kind of residual of `plan.layer_spec`.

The class is built once a model and has the parameters behind the last layer; `join` builds those of each of a layer's
two blocks. The stream itself is made of the embeddings by `begin`, changed by every block through its join, and ended
by `finish`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.parameter import Init, Scope
from sglang.srt.plan.layer_spec import Sum
from sglang.srt.plan.model_description import ModelDescription

MIXER, FFN, INPUTS = "input_norm", "mlp_norm", "inputs"
"""The blocks of a layer, by the name of the norm before them; there is none before INPUTS."""


class Join(Protocol):
    """Where one block takes its input from the stream and gives its output to it."""

    def before(self, stream: Any) -> torch.Tensor:
        """The block's input [T, H]."""

    def after(self, stream: Any, out: torch.Tensor) -> None:
        """`out` [T, H] is what the block made of it."""


class ResidualStream(Protocol):
    def join(self, scope: Scope, block: str) -> Join:
        """Of a layer's block (MIXER, FFN or INPUTS); `scope` is the layer's."""

    def begin(self, embedded: torch.Tensor) -> Any:
        """The stream before the first layer, of embeddings [T, H]."""

    def finish(self, stream: Any) -> torch.Tensor:
        """Hidden states [T, H] behind the final norm."""


class SumStream:
    """`added` [T, H] is what the last block made, `total` the sum before it (None: there is none): the norm that comes
    next adds them."""

    __slots__ = ("added", "total")

    def __init__(self, embedded: torch.Tensor) -> None:
        self.added = embedded
        self.total: torch.Tensor | None = None


class SumJoin:
    """Without `norm` the block takes the stream as it is. `scale` [1] multiplies the stream behind the block."""

    def __init__(self, norm: RMSNorm | None, norm_after: RMSNorm | None, scale: torch.Tensor | None = None) -> None:
        self.norm, self.norm_after, self.scale = norm, norm_after, scale

    def before(self, stream: SumStream) -> torch.Tensor:
        if self.norm is None:
            stream.total = stream.added if stream.total is None else stream.total + stream.added
            return stream.total
        normed, stream.total = self.norm(stream.added, stream.total)
        return normed

    def after(self, stream: SumStream, out: torch.Tensor) -> None:
        stream.added = out if self.norm_after is None else self.norm_after(out, None)[0]
        if self.scale is not None:
            assert stream.total is not None
            stream.added = (stream.total + stream.added) * self.scale
            stream.total = None


class SumResidual:
    def __init__(self, scope: Scope, model: ModelDescription, spec: Sum) -> None:
        self.model, self.spec = model, spec
        self.norm = self._norm(scope.sub("norm"))

    def _norm(self, scope: Scope) -> RMSNorm:
        model = self.model
        return RMSNorm(scope, model.hidden_size, model.norm_eps, model.zero_centred_norms)

    def join(self, scope: Scope, block: str) -> SumJoin:
        spec = self.spec
        unnormed = block == INPUTS or (block == FFN and not spec.ffn_norms)
        before = None if unnormed else self._norm(scope.sub(block))
        after = self._norm(scope.sub(f"{block}_after")) if spec.norms_after else None
        last = INPUTS if self.model.per_layer_inputs is not None else FFN
        scaled = spec.layer_scale and block == last
        return SumJoin(before, after, scope.sub("end").param("layer_scalar", (1,), init=Init.ONES) if scaled else None)

    def begin(self, embedded: torch.Tensor) -> SumStream:
        return SumStream(embedded)

    def finish(self, stream: SumStream) -> torch.Tensor:
        return self.norm(stream.added, stream.total)[0]
