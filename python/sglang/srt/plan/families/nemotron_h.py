"""Nemotron-H and Nemotron 3: layers of one block each, Mamba-2, attention without positions, MLPs or experts."""

from __future__ import annotations

from sglang.srt.configs.activation import RELU2
from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.mtp import NEMOTRON_MTP
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.weight_names import WeightMap

NEMOTRON_H = Family(
    title="Nemotron-H and Nemotron 3",
    model_types=("nemotron_h",),
    architectures=("NemotronHForCausalLM",),
    names=WeightMap(
        {"embed": "backbone.embeddings", "norm": "backbone.norm_f", "lm_head": "lm_head"},
        {
            "input_norm": "norm",
            "mlp_norm": "norm",
            "attn": "mixer",
            "attn.qkv": "mixer.{part}_proj",
            "attn.o": "mixer.o_proj",
            "ssm": "mixer",
            "ssm.in": "mixer.in_proj",
            "ssm.conv": "mixer.conv1d",
            "ssm.norm": "mixer.norm",
            "ssm.out": "mixer.out_proj",
            "mlp.gate_up": "mixer.{part}_proj",
            "mlp.down": "mixer.down_proj",
            "moe.router": "mixer.gate",
            "moe.correction": "mixer.gate",
            "moe.w13": "mixer.experts.{expert}.{part}_proj",
            "moe.w2": "mixer.experts.{expert}.{part}_proj",
            "moe.latent_in": "mixer.fc1_latent_proj",
            "moe.latent_out": "mixer.fc2_latent_proj",
            "moe.shared.gate_up": "mixer.shared_experts.{part}_proj",
            "moe.shared.down": "mixer.shared_experts.down_proj",
        },
        layer_prefix="backbone.layers.{layer}.",
        unread=("mtp.",),
    ),
    allowed={"mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",), "residual_in_fp32": (False,)},
    norm_eps="layer_norm_epsilon",
    one_block_layers=True,
    head_dim=128,
    positions=False,
    hybrid_kind="hybrid_mamba2",
    activation=RELU2,
    router=Router(0, "sigmoid", correction="e_score_correction_bias", float32=True),
    mtp=NEMOTRON_MTP,
)
