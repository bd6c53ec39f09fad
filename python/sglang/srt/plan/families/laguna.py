"""Laguna: windows and full attention with different numbers of heads, a softplus gate for each head, sigmoid
routing."""

from __future__ import annotations

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    EXPERT_NAMES,
    MLP_NAMES,
    MODEL_NAMES,
    QK_NORM_NAMES,
    WeightMap,
)

LAGUNA = Family(
    title="Laguna",
    model_types=("laguna",),
    architectures=("LagunaForCausalLM",),
    names=WeightMap(
        MODEL_NAMES,
        {
            **ATTENTION_NAMES,
            **QK_NORM_NAMES,
            "attn.head_gate": "self_attn.g_proj",
            **MLP_NAMES,
            **EXPERT_NAMES,
            "moe.correction": "mlp.experts",
            "moe.shared.gate_up": "mlp.shared_expert.{part}_proj",
            "moe.shared.down": "mlp.shared_expert.down_proj",
        },
    ),
    # A gate for each element, or weights on the experts' inputs, would need other blocks.
    allowed={
        "gating": (True, "per-head"),
        "moe_apply_router_weight_on_input": (False,),
        "moe_router_logit_softcapping": (0, 0.0),
        "attention_bias": (False,),
    },
    spellings={
        "shared_expert_intermediate_size": "share_expert_dim",
        "moe_routed_scaling_factor": "routed_scaling_factor",
    },
    head_dim=128,
    qk_norm="head",
    head_gate=True,
    softplus_gates=True,
    first_dense=1,
    has_experts=True,
    router=Router(0, "sigmoid", correction="e_score_correction_bias", exact_logits=True),
)
