"""Kimi Linear: three of four layers are Kimi delta attention, every fourth latent attention without positions."""

from __future__ import annotations

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    KIMI_DELTA_NAMES,
    LATENT_NAMES,
    MODEL_NAMES,
    W123_NAMES,
    W123_PARTS,
    WeightMap,
)

KIMI_LINEAR = Family(
    title="Kimi Linear",
    model_types=("kimi_linear",),
    architectures=("KimiLinearForCausalLM",),
    names=WeightMap(
        MODEL_NAMES,
        {
            **ATTENTION_NAMES,
            **LATENT_NAMES,
            **KIMI_DELTA_NAMES,
            **W123_NAMES,
            "moe.correction": "block_sparse_moe.gate",
            "mlp.gate_up": "mlp.{own}_proj",
            "mlp.down": "mlp.down_proj",
            "moe.shared.gate_up": "block_sparse_moe.shared_experts.{own}_proj",
            "moe.shared.down": "block_sparse_moe.shared_experts.down_proj",
        },
        parts=W123_PARTS,
    ),
    allowed={
        "attention_bias": (False,),
        "hidden_act": ("silu",),
        "mla_use_nope": (True,),
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    computed=("linear_attn_config",),
    spellings={
        "moe_renormalize": "norm_topk_prob",
        "moe_router_activation_func": "scoring_func",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
    },
    kimi_delta=True,
    positions=False,
    has_experts=True,
    router=Router(0, "sigmoid", correction="e_score_correction_bias", exact_logits=True),
)
