"""Mistral and Mixtral: every layer has a window where the config names one; experts of Mixtral are w1, w2, w3.
Ministral 3 and Devstral 2: queries grow with their position."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    CACHE_SCALE_ALIASES,
    MLP_NAMES,
    MODEL_NAMES,
    W123_NAMES,
    W123_PARTS,
    WeightMap,
)

MISTRAL = Family(
    model_types=("mistral",),
    architectures=("MistralForCausalLM",),
    names=WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **MLP_NAMES}),
    num_kv_heads=8,
    windows_everywhere=True,
)
MIXTRAL = Family(
    model_types=("mixtral",),
    architectures=("MixtralForCausalLM",),
    names=WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **W123_NAMES}, parts=W123_PARTS),
    num_kv_heads=8,
    windows_everywhere=True,
    has_experts=True,
)
_FP8_ALIASES = ((".weight_scale_inv", ".weight_scale"), (".activation_scale", ".input_scale"))
"""Names of the numbers of FP8 weights with one scale, as transformers writes them."""
MINISTRAL3 = replace(
    MISTRAL,
    model_types=("ministral3",),
    architectures=("Ministral3ForCausalLM",),
    names=replace(MISTRAL.names, aliases=(*CACHE_SCALE_ALIASES, *_FP8_ALIASES)),
    growing_queries=True,
)

MISTRAL3 = replace(
    MINISTRAL3,
    model_types=(),
    architectures=("Mistral3ForConditionalGeneration",),
    allowed={"model_type": ("mistral", "ministral3")},
    names=replace(
        MINISTRAL3.names.below("language_model.model."),
        beginnings=(("language_model.lm_head.", "lm_head."),),
        unread=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    ),
)
"""The text half of checkpoints with an image encoder, of Mistral Small 3 and of Ministral 3."""
