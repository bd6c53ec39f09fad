"""DeepSeek V2 to V3.2, and models of the same form (Kimi K2, GLM-4.7-Flash, GLM-5): latent attention, experts in
groups.

From V3.2 and GLM-5 on an indexer selects the tokens that latent attention reads.
"""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.mtp import EH_PROJ
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    EXPERT_NAMES,
    LATENT_NAMES,
    MLP_NAMES,
    MODEL_NAMES,
    SHARED_NAMES,
    WeightMap,
)

NAMES = WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **LATENT_NAMES, **MLP_NAMES, **EXPERT_NAMES, **SHARED_NAMES})
COMPUTED = {"attention_bias": (False,), "moe_layer_freq": (1,)}

DEEPSEEK_V2 = Family(
    title="DeepSeek V2",
    model_types=("deepseek_v2",),
    architectures=("DeepseekV2ForCausalLM",),
    names=NAMES,
    allowed={
        **COMPUTED,
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": ("softmax",),
        "norm_topk_prob": (False,),
    },
    has_experts=True,
    router=Router(0, renormalize=False, exact_logits=True),
)
DEEPSEEK_V3 = Family(
    title="DeepSeek V3 and R1, Kimi K2",
    model_types=("deepseek_v3", "kimi_k2"),
    architectures=("DeepseekV3ForCausalLM",),
    names=NAMES,
    allowed={**COMPUTED, "topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
    has_experts=True,
    router=Router(0, "sigmoid", correction="e_score_correction_bias", exact_logits=True),
    mtp=EH_PROJ,
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3, title="GLM-4.7-Flash", model_types=("glm4_moe_lite",), architectures=("Glm4MoeLiteForCausalLM",)
)
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3, title="DeepSeek V3.2", model_types=("deepseek_v32",), architectures=("DeepseekV32ForCausalLM",)
)
GLM_MOE_DSA = replace(
    DEEPSEEK_V3,
    title="GLM-5, GLM-5.1 and GLM-5.2",
    model_types=("glm_moe_dsa",),
    architectures=("GlmMoeDsaForCausalLM",),
    allowed={**DEEPSEEK_V3.allowed, "moe_router_dtype": ("float32",)},
    indexer_is_neox_style=False,
)
_IN_KIMI = NAMES.below("language_model.model.")
KIMI_K25 = replace(
    DEEPSEEK_V3,
    title="Kimi K2.5 to K2.7",
    model_types=("kimi_k25",),
    architectures=("KimiK25ForConditionalGeneration",),
    names=replace(
        _IN_KIMI,
        model={**_IN_KIMI.model, "lm_head": "language_model.lm_head"},
        unread=("vision_tower.", "mm_projector."),
    ),
)
"""The language model of Kimi K2.5 and later."""
