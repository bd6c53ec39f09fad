"""MiMo-V2 to V2.6: window layers have other numbers of KV heads, and sinks; values are narrower than keys; a third of
a head rotates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.moe.spec import Router
from sglang.srt.configs.fused_projections import FUSED, LAYOUT, SPLIT, TP_BLOCKS
from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.drafts.mtp_by_layer.spec import MTPByLayer
from sglang.srt.errors import UserError
from sglang.srt.plan.attention_parts import Biases, Softmax, StoredQKV, Values
from sglang.srt.plan.families.attention import (
    FULL,
    WINDOWED,
    full_and_windowed,
    grouped_attention,
    layer_kinds,
    mixers_by_kind,
    with_window_heads,
)
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, flagged_layers, mlp, shared_experts
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.families.mtp import MTPLayerPerToken, MTPTensors, windowed_layers
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    CACHE_SCALE_ALIASES,
    EXPERT_NAMES,
    MLP_NAMES,
    MODEL_NAMES,
    WeightMap,
)


def mimo_v2(c: Config) -> Model:
    c.only("scoring_func", "sigmoid")
    c.only("topk_method", "noaux_tc")
    c.only(LAYOUT, SPLIT, FUSED)
    c.only("moe_router_dtype", "bfloat16", "float32")  # of the products; the sums are fp32 either way
    c.ignore("attention_chunk_size", "processor_config")  # the window's size once more; sizes of images
    c = c.renamed({"layernorm_epsilon": "rms_norm_eps"})
    kinds = layer_kinds(c)
    if c.values.get("layer_types") is None and c.values.get("hybrid_layer_pattern") is not None:
        kinds = [WINDOWED if windowed else FULL for windowed in c.flags("hybrid_layer_pattern")]
    mixers = mixers_by_kind(c, kinds, full_and_windowed(_attention))
    router = Router(0, "sigmoid", correction="e_score_correction_bias", exact_logits=True)
    blocks = ffn_by_layer(flagged_layers(c), lambda: mlp(c), lambda: experts(c, router, shared=shared_experts(c)))
    return Model(c, layers_of(mixers, blocks))


def _attention(c: Config, window: int) -> GQA:
    """Layers with a window have sinks, heads of their own (`swa_*`), and where the config does not say how many, twice
    the KV heads."""
    sinks = "add_swa_attention_sink_bias" if window else "add_full_attention_sink_bias"
    mixer = grouped_attention(
        with_window_heads(c) if window else c,
        window,
        biases=Biases(qkv=c.default("attention_bias", bool, False)),
        softmax=Softmax(sinks=c.default(sinks, bool, window > 0)),
        values=Values(scale=c.default("attention_value_scale", float, 1.0)),
    )
    return replace(mixer, stored=StoredQKV(_tp_blocks(c, mixer))) if _fuses_projections(c) else mixer


def _fuses_projections(c: Config) -> bool:
    """Returns whether the checkpoint has q, k and v as one tensor."""
    return c.values.get(LAYOUT) == FUSED


def _tp_blocks(c: Config, mixer: GQA) -> int:
    """Returns the number of TP blocks (`StoredQKV`) of a layer. `c`: the keys of layers without a window. Where
    neither config nor weights tell, assumes the form of the first published FP8 checkpoints, one block for each KV
    head. Raises UserError for a stated number that does not divide the heads."""
    if c.values.get(TP_BLOCKS) is None:
        tp_blocks = c.positive("num_key_value_heads", mixer.num_heads)
        return tp_blocks if mixer.num_kv_heads % tp_blocks == 0 else 1
    tp_blocks = c.positive(TP_BLOCKS)
    if mixer.num_kv_heads % tp_blocks:
        raise UserError(
            f"{c.source}: {TP_BLOCKS} {tp_blocks} does not divide the {mixer.num_kv_heads} KV heads of a layer."
        )
    return tp_blocks


def _draft_keys(keys: ConfigReader, first: int, used: int) -> dict[str, Any]:
    return windowed_layers(keys, first, used) | {"hybrid_layer_pattern": None, "moe_layer_freq": None}


_MTP = MTPLayerPerToken(
    tensors=MTPTensors(
        at="model.mtp.layers.",
        names={"fc": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": "final_layernorm"},
        layer_names={"mlp_norm": "pre_mlp_layernorm"},
    ),
    form=MTPByLayer(3),
    keys=_draft_keys,
)
"""Published configs do not say how many layers there are."""


MIMO_V2 = Family(
    title="MiMo-V2-Flash, MiMo-V2.5 and MiMo-V2.6",
    # Later checkpoints with the same layers, such as V2.5 and V2.6-Flash-RL, have the second name.
    model_types=("mimo_v2_flash", "mimo_v2"),
    architectures=("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
    read=mimo_v2,
    names=WeightMap(
        MODEL_NAMES,
        {**ATTENTION_NAMES, **MLP_NAMES, **EXPERT_NAMES},
        aliases=(*CACHE_SCALE_ALIASES, (".self_attn.attention_sink_bias", ".self_attn.sinks")),
        # V2.5 and V2.6 also have encoders of images and sound.
        unread=("model.mtp.", "visual.", "audio_encoder.", "speech_embeddings."),
    ),
    mtp=_MTP,
)
