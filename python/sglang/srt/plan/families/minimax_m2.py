"""MiniMax M2 to M2.7: norms over all of q and all of k, a part of each head rotates, experts are w1, w2, w3."""

from __future__ import annotations

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    MODEL_NAMES,
    QK_NORM_NAMES,
    W123_NAMES,
    W123_PARTS,
    WeightMap,
)

MINIMAX_M2 = Family(
    title="MiniMax M2 to M2.7",
    model_types=("minimax_m2",),
    architectures=("MiniMaxM2ForCausalLM",),
    names=WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **QK_NORM_NAMES, **W123_NAMES}, parts=W123_PARTS),
    allowed={
        "scoring_func": ("sigmoid",),
        "qk_norm_type": ("per_layer",),
        "use_routing_bias": (True,),
        "shared_intermediate_size": (0,),
    },
    qk_norm="whole",
    optional_qk_norm=True,
    has_experts=True,
    router=Router(0, "sigmoid", correction="e_score_correction_bias"),
)
