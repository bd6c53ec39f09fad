"""Qwen 2, 2.5 and 2.5-VL, dense and MoE: q, k and v have biases, the shared expert has a gate."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sglang.srt.blocks.moe.spec import Router
from sglang.srt.drafts.eagle.spec import Projected
from sglang.srt.plan.attention_parts import Biases
from sglang.srt.plan.families.attention import attention_by_layer, check_windows, grouped_attention
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, gated_shared_expert, mlp, sparse_layers
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.families.mtp import MTPPass, MTPTensors
from sglang.srt.plan.layer_spec import Mixer
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    EXPERT_NAMES,
    GATED_SHARED_NAMES,
    MLP_NAMES,
    MODEL_NAMES,
    WeightMap,
)

_LAYER = {**ATTENTION_NAMES, **MLP_NAMES}


def qwen2(c: Config) -> Model:
    return Model(c, layers_of(_mixers(c), [mlp(c)] * c.num_layers))


def mimo(c: Config) -> Model:
    c.only("use_mrope", False)
    return qwen2(c)


def qwen2_moe(c: Config) -> Model:
    c.only("qkv_bias", True)
    router = Router(0, renormalize=False)  # norm_topk_prob says otherwise in those that do
    blocks = ffn_by_layer(sparse_layers(c), lambda: mlp(c), lambda: experts(c, router, shared=gated_shared_expert(c)))
    return Model(c, layers_of(_mixers(c), blocks))


def _mixers(c: Config) -> list[Mixer]:
    check_windows(c)
    attention = partial(grouped_attention, biases=Biases(qkv=True))
    return attention_by_layer(c, attention)


QWEN2 = Family(
    title="Qwen2 and Qwen2.5",
    model_types=("qwen2",),
    architectures=("Qwen2ForCausalLM",),
    read=qwen2,
    names=WeightMap(MODEL_NAMES, _LAYER),
)
_MIMO_MTP = MTPPass(
    tensors=MTPTensors(
        at="model.mtp_layers.0.",
        names={
            "fc": "input_proj",
            "embedding_norm": "token_layernorm",
            "hidden_norm": "hidden_layernorm",
            "norm": "final_layernorm",
        },
    ),
    form=lambda residual: Projected(hidden_first=True, zero_first=True),
)


MIMO = replace(
    QWEN2,
    title="MiMo-7B",
    model_types=("mimo",),
    architectures=("MiMoForCausalLM",),
    read=mimo,
    names=replace(QWEN2.names, unread=("model.mtp_layers.",)),
    mtp=_MIMO_MTP,
)
"""MiMo-7B: Qwen 2 with a layer for multi-token prediction."""
QWEN2_MOE = Family(
    title="Qwen2 and Qwen2.5",
    model_types=("qwen2_moe",),
    architectures=("Qwen2MoeForCausalLM",),
    read=qwen2_moe,
    names=WeightMap(MODEL_NAMES, {**_LAYER, **EXPERT_NAMES, **GATED_SHARED_NAMES}),
)
_NEWER = "model.language_model."
QWEN2_5_VL = replace(
    QWEN2,
    title="Qwen2.5-VL",
    model_types=("qwen2_5_vl",),
    architectures=("Qwen2_5_VLForConditionalGeneration",),
    names=replace(
        QWEN2.names.below(_NEWER),
        unread=("model.visual.",),
        # Published checkpoints have the names on the left; newer transformers write those on the right.
        beginnings=(
            ("visual.", "model.visual."),
            *((f"model.{name}.", f"{_NEWER}{name}.") for name in ("layers", "embed_tokens", "norm")),
        ),
    ),
)
