"""Mistral and Mixtral: every layer has a window where the config names one; Mixtral's experts are w1, w2, w3. Ministral
3 and Devstral 2: attention temperature scaling. Mistral 4: latent attention and experts in DeepSeek's form, chosen by a
softmax over all of them, and attention temperature scaling."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.plan.families.deepseek import COMPUTED
from sglang.srt.plan.families.deepseek import NAMES as LATENT_MODEL
from sglang.srt.plan.families.family import Family
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    MLP_NAMES,
    MODEL_NAMES,
    W123_NAMES,
    W123_PARTS,
    WeightMap,
)

MISTRAL = Family(
    title="Mistral",
    model_types=("mistral",),
    architectures=("MistralForCausalLM",),
    names=WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **MLP_NAMES}),
    num_kv_heads=8,
    windows_everywhere=True,
)
MIXTRAL = Family(
    title="Mixtral",
    model_types=("mixtral",),
    architectures=("MixtralForCausalLM",),
    names=WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **W123_NAMES}, parts=W123_PARTS),
    num_kv_heads=8,
    windows_everywhere=True,
    has_experts=True,
)
MINISTRAL3 = replace(
    MISTRAL,
    title="Mistral Small 3, Ministral 3 and Devstral 2",
    model_types=("ministral3",),
    architectures=("Ministral3ForCausalLM",),
    attn_temperature_scaling=True,
)


def _beside_an_encoder(names: WeightMap) -> WeightMap:
    """Returns the names for a checkpoint that also has an image encoder, which is not loaded."""
    return replace(
        names.below("language_model.model."),
        beginnings=(("language_model.lm_head.", "lm_head."),),
        unread=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    )


MISTRAL3 = replace(
    MINISTRAL3,
    title="Mistral Small 3, Ministral 3 and Devstral 2",
    model_types=(),
    architectures=("Mistral3ForConditionalGeneration",),
    allowed={"model_type": ("mistral", "ministral3")},
    names=_beside_an_encoder(MINISTRAL3.names),
)
"""The text half of checkpoints with an image encoder, of Mistral Small 3 and of Ministral 3."""

MISTRAL4 = Family(
    title="Mistral 4",
    model_types=("mistral4",),
    architectures=("Mistral4ForCausalLM",),
    names=replace(LATENT_MODEL, layer={**LATENT_MODEL.layer, "moe.experts": "mlp.experts"}),
    allowed={**COMPUTED, "n_group": (1,)},
    has_experts=True,
    expert_form="stacked",
    router=Router(0),
    attn_temperature_scaling=True,
)
MISTRAL4_TEXT = replace(
    MISTRAL4,
    architectures=("Mistral3ForConditionalGeneration",),
    names=_beside_an_encoder(MISTRAL4.names),
)
"""The text half of Mistral Small 4, which has an image encoder like Mistral Small 3's."""
