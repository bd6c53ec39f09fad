"""Hy3: norms on the q and k heads, sigmoid routing with a correction bias, a shared expert."""

from __future__ import annotations

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.mtp import HY_MTP
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    EXPERT_NAMES,
    MLP_NAMES,
    MODEL_NAMES,
    QK_NORM_NAMES,
    WeightMap,
)

HY_V3 = Family(
    title="Hy3",
    model_types=("hy_v3",),
    architectures=("HYV3ForCausalLM",),
    names=WeightMap(
        MODEL_NAMES,
        {
            **ATTENTION_NAMES,
            **QK_NORM_NAMES,
            **MLP_NAMES,
            **EXPERT_NAMES,
            "moe.router": "mlp.router.gate",
            "moe.correction": "mlp",
            "moe.shared.gate_up": "mlp.shared_mlp.{part}_proj",
            "moe.shared.down": "mlp.shared_mlp.down_proj",
        },
    ),
    allowed={
        "moe_router_use_sigmoid": (True,),
        "moe_router_enable_expert_bias": (True,),
        "qk_norm": (True,),
        "use_cla": (False,),
    },
    spellings={
        "router_scaling_factor": "routed_scaling_factor",
        "route_norm": "norm_topk_prob",
        "expert_hidden_dim": "moe_intermediate_size",
    },
    qk_norm="head",
    has_experts=True,
    router=Router(0, "sigmoid", scale=2.826, correction="expert_bias", exact_logits=True),
    mtp=HY_MTP,
)
