"""dots3-note: latent attention of two shapes. Layers that see all tokens have an indexer; the others have a window, and
latents of their own size. Latents are scaled behind their norms, the rotary key is normed, and each head has a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.blocks.moe.spec import Router, Shared
from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.rope import by_layer_type
from sglang.srt.errors import UserError
from sglang.srt.plan.attention_parts import HeadGate, LatentNorms
from sglang.srt.plan.families.attention import BY_LAYER, FULL, WINDOWED, layer_kinds, mixers_by_kind
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, mlp
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.families.latent import SPARSE_NAMES, latent_attention
from sglang.srt.plan.families.mtp import EH_PROJ, windowed_layers
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    EXPERT_NAMES,
    LATENT_NAMES,
    MLP_NAMES,
    MODEL_NAMES,
    SHARED_NAMES,
    WeightMap,
)

_USUAL: Mapping[str, object] = {
    "first_k_dense_replace": 1,
    "moe_shared_expert_intermediate_size": 1536,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 8e7,
    "swa_rope_theta": 5e4,
}
_ONLY: Mapping[str, object] = {
    "apply_mla_qkv_lora_rescale": True,
    "attention_bias": False,
    "attention_gate_type": "headwise",
    "k_rope_only_layernorm": True,
    "mlp_bias": False,  # which the shared experts would have, too
    "qk_layernorm": True,
    "swa_attention_gate_type": "headwise",
    "topk_method": "noaux_tc",
    "use_dsa": True,
    "use_sliding_window": True,
}
_WINDOW_SIZES: Mapping[str, int] = {
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Sizes of layers with a window, under "swa_" and the name, and their values where the config leaves them out."""
_BY_LAYER = BY_LAYER | _WINDOW_SIZES.keys()


def dots3(c: Config) -> Model:
    c = c.renamed({"shared_experts_intermediate_size": "moe_shared_expert_intermediate_size"}).usual(_USUAL)
    for key, value in _ONLY.items():
        c.only(key, value)
    c.only("scoring_func", "sigmoid", "noaux_tc")  # of which the second one is the method of choice
    if not isinstance(c.values.get("moe_layer_freq"), list):
        c.only("moe_layer_freq", 1)
    c.ignore("moe_gating_fp32")  # logits are exact either way
    router = Router(0, "sigmoid", correction="e_score_correction_bias", exact_logits=True)
    shared = Shared(c.positive("n_shared_experts") * c.positive("moe_shared_expert_intermediate_size"))
    routed = c.with_values({"scoring_func": "sigmoid"})
    blocks = ffn_by_layer(_sparse(c), lambda: mlp(c), lambda: experts(routed, router, shared=shared))
    return Model(c, layers_of(mixers_by_kind(c, _kinds(c), _MAKERS, _BY_LAYER), blocks))


def _sparse(c: Config) -> list[bool]:
    """Returns whether each layer has experts: by `mlp_layer_types` alone where the config has it."""
    if c.values.get("mlp_layer_types") is not None:
        c.ignore("moe_layer_freq", "first_k_dense_replace")
        return [kind == "sparse" for kind in c.by_layer("mlp_layer_types", "sparse")]
    flags = c.flags("moe_layer_freq") if isinstance(c.values.get("moe_layer_freq"), list) else [True] * c.num_layers
    first = c.count("first_k_dense_replace")
    return [flag and i >= first for i, flag in enumerate(flags)]


def _kinds(c: Config) -> list[str]:
    """Returns the kind of each layer, by `layer_types` or else as in the published model."""
    if c.values.get("layer_types") is None:
        return [FULL if i < 2 or i % 4 == 1 else WINDOWED for i in range(c.num_layers)]
    kinds = layer_kinds(c)
    if FULL in kinds and c.values.get("per_layer_config") is not None and c.values.get("use_dsa") is None:
        c.problem(
            "'full_attention' beside 'per_layer_config' has no indexer, which is not supported; layers that have"
            " one are 'indexed_attention' in 'layer_types'."
        )
    return [FULL if kind in SPARSE_NAMES else kind for kind in kinds]


