"""MiniMax M2 to M2.7: norms over all of q and all of k, a part of each head rotates, experts are w1, w2, w3."""

from __future__ import annotations

from functools import partial

from sglang.srt.blocks.moe.spec import Router
from sglang.srt.plan.attention_parts import Whole
from sglang.srt.plan.families.attention import attention_by_layer, grouped_attention
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, flagged_layers, mlp
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MODEL_NAMES, QK_NORM_NAMES, W123_NAMES, W123_PARTS, WeightMap


def minimax_m2(c: Config) -> Model:
    c.only("scoring_func", "sigmoid")
    c.only("qk_norm_type", "per_layer")
    c.only("use_routing_bias", True)
    c.only("shared_intermediate_size", 0)
    qk_norm = Whole() if c.default("use_qk_norm", bool, True) else None
    mixers = attention_by_layer(c, partial(grouped_attention, qk_norm=qk_norm))
    router = Router(0, "sigmoid", correction="e_score_correction_bias")
    blocks = ffn_by_layer(flagged_layers(c), lambda: mlp(c), lambda: experts(c, router))
    return Model(c, layers_of(mixers, blocks))


MINIMAX_M2 = Family(
    title="MiniMax M2 to M2.7",
    model_types=("minimax_m2",),
    architectures=("MiniMaxM2ForCausalLM",),
    read=minimax_m2,
    names=WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **QK_NORM_NAMES, **W123_NAMES}, parts=W123_PARTS),
)
