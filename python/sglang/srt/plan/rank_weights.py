"""The weights of a model that one rank holds, derived from the description once. Needs, bytes, stages and the layers
themselves use them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from sglang.srt.blocks.moe.spec import MoE
from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.configs.quant_scheme import expert_share
from sglang.srt.plan.equal_layers import of_each
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.weight_spec import Matrix, Weights


@dataclass(frozen=True, slots=True)
class RankWeights:
    """The weights of one rank. `layers`: those of each layer's blocks, in the sizes that the rank allocates. `head`:
    the output head, also where it is tied to the embedding. `front`: weights that a draft has besides its layers."""

    model: ModelDescription
    ranks: RankLayout
    layers: tuple[Weights, ...]
    head: Matrix
    front: Weights = ()

    def matrix(self, layer: int, name: str) -> Matrix:
        """Returns the matrix that the family's WeightMap calls `name`. Raises KeyError."""
        for part in self.layers[layer]:
            if isinstance(part, Matrix) and part.name == name:
                return part
        raise KeyError(f"the description of layer {layer} has no weights {name!r}")

    def matrices(self) -> Iterator[tuple[Matrix, ModuleQuant | None]]:
        """Yields the matrices of all layers, each with its quantization (None: 16 bits)."""
        yield from ((matrix, quant) for matrix, quant, _ in self.matrices_of_layers())

    def matrices_of_layers(self) -> Iterator[tuple[Matrix, ModuleQuant | None, MoE | None]]:
        """Yields the same, each with the routed experts of its layer; None: it has none."""
        yield from ((part, None, None) for part in self.front if isinstance(part, Matrix))
        for i, (weights, layer) in enumerate(zip(self.layers, self.model.layers, strict=True)):
            for part in weights:
                if isinstance(part, Matrix):
                    yield part, self.model.quant_of(i, part), layer.ffn.experts

    def select_stage(self, stage: ModelDescription) -> RankWeights:
        """Returns the weights of one pipeline stage. `stage`: the model with only that stage's layers."""
        kept = zip(self.layers, stage.layers, strict=True)
        return replace(
            self, model=stage, layers=tuple(() if layer.on_other_stage else weights for weights, layer in kept)
        )


def rank_weights(model: ModelDescription, ranks: RankLayout) -> RankWeights:
    """Computes the weights of a rank. Raises UserError where the experts cannot be divided."""
    hidden, rows = model.hidden_size, partial(expert_rows, model, ranks)
    layers = tuple(of_each(model.layers, lambda layer: layer.weights(hidden, ranks, rows(layer.ffn.experts))))
    return RankWeights(
        model, ranks, layers, Matrix("lm_head", ("",), -(-model.vocab_size // ranks.vocab_tp_size), hidden)
    )


def expert_rows(model: ModelDescription, ranks: RankLayout, experts: MoE | None) -> int:
    """Returns the intermediate dims of one of a layer's `experts` for which a rank has room; 0 without experts. Raises
    UserError."""
    if experts is None:
        return 0
    quant = model.expert_quant
    return expert_share(experts.intermediate_size, ranks.expert_tp_size, quant.format if quant else None)
