"""A decoder-only language model, built from its description. Families differ in `describe` and `weights` only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from sglang.srt.distributed import parallel_state
from sglang.srt.layers.attention_block import GQAttention
from sglang.srt.layers.embedding import LMHead, VocabParallelEmbedding
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import QuantMethod, Unquantized
from sglang.srt.layers.mlp import Dense, GatedMLP
from sglang.srt.layers.moe.layer import MoELayer
from sglang.srt.layers.parameter import Param, Scope
from sglang.srt.layers.quantization.dense import QuantizedMethod
from sglang.srt.layers.quantization.layout import redundant_endings
from sglang.srt.layers.rotary_embedding import RopeSpec, rope_table
from sglang.srt.models.spec import LayerSpec, ModelSpec
from sglang.srt.models.weight_map import WeightMap

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.mem_cache.memory_pool import CacheStore
    from sglang.srt.plan.plan import Plan


class DecoderLayer:
    """The residual stream travels as (hidden, residual): what the last block added, and the sum before it."""

    def __init__(
        self, scope: Scope, layer_id: int, hidden_size: int, eps: float, spec: LayerSpec, cos_sin: torch.Tensor
    ) -> None:
        self.input_norm = RMSNorm(scope.sub("input_norm"), hidden_size, eps)
        self.attention = GQAttention(scope.sub("attn"), layer_id, hidden_size, spec.attention, eps, cos_sin)
        self.mlp_norm = RMSNorm(scope.sub("mlp_norm"), hidden_size, eps)
        self.mlp: GatedMLP | MoELayer
        if isinstance(spec.mlp, Dense):
            self.mlp = GatedMLP(scope.sub("mlp"), hidden_size, spec.mlp)
        else:
            self.mlp = MoELayer(scope.sub("moe"), hidden_size, spec.mlp)

    def __call__(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.input_norm(hidden, residual)
        hidden = self.attention(hidden, batch)
        hidden, residual = self.mlp_norm(hidden, residual)
        # Routing may look at the token ids, and at which rows are padding.
        hidden = self.mlp(hidden, batch) if isinstance(self.mlp, MoELayer) else self.mlp(hidden)
        return hidden, residual


class CausalLM(ABC):
    """Allocates its parameters when constructed; the loader fills `params`, the runner's pools `caches`.

    `model(batch)` -> hidden states [T, H] after the final norm; `model.logits(hidden [R, H])` -> [R, V] fp32. Both run
    under torch.inference_mode of the caller and are safe to capture in a CUDA graph.
    """

    weights: ClassVar[WeightMap]

    @staticmethod
    @abstractmethod
    def describe(model: ModelConfig) -> ModelSpec:
        """Read the family's keys; raises UserError for values that change the result and are not implemented."""

    def __init__(self, plan: Plan, device: torch.device | str | None = None) -> None:
        """`device` overrides the plan's: `meta` builds the shapes only."""
        self.spec = spec = self.describe(plan.model)
        quantization = plan.model.quantization
        quant: QuantMethod = Unquantized() if quantization is None else QuantizedMethod(quantization)
        scope = Scope(
            plan=plan,
            device=torch.device(device or plan.device),
            dtype=getattr(torch, plan.dtype),
            tp_rank=parallel_state.tp_rank(),
            tp_size=parallel_state.tp_size(),
            quant=quant,
            weights=self.weights,
        )
        self.params: dict[str, Param] = scope.params
        self.finish = scope.finish
        self.caches: list[CacheStore] = scope.caches
        self.redundant = redundant_endings(quantization)
        self.embed = VocabParallelEmbedding(scope.sub("embed"), spec.vocab_size, spec.hidden_size)
        tables: dict[RopeSpec, torch.Tensor] = {}
        self.layers: list[DecoderLayer] = []
        for i, layer in enumerate(spec.layers):
            rope = layer.attention.rope
            if rope not in tables:
                tables[rope] = rope_table(rope, plan.context_len, scope.device)
            layer_scope = scope.sub("layers").sub(i)
            self.layers.append(DecoderLayer(layer_scope, i, spec.hidden_size, spec.norm_eps, layer, tables[rope]))
        self.norm = RMSNorm(scope.sub("norm"), spec.hidden_size, spec.norm_eps)
        tied_to = self.embed if spec.tie_embeddings else None
        self.logits = LMHead(scope.sub("lm_head"), spec.vocab_size, spec.hidden_size, tied_to)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        hidden, residual = self.embed(batch.input_ids), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, batch)
        return self.norm(hidden, residual)[0]

    def ignored_weight(self, name: str) -> bool:
        """Whether a checkpoint tensor holds nothing that we need."""
        if self.spec.tie_embeddings and name == self.weights.model["lm_head"] + ".weight":
            return True
        return name.endswith((*self.weights.ignore, *self.redundant))
