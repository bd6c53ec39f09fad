"""Muse-Glimmer, whose encoder `plan.towers.muse_glimmer` describes: windows with rotation and full attention without,
norms of heads without weights, an output gate with its own projection, norms around every block, a normed embedding,
scaled and softly capped logits."""

from __future__ import annotations

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.gemma3 import NORMS_AROUND
from sglang.srt.plan.layer_spec import Sum
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MLP_NAMES, MODEL_NAMES, WeightMap

_NAMES = WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **MLP_NAMES, **NORMS_AROUND}).below("model.language_model.")

MUSE_GLIMMER = Family(
    title="Muse-Glimmer",
    model_types=("muse_glimmer",),
    architectures=("MuseGlimmerForConditionalGeneration",),
    names=WeightMap(
        _NAMES.model,
        _NAMES.layer,
        _NAMES.layer_prefix,
        decoder=_NAMES.decoder,
        unread=("model.vision_tower.", "model.vision_adapter.", "model.vision_projection."),
    ),
    allowed={"tie_word_embeddings": (False,), "hidden_activation": ("silu",)},
    computed=("final_logit_softcapping", "qk_scale_factor", "output_multiplier"),
    published={
        0: {
            "head_dim": 128,
            "sliding_window": 2048,
            "final_logit_softcapping": 20.0,
            "qk_scale_factor": 3.87,
            "output_multiplier": 0.19611613513818404,
            "post_norm_eps": 1e-8,
        }
    },
    zero_centred_norms=True,
    plain_final_norm=True,
    normed_embedding=True,
    residual=Sum(norms_after=True, fp32_norms=True),
    qk_norm="unit",
    output_gate=True,
    gate_projection=True,
    window_pattern=4,
    positions_in_windows=True,
)
