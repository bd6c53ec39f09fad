"""MiMo-V2: window layers have other numbers of KV heads, and sinks; values are narrower than keys; a third of a head
rotates."""

from __future__ import annotations

from sglang.srt.configs.fused_projections import FUSED, LAYOUT, SPLIT
from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.mtp import MIMO_V2_MTP
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    CACHE_SCALE_ALIASES,
    EXPERT_NAMES,
    MLP_NAMES,
    MODEL_NAMES,
    WeightMap,
)

MIMO_V2 = Family(
    title="MiMo-V2-Flash and MiMo-V2.5",
    # Later checkpoints with the same layers, such as V2.5 and V2.5-Pro, have the second name.
    model_types=("mimo_v2_flash", "mimo_v2"),
    architectures=("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
    names=WeightMap(
        MODEL_NAMES,
        {**ATTENTION_NAMES, **MLP_NAMES, **EXPERT_NAMES},
        aliases=(*CACHE_SCALE_ALIASES, (".self_attn.attention_sink_bias", ".self_attn.sinks")),
        # V2.5 also has encoders of images and sound.
        unread=("model.mtp.", "visual.", "audio_encoder.", "speech_embeddings."),
    ),
    allowed={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), LAYOUT: (SPLIT, FUSED)},
    spellings={"layernorm_epsilon": "rms_norm_eps"},
    window_sinks=True,
    window_kv_factor=2,
    o_bias=False,
    has_experts=True,
    router=Router(0, "sigmoid", correction="e_score_correction_bias", exact_logits=True),
    mtp=MIMO_V2_MTP,
)
