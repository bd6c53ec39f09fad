"""GLM-5.3-Flash (`glm5_next`): three of four layers are Kimi delta attention, every fourth is latent attention without
positions over runs of tokens that an indexer selects by pooled keys; four streams with hyper-connections."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.mtp import GLM5_NEXT_MTP
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.layer_spec import HyperConnections
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    EXPERT_NAMES,
    KIMI_DELTA_NAMES,
    LATENT_NAMES,
    MLP_NAMES,
    MODEL_NAMES,
    SHARED_NAMES,
    WeightMap,
)

_NAMES = WeightMap(
    MODEL_NAMES,
    {
        **ATTENTION_NAMES,
        **LATENT_NAMES,
        **KIMI_DELTA_NAMES,
        **MLP_NAMES,
        **EXPERT_NAMES,
        **SHARED_NAMES,
        "attn.index_pool": "self_attn.indexer",
        "attn_mix": "",
        "mlp_mix": "",
    },
)
_BELOW = _NAMES.below("model.language_model.")

GLM5_NEXT = Family(
    title="GLM-5.3-Flash",
    model_types=("glm5_next",),
    architectures=("Glm5NextForConditionalGeneration",),
    names=replace(_BELOW, unread=("model.visual.",)),
    allowed={
        "attention_bias": (False,),
        "hidden_act": ("silu",),
        "mhc": (True,),
        "mla_use_nope": (True,),
        "moe_layer_freq": (1,),
        "moe_router_dtype": ("float32",),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    computed=("linear_attn_config",),
    residual=HyperConnections(4, mean_head=True),
    kimi_delta=True,
    decay_bound=-5.0,
    pooled_index=True,
    positions=False,
    has_experts=True,
    router=Router(0, "sigmoid", correction="e_score_correction_bias", exact_logits=True),
    mtp=GLM5_NEXT_MTP,
)