def _full(c: Config) -> MLA:
    if not c.count("index_topk"):
        raise UserError(f"{c.source}: layers without a window need 'index_topk'.")
    spec = _attention(c, _theta(c, SPARSE_NAMES | {FULL}, "rope_theta"))
    c.only("num_key_value_heads", spec.num_heads)
    return spec


def _windowed(c: Config) -> MLA:
    window = c.count("sliding_window", "sliding_window_size")
    if not window:
        raise UserError(f"{c.source}: layers with a window need 'sliding_window_size'.")
    sizes: dict[str, Any] = {"index_topk": None, **_theta(c, {WINDOWED}, "swa_rope_theta")}
    before = "swa_" if c.values.get("per_layer_config") is None else ""  # with it each layer's own are in place
    if before:
        sizes |= {key: c.count(f"swa_{key}") or usual for key, usual in _WINDOW_SIZES.items()}
    spec = _attention(c, sizes)
    c.only(f"{before}num_key_value_heads", spec.num_heads)
    c.only(f"{before}head_dim", spec.qk_dim)
    return replace(spec, window=window)


def _attention(c: Config, values: Mapping[str, Any]) -> MLA:
    c = c.with_values({"layer_types": None, **values})
    norms = LatentNorms(c.default("rms_norm_eps", float, 1e-5), scaled=True, rotary_key=True)
    return replace(latent_attention(c, indexer_is_neox_style=False), gate=HeadGate(), norms=norms)


def _theta(c: Config, kinds: frozenset[str] | set[str], key: str) -> dict[str, Any]:
    """Returns the rotary keys of layers of one of `kinds`: as `rope_parameters` state them by layer type, or else the
    base under `key`. All of the rotary key rotates, whatever its share of a head."""
    if not by_layer_type(c.values):
        for name in ("rope_parameters", "rope_scaling"):
            if c.values.get(name):
                c.problem(
                    f"{name!r} of all layers alike is not supported, as bases of layers with a window are others; write"
                    f" 'rope_parameters' by layer type: an object for {FULL!r} and one for {WINDOWED!r}."
                )
        return {"rope_theta": c.default(key, float, 0.0), "rope_parameters": None}
    written = c.require("rope_parameters", dict)
    stated = next((written[kind] for kind in written if kind in kinds), None)
    if stated is None:
        raise UserError(f"{c.source}: 'rope_parameters' has nothing for {', '.join(sorted(kinds))}.")
    return {"rope_parameters": {name: value for name, value in stated.items() if name != "partial_rotary_factor"}}


_MAKERS = {FULL: _full, WINDOWED: _windowed}


def _draft_keys(keys: ConfigReader) -> dict[str, Any]:
    """A layer with a window and without experts, whatever the number of draft tokens that configs state. Its sizes are
    those of the model's windows: of the last one's where the config states them by layer."""
    by_layer, kinds = keys.values.get("per_layer_config"), keys.default("layer_types", list, [])
    if by_layer is not None:
        last = max((i for i, kind in enumerate(kinds) if kind == WINDOWED), default=-1)
        by_layer = {"0": {int(layer): stated for layer, stated in by_layer.items()}.get(last, {})}
    return windowed_layers(keys, 0, 1) | {"per_layer_config": by_layer}


DOTS3 = Family(
    title="dots3-note",
    model_types=("dots3_note",),
    # Published as the first; the others are its name in descriptions, and that of transformers with encoders.
    architectures=("Dots3NoteForCausalLM", "Dot3NoteForCausalLM", "Dots3NoteForConditionalGeneration"),
    read=dots3,
    names=WeightMap(
        MODEL_NAMES,
        {
            **ATTENTION_NAMES,
            **LATENT_NAMES,
            "attn.head_gate": "self_attn.g_proj",
            "attn.k_rope_norm": "self_attn.k_rope_only_layernorm",
            **MLP_NAMES,
            **EXPERT_NAMES,
            **SHARED_NAMES,
        },
        unread=("model.mtp.", "vision_encoder.", "audio_encoder.", "audio_adapter."),
    ),
    mtp=replace(
        EH_PROJ,
        tensors=replace(EH_PROJ.tensors, embedding="model.mtp.embed_tokens"),
        keys=_draft_keys,
        counts=(),
        refused={"mtp_head_sharing": "none", "mtp_use_moe": True},
    ),
)
