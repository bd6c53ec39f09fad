"""Step-3.5 and 3.7: window layers have more heads than the others; a gate for each head, norms stored minus 1, and
activations with limits in the last layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.mlp.spec import Dense
from sglang.srt.blocks.moe.spec import MoE, Router, Shared
from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.drafts.mtp_by_layer.spec import MTPByLayer
from sglang.srt.errors import UserError
from sglang.srt.plan.attention_parts import Biases, HeadGate, PerHead, Softmax
from sglang.srt.plan.families.attention import attention_by_layer, grouped_attention
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, listed_layers, mlp, sparse_layers
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, StoredNorms, layers_of
from sglang.srt.plan.families.mtp import MTPLayerPerToken, MTPTensors, windowed_layers
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MLP_NAMES, MODEL_NAMES, QK_NORM_NAMES, WeightMap

_OWN_NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "norm_expert_weight": "norm_topk_prob",
    "moe_router_scaling_factor": "routed_scaling_factor",
}
_ON = ("use_head_wise_attn_gate", "use_qk_norm", "use_moe", "use_moe_router_bias", "zero_centered")


def step3(c: Config) -> Model:
    for key in _ON:
        c.only(key, True)
    c.only("moe_router_activation", "sigmoid")
    c.only("sink", False)
    c.only("use_bidirectional_attention", False)
    c = c.renamed(_OWN_NAMES)
    mixers = attention_by_layer(c, _attention)
    router = Router(0, "sigmoid", correction="router_bias", exact_logits=True)
    width = c.count("share_expert_dims", "share_expert_dim")
    blocks = ffn_by_layer(
        _sparse_layers(c),
        lambda: mlp(c),
        lambda: experts(c, router, shared=Shared(width) if width else None, form="by_matrix"),
    )
    return Model(c, layers_of(mixers, _with_limits(c, blocks)), norms=StoredNorms(zero_centred=True))


def _attention(c: Config, window: int) -> GQA:
    """Layers with a window have other heads: those of `attention_other_setting`."""
    scalar = c.default("query_pre_attn_scalar", float, 0.0)
    return grouped_attention(
        _window_heads(c) if window else c,
        window,
        head_dim=128,
        softmax=Softmax(scalar**-0.5 if scalar else 0.0),
        qk_norm=PerHead(fp32=True),
        biases=Biases(qkv=c.default("attention_bias", bool, False)),
        gate=HeadGate(),
    )


def _window_heads(c: Config) -> Config:
    other = ConfigReader(c.default("attention_other_setting", dict, {}), c.source)
    stated = {
        "num_attention_heads": other.values.get("num_attention_heads") or c.values.get("num_sliding_attention_heads"),
        "num_key_value_heads": other.values.get("num_attention_groups") or other.values.get("num_key_value_heads"),
        "head_dim": other.values.get("head_dim"),
    }
    return c.with_values({key: value for key, value in stated.items() if value is not None})


def _sparse_layers(c: Config) -> list[bool]:
    """Returns whether each layer has experts: those of `moe_layers_enum`, "3,4,5" or a list of numbers."""
    listed = c.values.get("moe_layers_enum")
    if listed is None or c.values.get("mlp_layer_types") is not None:
        return sparse_layers(c)
    return listed_layers(c, "moe_layers_enum", listed)


def _with_limits(c: Config, ffns: Sequence[Dense | MoE]) -> list[Dense | MoE]:
    """Returns the feed-forward blocks with the limits of their activations: `swiglu_limits` for routed experts,
    `swiglu_limits_shared` for shared experts and MLPs. Both lists have an entry a layer; null and 0 mean no limit."""
    result: list[Dense | MoE] = []
    limits = zip(ffns, _limits(c, "swiglu_limits"), _limits(c, "swiglu_limits_shared"), strict=True)
    for ffn, of_routed, of_other in limits:
        mine, other = (
            replace(ffn.activation, limit=limit, limits_result=True) if limit else ffn.activation
            for limit in (of_routed, of_other)
        )
        if isinstance(ffn, Dense):  # the family itself made these blocks, of two kinds
            result.append(replace(ffn, activation=other))
            continue
        shared = ffn.shared and replace(ffn.shared, activation=other if other != mine else None)
        result.append(replace(ffn, activation=mine, shared=shared))
    return result


def _limits(c: Config, key: str) -> list[float]:
    values = c.default(key, list, []) or [0] * c.num_layers
    limits = [0.0 if value is None else value for value in values]
    if len(limits) < c.num_layers or any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in limits):
        raise UserError(f"{c.source}: {key!r} must be a list of numbers, one for each of {c.num_layers} layers.")
    if wrong := [limit for limit in limits if not limit >= 0]:
        c.problem(f"{key} has {wrong[0]!r}; a limit is positive, or 0 for none.")
    return [float(limit) for limit in limits[: c.num_layers]]


def _draft_keys(keys: ConfigReader, first: int, used: int) -> dict[str, Any]:
    """Returns the config's keys as they apply to the draft layers, whose entries in lists of limits come last."""
    listed = {key: keys.default(key, list, []) for key in ("swiglu_limits", "swiglu_limits_shared")}
    limits = {key: (values[first : first + used] + [0.0] * used)[:used] for key, values in listed.items() if values}
    return windowed_layers(keys, first, used) | limits | {"moe_layers_enum": None, "per_layer_config": None}


_MTP = MTPLayerPerToken(
    tensors=MTPTensors(
        names={
            "fc": "eh_proj",
            "embedding_norm": "enorm",
            "hidden_norm": "hnorm",
            "norm": "transformer.shared_head.norm",
        },
        unread=("transformer.shared_head.output.", "embed_tokens."),
    ),
    form=MTPByLayer(3, chained=True),
    keys=_draft_keys,
)
"""Layers behind the last one."""


STEP3P5 = Family(
    title="Step-3.5",
    model_types=("step3p5",),
    architectures=("Step3p5ForCausalLM",),
    read=step3,
    names=WeightMap(
        MODEL_NAMES,
        {
            **ATTENTION_NAMES,
            **QK_NORM_NAMES,
            "attn.head_gate": "self_attn.g_proj",
            **MLP_NAMES,
            "moe.router": "moe.gate",
            "moe.correction": "moe",
            "moe.w13": "moe.{part}_proj",
            "moe.w2": "moe.{part}_proj",
            "moe.shared.gate_up": "share_expert.{part}_proj",
            "moe.shared.down": "share_expert.down_proj",
        },
        modules=(("mlp.shared_experts.", "share_expert."),),
    ),
    mtp=_MTP,
)
STEP3P7 = replace(
    STEP3P5,
    title="Step-3.7",
    model_types=("step3p7",),
    architectures=("Step3p7ForConditionalGeneration",),
    names=replace(STEP3P5.names, unread=("vision_model.", "vit_large_projector.")),
)
"""The text half of a checkpoint with an image encoder."""
