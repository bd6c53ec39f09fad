"""Qwen3, dense and mixture of experts: norms on the q and k heads, whose size is independent of the hidden size."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sglang.srt.errors import UserError
from sglang.srt.layers.attention_block import GQA
from sglang.srt.layers.mlp import Dense
from sglang.srt.layers.moe.layer import MoE
from sglang.srt.layers.moe.topk import Router
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.models.llama import LAYER_NAMES, MODEL_NAMES
from sglang.srt.models.spec import LayerSpec, ModelSpec, decoder, expect, grouped_query_attention, reader
from sglang.srt.models.weight_map import WeightMap
from sglang.srt.plan.model_description import sparse_layers

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

QWEN3_LAYER_NAMES = LAYER_NAMES | {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}
EXPERT_NAMES = {
    "moe.router": "mlp.gate",
    "moe.w13": "mlp.experts.{expert}.{part}_proj",
    "moe.w2": "mlp.experts.{expert}.{part}_proj",
}


class Qwen3ForCausalLM(CausalLM):
    weights: ClassVar[WeightMap] = WeightMap(MODEL_NAMES, QWEN3_LAYER_NAMES)

    @staticmethod
    def describe(model: ModelConfig) -> ModelSpec:
        layer = LayerSpec(_attention(model), Dense(model.intermediate_size))
        return decoder(model, [layer] * model.num_layers)


class Qwen3MoeForCausalLM(CausalLM):
    weights: ClassVar[WeightMap] = WeightMap(MODEL_NAMES, QWEN3_LAYER_NAMES | EXPERT_NAMES)

    @staticmethod
    def describe(model: ModelConfig) -> ModelSpec:
        attention, dense = _attention(model), Dense(model.intermediate_size)
        experts = MoE(
            num_experts=model.num_experts,
            intermediate_size=model.moe_intermediate_size,
            router=Router(model.num_experts_per_tok, renormalize=reader(model).default("norm_topk_prob", bool, False)),
        )
        sparse = sparse_layers(reader(model), model.num_layers, True)
        return decoder(model, [LayerSpec(attention, experts if s else dense) for s in sparse])


def _attention(model: ModelConfig) -> GQA:
    expect(model, "use_sliding_window", False)
    kinds = set(reader(model).default("layer_types", list, []))
    if kinds - {"full_attention"}:
        raise UserError(
            f"{model.model_path}/config.json: layer_types {sorted(kinds)} are not supported, only full_attention."
        )
    return grouped_query_attention(model, qk_norm=True)
