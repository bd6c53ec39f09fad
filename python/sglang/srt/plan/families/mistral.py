"""Mistral and Mixtral: every layer has a window where the config names one; Mixtral's experts are w1, w2, w3. Ministral
3 and Devstral 2: attention temperature scaling. Mistral 4: latent attention and experts in DeepSeek's form, chosen by a
softmax over all of them, and attention temperature scaling."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from sglang.srt.blocks.moe.spec import Router
from sglang.srt.plan.families.attention import (
    FULL,
    WINDOWED,
    attention_by_layer,
    grouped_attention,
    temperature_scaling,
)
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, mlp, shared_experts, sparse_layers
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.deepseek import NAMES as LATENT_MODEL
from sglang.srt.plan.families.deepseek import check_deepseek
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.families.latent import latent_attention
from sglang.srt.plan.layer_spec import Mixer
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MLP_NAMES, MODEL_NAMES, W123_NAMES, W123_PARTS, WeightMap


def mistral(c: Config) -> Model:
    return Model(c, layers_of(_mixers(c), [mlp(c)] * c.num_layers))


def _mixers(c: Config, **facts: Any) -> list[Mixer]:
    """Every layer has a window where the config names one."""
    usual = WINDOWED if c.count("sliding_window") else FULL
    return attention_by_layer(c, partial(grouped_attention, kv_heads=8, **facts), usual)


def mixtral(c: Config) -> Model:
    return Model(c, layers_of(_mixers(c), [experts(c, Router(0))] * c.num_layers))


def ministral3(c: Config) -> Model:
    temperature, rotary = temperature_scaling(c)
    return Model(c, layers_of(_mixers(c, rotary=rotary, attn_temperature=temperature), [mlp(c)] * c.num_layers))


def mistral3(c: Config) -> Model:
    c.only("model_type", "mistral", "ministral3")
    return ministral3(c)


def mistral4(c: Config) -> Model:
    check_deepseek(c)
    c.only("n_group", 1)
    mixer = latent_attention(c, temperature=True)
    blocks = ffn_by_layer(
        sparse_layers(c),
        lambda: mlp(c),
        lambda: experts(c, Router(0), shared=shared_experts(c), form="stacked"),
    )
    return Model(c, layers_of([mixer] * c.num_layers, blocks))


MISTRAL = Family(
    title="Mistral",
    model_types=("mistral",),
    architectures=("MistralForCausalLM",),
    read=mistral,
    names=WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **MLP_NAMES}),
)
MIXTRAL = Family(
    title="Mixtral",
    model_types=("mixtral",),
    architectures=("MixtralForCausalLM",),
    read=mixtral,
    names=WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **W123_NAMES}, parts=W123_PARTS),
)
MINISTRAL3 = replace(
    MISTRAL,
    title="Mistral Small 3, Ministral 3 and Devstral 2",
    model_types=("ministral3",),
    architectures=("Ministral3ForCausalLM",),
    read=ministral3,
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
    read=mistral3,
    names=_beside_an_encoder(MINISTRAL3.names),
)
"""The text half of checkpoints with an image encoder, of Mistral Small 3 and of Ministral 3."""

MISTRAL4 = Family(
    title="Mistral 4",
    model_types=("mistral4",),
    architectures=("Mistral4ForCausalLM",),
    read=mistral4,
    names=replace(LATENT_MODEL, layer={**LATENT_MODEL.layer, "moe.experts": "mlp.experts"}),
)
MISTRAL4_TEXT = replace(
    MISTRAL4,
    architectures=("Mistral3ForConditionalGeneration",),
    names=_beside_an_encoder(MISTRAL4.names),
)
"""The text half of Mistral Small 4, which has an image encoder like Mistral Small 3's."""
