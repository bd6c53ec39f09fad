"""GLM-4 of 2025 and GLM-Z1, dense: norms before and after every block; half of a head rotates, neighbouring dims
together; gate and up are one tensor."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sglang.srt.plan.attention_parts import Biases
from sglang.srt.plan.families.attention import attention_by_layer, grouped_attention
from sglang.srt.plan.families.blocks import mlp
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.layer_spec import Sum
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MLP_NAMES, MODEL_NAMES, WeightMap

_NORMS_AFTER = {"input_norm_after": "post_self_attn_layernorm", "mlp_norm_after": "post_mlp_layernorm"}


def glm4(c: Config, qkv_bias: bool | None = None) -> Model:
    bias = c.default("attention_bias", bool, False) if qkv_bias is None else qkv_bias
    attention = partial(grouped_attention, biases=Biases(qkv=bias), is_neox_style=False)
    mixers = attention_by_layer(c, attention)
    return Model(c, layers_of(mixers, [mlp(c, joined=True)] * c.num_layers, Sum(norms_after=True)))


GLM4 = Family(
    title="GLM-4 of 2025 and GLM-Z1",
    model_types=("glm4",),
    architectures=("Glm4ForCausalLM",),
    read=glm4,
    names=WeightMap(
        MODEL_NAMES,
        {**ATTENTION_NAMES, **MLP_NAMES, **_NORMS_AFTER},
        parts={"gate": "gate_up", "up": "gate_up"},
    ),
)
GLM4V = replace(
    GLM4,
    title="GLM-4.1V and GLM-4.6V-Flash",
    model_types=("glm4v",),
    architectures=("Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration"),
    read=partial(glm4, qkv_bias=True),
    names=replace(GLM4.names.below("model.language_model."), unread=("model.visual.",)),
)
"""GLM-4.1V and GLM-4.6V-Flash."""
