"""Ling 3.0 (`bailing_hybrid`): in each group of layers all but the last are Kimi delta attention with full-rank
projections; the last is latent attention with a gate for each head. Experts are chosen in groups, and the activations
of the last layers are clamped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.blocks.mlp.spec import Dense
from sglang.srt.blocks.moe.spec import MoE, Router, Shared
from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.plan.attention_parts import HeadGate
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, mlp, sparse_layers
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.families.latent import latent_attention
from sglang.srt.plan.families.mtp import EH_PROJ, one_layer
from sglang.srt.plan.families.recurrent import kimi_delta
from sglang.srt.plan.layer_spec import Mixer
from sglang.srt.plan.weight_names import (
    EXPERT_NAMES,
    KIMI_DELTA_NAMES,
    LATENT_NAMES,
    MLP_NAMES,
    MODEL_NAMES,
    SHARED_NAMES,
    WeightMap,
)

_OWN_NAMES = {
    "kda_lower_bound": "linear_lower_bound",
    "num_attention_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "score_function": "scoring_func",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_ONLY: Mapping[str, object] = {
    "kda_safe_gate": True,
    "no_kda_lora": True,
    "moe_router_enable_expert_bias": True,
    "scale_router_input": False,
    "up_proj_norm": False,
    "use_bias": False,
    "use_kda_lora": False,
    "use_mla_nope": False,
    "use_nGPT": False,
    "use_qkv_bias": False,
    "value_norm": False,
    "gated_attention_proj_granularity_type": "head_wise",
    "hidden_act": "silu",
    "router_dtype": "fp32",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_UNUSED = ("group_norm_size", "linear_silu", "rotary_dim", "use_qk_norm")
"""Keys that no published code of the model reads for these layers. Queries and keys of Kimi delta attention are always
normed."""
_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


def ling3(c: Config) -> Model:
    c = c.renamed(_OWN_NAMES)
    for key, value in _ONLY.items():
        c.only(key, value)
    c.ignore(*_UNUSED)
    router = Router(0, "sigmoid", correction="expert_bias", exact_logits=True)
    blocks = ffn_by_layer(sparse_layers(c), lambda: mlp(c), lambda: experts(c, router, shared=_shared(c)))
    return Model(c, layers_of(_mixers(c), _with_limits(c, blocks)))


def _mixers(c: Config) -> list[Mixer]:
    """The last layer of each group, and all of an incomplete one at the end, are latent attention."""
    group, count = c.positive("layer_group_size"), c.num_layers
    whole_groups = count // group * group
    recurrent = [(i + 1) % group != 0 and i < whole_groups for i in range(count)]
    latent = replace(latent_attention(_whole_rotation(c)), gate=HeadGate())
    delta = replace(kimi_delta(c), full_rank=True) if any(recurrent) else latent
    return [delta if flag else latent for flag in recurrent]


def _whole_rotation(c: Config) -> Config:
    """Returns the config without the share of a head that rotates: it is the rotary key's, all of which rotates."""
    values: dict[str, Any] = {"partial_rotary_factor": None, "rotary_dim": None}
    for key in ("rope_parameters", "rope_scaling"):
        written = c.values.get(key)
        if isinstance(written, Mapping):
            values[key] = {name: value for name, value in written.items() if name != "partial_rotary_factor"}
    return c.with_values(values)


def _shared(c: Config) -> Shared | None:
    number = c.count("num_shared_experts")
    size = c.count("moe_shared_expert_intermediate_size") or c.positive("moe_intermediate_size")
    return Shared(number * size) if number else None


def _with_limits(c: Config, blocks: Sequence[Dense | MoE]) -> list[Dense | MoE]:
    """Returns the blocks with the limits of their activations, which only layers with experts have."""
    result: list[Dense | MoE] = []
    for block, routed, other in zip(blocks, *(_limits(c, key) for key in _LIMITS), strict=True):
        if isinstance(block, MoE):
            mine, shared = (
                replace(block.activation, limit=limit, limits_result=True) if limit else block.activation
                for limit in (routed, other)
            )
            of_shared = block.shared and replace(block.shared, activation=shared if shared != mine else None)
            block = replace(block, activation=mine, shared=of_shared)
        result.append(block)
    return result


def _limits(c: Config, key: str) -> list[float]:
    """Returns the limit of each layer; 0: none. Lists may end before the last layers. Raises UserError."""
    values = [value or 0.0 for value in c.default(key, list, [])]
    if any(isinstance(value, bool) or not isinstance(value, int | float) or value < 0 for value in values):
        raise UserError(f"{c.source}: {key!r} must be a list of numbers, one for each layer; got {values!r}.")
    return [float(value) for value in (*values, *[0.0] * c.num_layers)[: c.num_layers]]


def _draft_keys(keys: ConfigReader) -> dict[str, Any]:
    """One layer of latent attention with experts, whose entries in the lists of limits come after the others'."""
    behind = keys.positive("num_hidden_layers")
    return one_layer(keys) | {"layer_group_size": 1} | {key: keys.default(key, list, [])[behind:] for key in _LIMITS}


LING3 = Family(
    title="Ling 3.0",
    model_types=("bailing_hybrid",),
    architectures=("BailingMoeV3ForCausalLM",),
    read=ling3,
    names=WeightMap(
        {**MODEL_NAMES, "embed": "model.word_embeddings"},
        {
            "input_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "attn": "attention",
            "attn.o": "attention.dense",
            "attn.head_gate": "attention.g_proj",
            **{ours: name.replace("self_attn", "attention") for ours, name in LATENT_NAMES.items()},
            **{ours: name.replace("self_attn", "attention") for ours, name in KIMI_DELTA_NAMES.items()},
            **MLP_NAMES,
            **EXPERT_NAMES,
            **SHARED_NAMES,
        },
    ),
    mtp=replace(EH_PROJ, keys=_draft_keys),
)
