"""What one rank holds of a model's weights, derived of the description once: needs, bytes, stages and the layers
themselves take it from here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.configs.quant_scheme import expert_share
from sglang.srt.plan.layer_spec import Matrix, Weights
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.ranks import RankLayout


@dataclass(frozen=True, slots=True)
class RankWeights:
    """`layers`: of the blocks of each layer, as many as there is room for. `head`: of the output head, also where the
    embedding is one."""

    model: ModelDescription
    ranks: RankLayout
    layers: tuple[Weights, ...]
    head: Matrix

    def matrix(self, layer: int, name: str) -> Matrix:
        """Of the module that the family's WeightMap has by this name."""
        for part in self.layers[layer]:
            if isinstance(part, Matrix) and part.name == name:
                return part
        raise KeyError(f"the description of layer {layer} has no weights {name!r}")

    def matrices(self) -> Iterator[tuple[Matrix, ModuleQuant | None]]:
        """Of all layers, with the scheme of each."""
        for i, weights in enumerate(self.layers):
            for part in weights:
                if isinstance(part, Matrix):
                    yield part, self.model.quant_of(i, part)

    def of_stage(self, stage: ModelDescription) -> RankWeights:
        """Of a part of the model, whose other layers are elsewhere."""
        kept = zip(self.layers, stage.layers, strict=True)
        return replace(self, model=stage, layers=tuple(() if layer.elsewhere else weights for weights, layer in kept))


def rank_weights(model: ModelDescription, ranks: RankLayout) -> RankWeights:
    """Raises UserError where the experts cannot be divided."""
    hidden, rows = model.hidden_size, expert_rows(model, ranks)
    layers = tuple(layer.weights(hidden, ranks, rows) for layer in model.layers)
    return RankWeights(model, ranks, layers, Matrix("lm_head", ("",), -(-model.vocab_size // ranks.tp_size), hidden))


def expert_rows(model: ModelDescription, ranks: RankLayout) -> int:
    """Intermediate dims of each of its routed experts that a rank has room for; 0 without experts. Raises UserError."""
    if model.experts is None:
        return 0
    quant = model.expert_quant
    return expert_share(model.experts.intermediate_size, ranks.expert_tp_size, quant.format if quant else None)
