"""Qwen3.8-Flash-Next (`qwen4_exp`): three of four layers are gated delta nets, every fourth attends to blocks of tokens
that an indexer selects; four gated residual streams, to which embeddings of n-grams are added."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.mtp import QWEN4_MTP
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    EXPERT_NAMES,
    GATED_SHARED_NAMES,
    QK_NORM_NAMES,
    RECURRENT_NAMES,
    WeightMap,
)

_STREAMS = {
    "attn_mix.norm": "attn_hyper_connection.hc_norm",
    "attn_mix.gates": "attn_hyper_connection.{part}",
    "attn_mix.up": "attn_hyper_connection.input_mix_weight_up",
    "mlp_mix.norm": "mlp_hyper_connection.hc_norm",
    "mlp_mix.gates": "mlp_hyper_connection.{part}",
    "mlp_mix.up": "mlp_hyper_connection.input_mix_weight_up",
}
_INDEX = {
    "attn.index_qk": "self_attn.indexer.index_qk_proj",
    "attn.index_q_norm": "self_attn.indexer.q_layernorm",
    "attn.index_k_norm": "self_attn.indexer.k_layernorm",
}
_NGRAMS = {
    "ngrams": "ple.ple_embedding",
    "ngrams.table": "ple.ple_embedding.ngram_embedding.{part}",
    "ngrams.scale": "ple.ple_embedding.ngram_embedding",
    "ngrams.project": "ple.{part}_proj",
    "ngrams.key_norm": "ple.norm_key",
    "ngrams.query_norm": "ple.norm_query",
    "ngrams.conv_norm": "ple.norm_conv",
    "ngrams.conv": "ple.conv1d",
}
_LAYER = {**ATTENTION_NAMES, **QK_NORM_NAMES, **RECURRENT_NAMES, **EXPERT_NAMES, **GATED_SHARED_NAMES}
_MIXER = "model.hyper_connection_mixer"
_NAMES = WeightMap(
    {
        "embed": "model.embed_tokens",
        "norm": f"{_MIXER}.hc_norm",
        "head_mix.gates": f"{_MIXER}.{{part}}",
        "head_mix.up": f"{_MIXER}.input_mix_weight_up",
        "lm_head": "lm_head",
    },
    {**_LAYER, **_STREAMS, **_INDEX, **_NGRAMS, "moe.experts": "mlp.experts"},
    behind=(f"{_MIXER}.",),
    unread=("mtp.",),
)

QWEN4_EXP_TEXT = Family(
    title="Qwen3.8-Flash-Next",
    model_types=("qwen4_exp", "qwen3_8_flash_next"),
    architectures=("Qwen4ExpForCausalLM",),
    names=_NAMES,
    # Activations of the recurrent layers' convolutions are computed as SiLU.
    allowed={
        "hidden_act": ("silu",),
        "output_gate_type": ("silu", "sigmoid"),
        "indexer_kv_heads": (1,),
        "ple_embedding_dtype": ("bfloat16", "float16", "float32", "float8_e4m3fn"),
    },
    qk_norm="head",
    zero_centred_norms=True,
    output_gate=True,
    head_dim=256,
    num_kv_heads=2,
    recurrent_pattern=4,
    hybrid_kind="hybrid_gdn",
    sigmoid_output_gates=True,
    pooled_index=True,
    has_experts=True,
    router=Router(0),
    mtp=QWEN4_MTP,
)
QWEN4_EXP = replace(
    QWEN4_EXP_TEXT,
    model_types=(),
    architectures=("Qwen4ExpForConditionalGeneration", "Qwen3_8_FlashNextForConditionalGeneration"),
    names=replace(
        _NAMES.below("model.language_model."),
        behind=("model.language_model.hyper_connection_mixer.",),
        unread=("mtp.", "model.visual."),
    ),
    expert_form="stacked",
)
"""The text half of a checkpoint with an image encoder."""
