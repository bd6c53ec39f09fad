"""GLM-4.5, 4.6 and 4.7: norms on the q and k heads, half of a head rotates, a shared expert beside routed ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sglang.srt.blocks.moe.spec import Router
from sglang.srt.plan.attention_parts import Biases, PerHead
from sglang.srt.plan.families.attention import attention_by_layer, grouped_attention
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, mlp, shared_experts, sparse_layers
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.families.mtp import EH_PROJ
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    EXPERT_NAMES,
    MLP_NAMES,
    MODEL_NAMES,
    QK_NORM_NAMES,
    SHARED_NAMES,
    WeightMap,
)


def glm4_moe(c: Config) -> Model:
    c.only("scoring_func", "sigmoid")
    c.only("topk_method", "noaux_tc")
    attention = partial(
        grouped_attention,
        qk_norm=PerHead() if c.default("use_qk_norm", bool, True) else None,
        biases=Biases(qkv=c.default("attention_bias", bool, False)),
    )
    router = Router(0, "sigmoid", correction="e_score_correction_bias", exact_logits=True)
    blocks = ffn_by_layer(sparse_layers(c), lambda: mlp(c), lambda: experts(c, router, shared=shared_experts(c)))
    return Model(c, layers_of(attention_by_layer(c, attention), blocks))


GLM4_MOE = Family(
    title="GLM-4.5 to GLM-4.7",
    model_types=("glm4_moe",),
    architectures=("Glm4MoeForCausalLM",),
    read=glm4_moe,
    names=WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **QK_NORM_NAMES, **MLP_NAMES, **EXPERT_NAMES, **SHARED_NAMES}),
    mtp=EH_PROJ,
)


def glm4v_moe(c: Config) -> Model:
    """The models that read images have no norms on heads."""
    c.only("use_qk_norm", False)
    return glm4_moe(c.with_values({"use_qk_norm": False}))


GLM4V_MOE = replace(
    GLM4_MOE,
    title="GLM-4.5V and GLM-4.6V",
    model_types=("glm4v_moe",),
    architectures=("Glm4vMoeForConditionalGeneration", "Glm46VForConditionalGeneration"),
    read=glm4v_moe,
    names=replace(GLM4_MOE.names.below("model.language_model."), unread=("model.visual.",)),
    mtp=None,
)
"""GLM-4.5V and 4.6V: the size of GLM-4.5-Air, without norms on the heads."""
