"""Step-3.5 and 3.7: window layers have more heads than the others; a gate for each head, norms stored minus 1, and
activations with limits in the last layers."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.mtp import STEP_MTP
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MLP_NAMES, MODEL_NAMES, QK_NORM_NAMES, WeightMap

STEP3P5 = Family(
    title="Step-3.5",
    model_types=("step3p5",),
    architectures=("Step3p5ForCausalLM",),
    names=WeightMap(
        MODEL_NAMES,
        {
            **ATTENTION_NAMES,
            **QK_NORM_NAMES,
            "attn.head_gate": "self_attn.g_proj",
            **MLP_NAMES,
            "moe.router": "moe.gate",
            "moe.correction": "moe",
            "moe.w13": "moe.{part}_proj",
            "moe.w2": "moe.{part}_proj",
            "moe.shared.gate_up": "share_expert.{part}_proj",
            "moe.shared.down": "share_expert.down_proj",
        },
    ),
    allowed={
        "use_head_wise_attn_gate": (True,),
        "use_qk_norm": (True,),
        "use_moe": (True,),
        "use_moe_router_bias": (True,),
        "moe_router_activation": ("sigmoid",),
        "zero_centered": (True,),
        "sink": (False,),
        "use_bidirectional_attention": (False,),
    },
    computed=("query_pre_attn_scalar",),
    spellings={
        "num_attention_groups": "num_key_value_heads",
        "num_sliding_attention_heads": "swa_num_attention_heads",
        "moe_num_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
        "share_expert_dims": "share_expert_dim",
        "norm_expert_weight": "norm_topk_prob",
        "moe_router_scaling_factor": "routed_scaling_factor",
    },
    zero_centred_norms=True,
    head_dim=128,
    qk_norm="head",
    head_gate=True,
    o_bias=False,
    has_experts=True,
    router=Router(0, "sigmoid", correction="router_bias", exact_logits=True),
    expert_form="by_matrix",
    mtp=STEP_MTP,
)
STEP3P7 = replace(
    STEP3P5,
    title="Step-3.7",
    model_types=("step3p7",),
    architectures=("Step3p7ForConditionalGeneration",),
    names=replace(STEP3P5.names, unread=("vision_model.", "vit_large_projector.")),
)
"""The text half of a checkpoint with an image encoder."""
