"""DeepSeek-V4: attention over a window and compressed entries, hyper-connections, first layers routed by token ids."""

from __future__ import annotations

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.mtp import V4_MTP
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.weight_names import W123_PARTS, WeightMap

LAYER_NAMES = {
    "input_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "attn_mix": "",
    "mlp_mix": "",
    "attn": "attn",
    "attn.q_a": "attn.wq_a",
    "attn.q_norm": "attn.q_norm",
    "attn.q_b": "attn.wq_b",
    "attn.kv": "attn.wkv",
    "attn.kv_norm": "attn.kv_norm",
    "attn.o_a": "attn.wo_a",
    "attn.o_b": "attn.wo_b",
    "attn.compressor": "attn.compressor.{part}",
    "attn.compressor.places": "attn.compressor",
    "attn.compressor.norm": "attn.compressor.norm",
    "attn.index_compressor": "attn.indexer.compressor.{part}",
    "attn.index_compressor.places": "attn.indexer.compressor",
    "attn.index_compressor.norm": "attn.indexer.compressor.norm",
    "attn.index_q": "attn.indexer.wq_b",
    "attn.index_weights": "attn.indexer.weights_proj",
    "moe.router": "ffn.gate",
    "moe.correction": "ffn.gate",
    "moe.hash": "ffn.gate",
    "moe.w13": "ffn.experts.{expert}.{part}",
    "moe.w2": "ffn.experts.{expert}.{part}",
    "moe.shared.gate_up": "ffn.shared_experts.{part}",
    "moe.shared.down": "ffn.shared_experts.w2",
}
NAMES = WeightMap(
    {"embed": "embed", "norm": "norm", "lm_head": "head", "head_mix": ""},
    LAYER_NAMES,
    layer_prefix="layers.{layer}.",
    # Exports that follow DeepSeek-V3 name the FP8 scales like it.
    aliases=((".weight_scale_inv", ".scale"),),
    decoder="",
    parts=W123_PARTS,
    behind=("hc_head_",),
    unread=("mtp.",),
)
"""Names of tensors as published, without a prefix. `mtp.` are layers that only drafts (such as DSpark's) use."""

USUAL = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "swiglu_limit": 10.0, "norm_topk_prob": True}

DEEPSEEK_V4 = Family(
    title="DeepSeek V4",
    # V4's FP8 exports use the second name.
    model_types=("deepseek_v4", "deepseek_ref"),
    architectures=("DeepseekV4ForCausalLM",),
    names=NAMES,
    allowed={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "hidden_act": ("silu",),
        "norm_topk_prob": (True,),
        "num_key_value_heads": (1,),
        "scoring_func": ("sqrtsoftplus",),
        "topk_method": ("noaux_tc",),
    },
    # The FP8 exports of Flash and Pro state little else than sizes.
    published={256: {**USUAL, "routed_scaling_factor": 1.5}, 384: {**USUAL, "routed_scaling_factor": 2.5}},
    compressed=True,
    has_experts=True,
    router=Router(0, "sqrtsoftplus", correction="bias", exact_logits=True),
    mtp=V4_MTP,
)
