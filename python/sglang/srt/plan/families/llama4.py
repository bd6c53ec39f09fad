"""Llama 4, whose encoder `towers.llama4.spec` describes. Some layers see chunks of the tokens and rotate heads; others
see all tokens, do not rotate, and have attention temperature scaling. One routed expert a token, whose input is
multiplied by its weight, and a shared expert."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.moe.spec import Router
from sglang.srt.errors import UserError
from sglang.srt.plan.attention_parts import AttentionTemperature, Unweighted
from sglang.srt.plan.families.attention import FULL, grouped_attention, rotating_layers
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, listed_layers, mlp, shared_experts, sparse_layers
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.masks import CAUSAL, Chunks
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MODEL_NAMES, WeightMap

_CHUNKED = "chunked_attention"
_USUAL = {
    "attention_chunk_size": 8192,
    "no_rope_layer_interval": 4,
    "attn_temperature_tuning": True,
    "attn_scale": 0.1,
    "floor_scale": 8192,
    "num_shared_experts": 1,
}
"""Values that published configs leave out."""


def llama4(c: Config) -> Model:
    c.only("hidden_act", "silu")
    c = c.usual(_USUAL)
    router = Router(0, "sigmoid", renormalize=False, scales_inputs=True)
    blocks = ffn_by_layer(
        _sparse_layers(c), lambda: mlp(c), lambda: experts(c, router, shared=shared_experts(c), form="columns")
    )
    return Model(c, layers_of(_mixers(c), blocks))


def _sparse_layers(c: Config) -> list[bool]:
    """Returns whether each layer has experts: those of `moe_layers`, or every `interleave_moe_layer_step`-th."""
    listed = c.values.get("moe_layers")
    if listed is not None and c.values.get("mlp_layer_types") is None:
        return listed_layers(c, "moe_layers", listed)
    step = 1 if listed is not None else c.positive("interleave_moe_layer_step", 1)
    return [here and (i + 1) % step == 0 for i, here in enumerate(sparse_layers(c))]


def _mixers(c: Config) -> list[GQA]:
    """Returns the attention of each layer. Layers that rotate heads see chunks of tokens unless `layer_types` say
    otherwise. The others see all tokens, and have no norms of heads but attention temperature scaling."""
    heads = partial(grouped_attention, c, head_dim=128, kv_heads=8, is_neox_style=False)
    rotating = heads(qk_norm=Unweighted() if c.default("use_qk_norm", bool, True) else None)
    others = heads(rotates=False, attn_temperature=_temperature(c))
    rotates = rotating_layers(c)
    kinds = c.default("layer_types", list, [_CHUNKED if here else FULL for here in rotates])[: c.num_layers]
    unknown = sorted({str(kind) for kind in kinds} - {_CHUNKED, FULL})
    if unknown or len(kinds) < c.num_layers:
        what = f"{', '.join(unknown)}" if unknown else f"of {len(kinds)} layers for {c.num_layers}"
        raise UserError(f"{c.source}: layer_types {what} are not described here yet.")
    size = c.positive("attention_chunk_size") if _CHUNKED in kinds else 0
    return [
        replace(rotating if here else others, mask=Chunks(size) if kind == _CHUNKED else CAUSAL)
        for here, kind in zip(rotates, kinds, strict=True)
    ]


def _temperature(c: Config) -> AttentionTemperature | None:
    """Configs of the first releases have a number where later ones have a flag."""
    if not c.values["attn_temperature_tuning"]:
        return None
    scale, length = c.default("attn_scale", float, 0.0), c.positive("floor_scale")
    return AttentionTemperature(scale, length, offset=1) if scale else None


LLAMA4_TEXT = Family(
    title="Llama 4",
    model_types=("llama4",),
    architectures=("Llama4ForCausalLM",),
    read=llama4,
    names=WeightMap(
        MODEL_NAMES,
        {
            **ATTENTION_NAMES,
            "mlp.gate_up": "feed_forward.{part}_proj",
            "mlp.down": "feed_forward.down_proj",
            "moe.router": "feed_forward.router",
            "moe.experts": "feed_forward.experts",
            "moe.w13": "feed_forward.experts.{expert}.{part}_proj",
            "moe.w2": "feed_forward.experts.{expert}.{part}_proj",
            "moe.shared.gate_up": "feed_forward.shared_expert.{part}_proj",
            "moe.shared.down": "feed_forward.shared_expert.down_proj",
        },
    ),
)
LLAMA4 = replace(
    LLAMA4_TEXT,
    architectures=("Llama4ForConditionalGeneration",),
    names=replace(
        LLAMA4_TEXT.names.below("language_model.model."),
        beginnings=(("language_model.lm_head.", "lm_head."),),
        unread=("vision_model.", "multi_modal_projector."),
    ),
)
"""The language model of published checkpoints, which have an image encoder."""
