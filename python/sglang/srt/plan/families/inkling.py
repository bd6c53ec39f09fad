"""Inkling, text: attention without rotation but with learned relative biases, windows in five of six layers, attention
temperature scaling; short convolutions over k, v and the output of every block; shared experts that the router weights;
a normed embedding, logits divided by a width."""

from __future__ import annotations

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.mtp import INKLING_MTP
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.weight_names import WeightMap

_ON: dict[str, tuple[object, ...]] = dict.fromkeys(
    ("shared_expert_sink", "norm_after_topk", "use_gate_bias", "use_global_scale", "use_sconv", "use_embed_norm"),
    (True,),
)


def _numbers(stored: str, ours: str) -> tuple[tuple[str, str], ...]:
    """Returns pairs of name endings (stored, ours) of the scales of NVFP4 weights."""
    names = {"scale": "weight_scale", "scale2": "weight_scale_2", "input_amax": "input_scale"}
    return tuple((f".mlp.experts.{stored}.{leaf}", f".mlp.experts.{ours}_{name}") for leaf, name in names.items())


INKLING = Family(
    title="Inkling",
    model_types=("inkling", "inkling_model", "inkling_mm_model"),
    architectures=("InklingForConditionalGeneration",),
    names=WeightMap(
        {
            "embed": "model.llm.embed",
            "embed_norm": "model.llm.embed_norm",
            "norm": "model.llm.norm",
            "lm_head": "model.llm.unembed",
        },
        {
            "input_norm": "attn_norm",
            "mlp_norm": "mlp_norm",
            "attn.qkv": "attn.{part}",
            "attn.relative": "attn.wr_du",
            "attn.profiles": "attn.rel_logits_proj",
            "attn.convolution": "attn.{own}_sconv",
            "attn.q_norm": "attn.q_norm",
            "attn.k_norm": "attn.k_norm",
            "attn": "attn",
            "attn.o": "attn.wo_ud",
            "mixer_convolution": "attn_sconv",
            "ffn_convolution": "mlp_sconv",
            "mlp": "mlp",
            "mlp.gate_up": "mlp.w13_dn",
            "mlp.down": "mlp.w2_md",
            "moe.router": "mlp.gate",
            "moe.correction": "mlp.gate",
            "moe.experts": "mlp.experts",
            "moe.shared.gate_up": "mlp.shared_experts.w13",
            "moe.shared.down": "mlp.shared_experts.w2",
        },
        layer_prefix="model.llm.layers.{layer}.",
        aliases=(
            *_numbers("w13_weight", "gate_up_proj"),
            *_numbers("w2_weight", "down_proj"),
            (".mlp.experts.w13_weight", ".mlp.experts.gate_up_proj"),
            (".mlp.experts.w2_weight", ".mlp.experts.down_proj"),
            (".shared_experts.shared_w13_weight", ".shared_experts.w13.weight"),
            (".shared_experts.shared_w2_weight", ".shared_experts.w2.weight"),
        ),
        ignore=(".original_shape",),
        decoder="model.llm.",
        parts={"q": "wq_du", "k": "wk_dv", "v": "wv_dv"},
        unread=("model.audio.", "model.visual.", "model.mtp."),
    ),
    allowed={"hidden_act": ("silu",), "gate_activation": ("sigmoid",), "tie_word_embeddings": (False,), **_ON},
    spellings={
        "sliding_window_size": "sliding_window",
        "route_scale": "routed_scaling_factor",
        "dense_mlp_idx": "first_k_dense_replace",
    },
    published={
        256: {"d_rel": 16, "rel_extent": 1024, "sliding_window_size": 512, "route_scale": 8.0, "n_shared_experts": 2}
    },
    embedding_norm=True,
    head_dim=128,
    window_kv_factor=2,
    qk_norm="head",
    qkv_bias=False,
    o_bias=False,
    positions=False,
    relative_biases=True,
    has_experts=True,
    expert_form="alternating",
    alternating_gate_up=True,
    scaled_mlp=True,
    shared_sinks=True,
    router=Router(0, "sigmoid", correction="bias", exact_logits=True, scaled=True),
    mtp=INKLING_MTP,
)
"""The text half of published checkpoints, which have an image encoder and embeddings of sounds."""
