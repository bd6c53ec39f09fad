"""Per-layer token embeddings (Gemma 4): looked up and projected once per step, and gated into the residual stream at
the end of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.mlp.layer import gate_of
from sglang.srt.blocks.per_layer_embedding.spec import PerLayerEmbedding
from sglang.srt.layers.block import DefersNoSum, Site
from sglang.srt.layers.embedding import VocabParallelEmbedding
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.ops import LINEAR
from sglang.srt.layers.parameter import Scope
from sglang.srt.layers.row_exchange import RowExchange
from sglang.srt.plan.model_description import ModelDescription

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch


LAYER_INPUTS = "layer_inputs"
"""Key in `ForwardBatch.step_cache` of the output of `PerLayerInputs`, available from before the first layer on."""


class PerLayerInputs:
    """Computes the layers' inputs [T, layers, size] from ids [T] and embeddings [T, H]: sqrt(2) times the mean of a
    table row and the normalized projection. Source: Gemma 4."""

    def __init__(self, scope: Scope, model: ModelDescription, spec: PerLayerEmbedding) -> None:
        self.spec = spec
        width = spec.num_layers * spec.size
        self.table = VocabParallelEmbedding(
            scope.sub("table"), spec.vocab_size, width, spec.size**0.5, on_host=spec.on_host
        )
        self.projection = scope.sub("projection").param("weight", (width, model.hidden_size))
        self.projection_scale = model.hidden_size**-0.5
        self.norm = RMSNorm(scope.sub("norm"), spec.size, model.norm_eps, model.zero_centred_norms)
        self.linear = scope.plan.entry(LINEAR)

    def __call__(self, ids: torch.Tensor, embedded: torch.Tensor, exchange: RowExchange | None = None) -> torch.Tensor:
        """Computes the inputs. exchange: as in `VocabParallelEmbedding`."""
        shape = (-1, self.spec.num_layers, self.spec.size)
        projected = (self.linear(embedded, self.projection) * self.projection_scale).view(-1, self.spec.size)
        return (self.norm(projected, None)[0].view(shape) + self.table(ids, exchange).view(shape)) * 2.0**-0.5


class PerLayerBlock(DefersNoSum):
    """A block on the residual stream, [T, H] -> [T, H]: a gate computed from it, times the layer's inputs, projected
    back."""

    def __init__(self, scope: Scope, spec: PerLayerEmbedding, site: Site) -> None:
        self.layer_id = site.layer_id
        self.gate = ReplicatedLinear(scope.sub("gate"))
        self.projection = ReplicatedLinear(scope.sub("projection"))
        self.activation = gate_of(scope, spec.activation)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        inputs = batch.step_cache[LAYER_INPUTS][:, self.layer_id]
        return self.projection(self.activation(torch.cat((self.gate(x), inputs), dim=-1)))
