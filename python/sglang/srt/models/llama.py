"""Llama 2 and 3 (and models published in their form)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sglang.srt.layers.mlp import Dense
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.models.spec import LayerSpec, ModelSpec, decoder, grouped_query_attention, reader
from sglang.srt.models.weight_map import WeightMap

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

# The names that most families share.
MODEL_NAMES = {"embed": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}
LAYER_NAMES = {
    "input_norm": "input_layernorm",
    "attn": "self_attn",
    "attn.qkv": "self_attn.{part}_proj",
    "attn.o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_up": "mlp.{part}_proj",
    "mlp.down": "mlp.down_proj",
}


class LlamaForCausalLM(CausalLM):
    weights: ClassVar[WeightMap] = WeightMap(MODEL_NAMES, LAYER_NAMES)

    @staticmethod
    def describe(model: ModelConfig) -> ModelSpec:
        mlp = Dense(model.intermediate_size, reader(model).default("mlp_bias", bool, False))
        layer = LayerSpec(grouped_query_attention(model, qk_norm=False), mlp)
        return decoder(model, [layer] * model.num_layers)
