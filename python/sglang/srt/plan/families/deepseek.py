"""DeepSeek V2 to V3.2, and models of the same form (Kimi K2, GLM-4.7-Flash, GLM-5): latent attention, experts in
groups.

From V3.2 and GLM-5 on an indexer selects the tokens that latent attention reads.
"""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.blocks.moe.spec import Router
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, mlp, shared_experts, sparse_layers
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.families.latent import indexed_layers, latent_attention
from sglang.srt.plan.families.mtp import EH_PROJ
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


def check_deepseek(c: Config) -> None:
    """Notes as problems what models of DeepSeek's form state and no layer here computes."""
    c.only("attention_bias", False)
    c.only("moe_layer_freq", 1)


def deepseek(c: Config, router: Router, indexer_is_neox_style: bool = True) -> Model:
    """Reads latent attention, over tokens that an indexer selects where the config has one, and experts."""
    check_deepseek(c)
    with_indexer, without = (
        latent_attention(c, has_indexer=flag, indexer_is_neox_style=indexer_is_neox_style) for flag in (True, False)
    )
    mixers = [with_indexer if has_indexer else without for has_indexer in indexed_layers(c)]
    blocks = ffn_by_layer(sparse_layers(c), lambda: mlp(c), lambda: experts(c, router, shared=shared_experts(c)))
    return Model(c, layers_of(mixers, blocks))


def deepseek_v2(c: Config) -> Model:
    c.only("topk_method", "greedy", "group_limited_greedy")
    c.only("scoring_func", "softmax")
    c.only("norm_topk_prob", False)
    return deepseek(c, Router(0, renormalize=False, exact_logits=True))


def deepseek_v3(c: Config, indexer_is_neox_style: bool = True) -> Model:
    c.only("topk_method", "noaux_tc")
    c.only("scoring_func", "sigmoid")
    router = Router(0, "sigmoid", correction="e_score_correction_bias", exact_logits=True)
    return deepseek(c, router, indexer_is_neox_style)


def glm_moe_dsa(c: Config) -> Model:
    c.only("moe_router_dtype", "float32")
    return deepseek_v3(c, indexer_is_neox_style=False)


DEEPSEEK_V2 = Family(
    title="DeepSeek V2",
    model_types=("deepseek_v2",),
    architectures=("DeepseekV2ForCausalLM",),
    read=deepseek_v2,
    names=NAMES,
)
DEEPSEEK_V3 = Family(
    title="DeepSeek V3 and R1, Kimi K2",
    model_types=("deepseek_v3", "kimi_k2"),
    architectures=("DeepseekV3ForCausalLM",),
    read=deepseek_v3,
    names=NAMES,
    mtp=EH_PROJ,
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    title="GLM-4.7-Flash",
    model_types=("glm4_moe_lite",),
    architectures=("Glm4MoeLiteForCausalLM",),
)
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    title="DeepSeek V3.2",
    model_types=("deepseek_v32",),
    architectures=("DeepseekV32ForCausalLM",),
)
GLM_MOE_DSA = replace(
    DEEPSEEK_V3,
    title="GLM-5 to GLM-5.3",
    model_types=("glm_moe_dsa",),
    architectures=("GlmMoeDsaForCausalLM",),
    read=glm_moe_dsa,
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
