"""GLM-4.5, 4.6 and 4.7: norms on the q and k heads, half of a head rotates, a shared expert beside routed ones."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.mtp import EH_PROJ
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    EXPERT_NAMES,
    MLP_NAMES,
    MODEL_NAMES,
    QK_NORM_NAMES,
    SHARED_NAMES,
    WeightMap,
)

GLM4_MOE = Family(
    title="GLM-4.5 to GLM-4.7",
    model_types=("glm4_moe",),
    architectures=("Glm4MoeForCausalLM",),
    names=WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **QK_NORM_NAMES, **MLP_NAMES, **EXPERT_NAMES, **SHARED_NAMES}),
    allowed={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    qk_norm="head",
    optional_qk_norm=True,
    o_bias=False,
    has_experts=True,
    router=Router(0, "sigmoid", correction="e_score_correction_bias", exact_logits=True),
    mtp=EH_PROJ,
)
GLM4V_MOE = replace(
    GLM4_MOE,
    title="GLM-4.5V and GLM-4.6V",
    model_types=("glm4v_moe",),
    architectures=("Glm4vMoeForConditionalGeneration", "Glm46VForConditionalGeneration"),
    names=replace(GLM4_MOE.names.below("model.language_model."), unread=("model.visual.",)),
    allowed={**GLM4_MOE.allowed, "use_qk_norm": (False,)},
    qk_norm="",
    mtp=None,
)
"""GLM-4.5V and 4.6V: the size of GLM-4.5-Air, without norms on the heads."""
