"""SmolLM3: Llama's layers, of which every fourth rotates no heads; only such layers may have a window."""

from __future__ import annotations

from functools import partial

from sglang.srt.plan.families.attention import (
    FULL,
    WINDOWED,
    attention_by_layer,
    grouped_attention,
    layer_kinds,
    rotating_layers,
)
from sglang.srt.plan.families.blocks import mlp
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MLP_NAMES, MODEL_NAMES, WeightMap


def smollm3(c: Config) -> Model:
    c = c.usual({"rope_theta": 2e6, "no_rope_layer_interval": 4, "tie_word_embeddings": True})
    rotates = rotating_layers(c)
    if c.default("use_sliding_window", bool, False) and c.count("sliding_window"):
        c = c.usual({"layer_types": [FULL if here else WINDOWED for here in rotates]})
    elif WINDOWED in layer_kinds(c):
        c.only("use_sliding_window", True)  # the reference's attention kernels disagree about windows without it
    rotating, unrotating = (
        attention_by_layer(c, partial(grouped_attention, rotates=rotated)) for rotated in (True, False)
    )
    mixers = [rotating[i] if here else unrotating[i] for i, here in enumerate(rotates)]
    return Model(c, layers_of(mixers, [mlp(c)] * c.num_layers))


SMOLLM3 = Family(
    title="SmolLM3",
    model_types=("smollm3",),
    architectures=("SmolLM3ForCausalLM",),
    read=smollm3,
    names=WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **MLP_NAMES}),
)
