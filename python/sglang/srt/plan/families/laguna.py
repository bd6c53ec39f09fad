"""Laguna: windows and full attention with different numbers of heads, a softplus gate for each head, sigmoid
routing."""

from __future__ import annotations

from functools import partial

from sglang.srt.blocks.moe.spec import Router, Shared
from sglang.srt.plan.attention_parts import HeadGate, PerHead
from sglang.srt.plan.families.attention import attention_by_layer, grouped_attention
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, mlp, sparse_layers
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.weight_names import ATTENTION_NAMES, EXPERT_NAMES, MLP_NAMES, MODEL_NAMES, QK_NORM_NAMES, WeightMap


def laguna(c: Config) -> Model:
    # A gate for each element, or weights on the experts' inputs, would need other blocks.
    c.only("gating", True, "per-head")
    c.only("moe_apply_router_weight_on_input", False)
    c.only("moe_router_logit_softcapping", 0, 0.0)
    c.only("attention_bias", False)
    # The number of heads differs by layer: `num_attention_heads_per_layer`.
    attention = partial(grouped_attention, head_dim=128, qk_norm=PerHead(), gate=HeadGate(softplus=True))
    mixers = attention_by_layer(c, attention)
    router = Router(
        0,
        "sigmoid",
        scale=c.default("moe_routed_scaling_factor", float, 1.0),
        correction="e_score_correction_bias",
        exact_logits=True,
    )
    shared = Shared(c.positive("shared_expert_intermediate_size"))
    blocks = ffn_by_layer(sparse_layers(c, first_dense=1), lambda: mlp(c), lambda: experts(c, router, shared=shared))
    return Model(c, layers_of(mixers, blocks))


LAGUNA = Family(
    title="Laguna",
    model_types=("laguna",),
    architectures=("LagunaForCausalLM",),
    read=laguna,
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
        modules=(("mlp.shared_experts.", "mlp.shared_expert."),),
    ),
)
