"""GPT-OSS: attention sinks, windows in every other layer, biases everywhere, a clamped gate, experts as one tensor."""

from __future__ import annotations

from functools import partial

from sglang.srt.blocks.moe.spec import Router
from sglang.srt.configs.activation import GPT_OSS_SWIGLU
from sglang.srt.plan.attention_parts import Softmax
from sglang.srt.plan.families.attention import (
    WINDOWED,
    full_and_windowed,
    grouped_attention,
    kinds_by_pattern,
    mixers_by_kind,
)
from sglang.srt.plan.families.blocks import activation, experts
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MODEL_NAMES, WeightMap


def gpt_oss(c: Config) -> Model:
    c.only("hidden_act", "silu")
    attention = partial(grouped_attention, head_dim=64, softmax=Softmax(sinks=True))
    mixers = mixers_by_kind(c, kinds_by_pattern(c, "sliding_window_pattern", 2, WINDOWED), full_and_windowed(attention))
    block = experts(c, Router(0, bias=True), activation(c, GPT_OSS_SWIGLU), bias=True, form="gpt_oss")
    return Model(c, layers_of(mixers, [block] * c.num_layers))


GPT_OSS = Family(
    title="GPT-OSS",
    model_types=("gpt_oss",),
    architectures=("GptOssForCausalLM",),
    read=gpt_oss,
    names=WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, "moe.router": "mlp.router", "moe.experts": "mlp.experts"}),
)
