"""Llama 2 and 3 (and models published in their form)."""

from __future__ import annotations

from sglang.srt.plan.families.attention import attention_by_layer, grouped_attention
from sglang.srt.plan.families.blocks import mlp
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MLP_NAMES, MODEL_NAMES, WeightMap


def llama(c: Config) -> Model:
    mixers = attention_by_layer(c, grouped_attention)
    return Model(c, layers_of(mixers, [mlp(c)] * c.num_layers))


LLAMA = Family(
    title="Llama 2 and 3",
    model_types=("llama",),
    architectures=("LlamaForCausalLM",),
    read=llama,
    names=WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **MLP_NAMES}),
)
