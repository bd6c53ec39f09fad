"""MiniMax M3 and M3.1: grouped-query attention over selected blocks of tokens, Gemma's norms, a part of each head
rotates, experts are w1, w2, w3 with GPT-OSS's gate."""

from __future__ import annotations

from sglang.srt.configs.activation import GPT_OSS_SWIGLU
from sglang.srt.plan.config_blocks import BLOCK_CONFIG
from sglang.srt.plan.families.family import Family
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    BLOCK_INDEX_NAMES,
    MODEL_NAMES,
    QK_NORM_NAMES,
    W123_NAMES,
    W123_PARTS,
    WeightMap,
)

_LANGUAGE_MODEL = "language_model.model."
_NAMES = WeightMap(
    MODEL_NAMES,
    {
        **ATTENTION_NAMES,
        **QK_NORM_NAMES,
        **BLOCK_INDEX_NAMES,
        **W123_NAMES,
        "mlp.gate_up": "mlp.{own}_proj",
        "mlp.down": "mlp.down_proj",
        "moe.shared.gate_up": "block_sparse_moe.shared_experts.{own}_proj",
        "moe.shared.down": "block_sparse_moe.shared_experts.down_proj",
    },
    parts=W123_PARTS,
).below(_LANGUAGE_MODEL)

MINIMAX_M3 = Family(
    title="MiniMax M3 and M3.1",
    model_types=("minimax_m3_vl", "minimax_m3"),
    architectures=("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3SparseForCausalLM", "MiniMaxM3VLForCausalLM"),
    names=WeightMap(
        model={**_NAMES.model, "lm_head": "language_model.lm_head"},
        layer=_NAMES.layer,
        layer_prefix=_NAMES.layer_prefix,
        decoder=_NAMES.decoder,
        parts=_NAMES.parts,
        # Checkpoints with the language model alone have the names on the left.
        beginnings=(("model.", _LANGUAGE_MODEL), ("lm_head.", "language_model.lm_head.")),
        unread=(
            *("vision_tower.", "multi_modal_projector.", "patch_merge_mlp."),
            *("mtp.", "language_model.mtp.", f"{_LANGUAGE_MODEL}mtp."),
        ),
    ),
    allowed={
        "attention_output_gate": (False,),
        "hidden_act": ("swigluoai", "silu"),  # transformers writes silu for it
        "qk_norm_type": ("per_head",),
        "scoring_func": ("sigmoid",),
        "use_gemma_norm": (True,),
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
    },
    computed=(BLOCK_CONFIG,),
    zero_centred_norms=True,
    qk_norm="head",
    has_experts=True,
    router=Router(0, "sigmoid", correction="e_score_correction_bias", exact_logits=True),
    activation=GPT_OSS_SWIGLU,
)
