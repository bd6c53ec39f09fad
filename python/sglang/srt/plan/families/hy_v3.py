"""Hy3: norms on the q and k heads, sigmoid routing with a correction bias, a shared expert."""

from __future__ import annotations

from functools import partial

from sglang.srt.blocks.moe.spec import Router
from sglang.srt.plan.attention_parts import PerHead
from sglang.srt.plan.families.attention import attention_by_layer, grouped_attention
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, mlp, shared_experts, sparse_layers
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.families.mtp import EH_PROJ, MTPPass, MTPTensors
from sglang.srt.plan.weight_names import ATTENTION_NAMES, EXPERT_NAMES, MLP_NAMES, MODEL_NAMES, QK_NORM_NAMES, WeightMap


def hy_v3(c: Config) -> Model:
    c.only("moe_router_use_sigmoid", True)
    c.only("moe_router_enable_expert_bias", True)
    c.only("qk_norm", True)
    c.only("use_cla", False)
    c = c.renamed(
        {
            "router_scaling_factor": "routed_scaling_factor",
            "route_norm": "norm_topk_prob",
            "expert_hidden_dim": "moe_intermediate_size",
        }
    )
    attention = partial(grouped_attention, qk_norm=PerHead())
    router = Router(0, "sigmoid", scale=2.826, correction="expert_bias", exact_logits=True)
    blocks = ffn_by_layer(sparse_layers(c), lambda: mlp(c), lambda: experts(c, router, shared=shared_experts(c)))
    return Model(c, layers_of(attention_by_layer(c, attention), blocks))


_MTP = MTPPass(
    tensors=MTPTensors(
        names={**EH_PROJ.tensors.names, "norm": "final_layernorm"}, unread=("embed_tokens.", "shared_head.")
    )
)


HY_V3 = Family(
    title="Hy3",
    model_types=("hy_v3",),
    architectures=("HYV3ForCausalLM",),
    read=hy_v3,
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
        modules=(("mlp.shared_experts.", "mlp.shared_mlp."),),
    ),
    mtp=_MTP,
)
