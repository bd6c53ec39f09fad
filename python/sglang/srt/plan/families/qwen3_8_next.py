"""Qwen3.8-Flash-Next (`qwen4_exp`): three of four layers are gated delta nets, every fourth attends to blocks of tokens
that an indexer selects; four gated residual streams, to which embeddings of n-grams are added."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from sglang.srt.blocks.gated_delta.spec import GatedDelta
from sglang.srt.blocks.gated_streams.spec import GatedStreams
from sglang.srt.blocks.mla.spec import Indexer
from sglang.srt.blocks.moe.spec import Router
from sglang.srt.blocks.ngram_embedding.spec import NgramEmbedding
from sglang.srt.blocks.pooled_sparse.spec import PooledSparse
from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.drafts.form import Form
from sglang.srt.drafts.mtp.spec import Streamed
from sglang.srt.errors import UserError
from sglang.srt.plan.attention_parts import ElementGate, PerHead
from sglang.srt.plan.families.attention import FULL, RECURRENT, grouped_attention, kinds_by_pattern, mixers_by_kind
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, gated_shared_expert, mlp, sparse_layers
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, StoredNorms, layers_of
from sglang.srt.plan.families.mtp import COUNT, MTPPass, MTPTensors, one_layer
from sglang.srt.plan.families.recurrent import gated_delta
from sglang.srt.plan.layer_spec import ABSENT, SUM, LayerSpec, Residual
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

_FULL_NAMES = {"qwen_sparse_attention", "indexed_attention"}
"""Names in `layer_types` of attention, in configs that transformers wrote; published ones say "full_attention"."""


def qwen3_8_next(c: Config, expert_form: str = "") -> Model:
    """`expert_form`: as MoE.form."""
    # Activations of the recurrent layers' convolutions are computed as SiLU.
    c.only("hidden_act", "silu")
    c.only("output_gate_type", "silu", "sigmoid")
    c.only("indexer_kv_heads", 1)
    c.ignore("seed")  # of tables of n-grams, which a shortened model may lack
    c.only("ple_embedding_dtype", *_TABLE_DTYPES)
    kinds = kinds_by_pattern(c, "full_attention_interval", 4, RECURRENT)
    kinds = [FULL if kind in _FULL_NAMES else kind for kind in kinds]
    mixers = mixers_by_kind(c, kinds, {FULL: _pooled_sparse, RECURRENT: _gated_delta})
    blocks = ffn_by_layer(
        sparse_layers(c),
        lambda: mlp(c),
        lambda: experts(c, Router(0), shared=gated_shared_expert(c), form=expert_form),
    )
    residual = GatedStreams(c.positive("hc_count"), c.positive("hc_lowrank")) if c.count("hc_lowrank") else SUM
    tables = _ngram_embeddings(c)
    layers = [
        replace(layer, ngrams=tables.get(i, ABSENT)) for i, layer in enumerate(layers_of(mixers, blocks, residual))
    ]
    return Model(c, layers, norms=StoredNorms(zero_centred=True))


def _gated_delta(c: Config) -> GatedDelta:
    gate = str(c.values.get("output_gate_type") or c.values.get("hidden_act"))
    return gated_delta(c, sigmoid_gate=gate == "sigmoid")


def _pooled_sparse(c: Config) -> PooledSparse:
    """Returns attention over the blocks that the config's indexer selects. Raises UserError."""
    heads = grouped_attention(
        c,
        head_dim=256,
        kv_heads=2,
        qk_norm=PerHead(fp32=True),
        gate=ElementGate() if c.default("attn_output_gate", bool, True) else None,
        hybrid_kind="hybrid_gdn",
    )
    block, budget = c.positive("indexer_compress_ratio"), c.positive("indexer_budget")
    if budget % block:
        raise UserError(f"{c.source}: 'indexer_budget' {budget} is not a multiple of 'indexer_compress_ratio' {block}.")
    indexer = Indexer(c.positive("indexer_n_heads"), c.positive("indexer_head_dim"), budget // block)
    if heads.rotary_dim > indexer.head_dim:
        raise UserError(
            f"{c.source}: 'indexer_head_dim' {indexer.head_dim} is less than the {heads.rotary_dim} rotary dims."
        )
    return PooledSparse(heads, indexer, block)


_WIDE_TABLE, _FP8_TABLE = "bfloat16", "float8_e4m3fn"
_TABLE_DTYPES = {_WIDE_TABLE: "", "float16": "", "float32": "", _FP8_TABLE: "fp8_e4m3"}
"""Dtypes of n-gram tables by their names in config.json; "": the model's dtype."""


def _ngram_embeddings(c: Config) -> dict[int, NgramEmbedding]:
    """Returns the n-gram embeddings by the number of the layer before which they are added. Tables whose dtype
    config.json does not state are in FP8 if the checkpoint is quantized. Raises UserError."""
    listed = sorted(set(c.default("ple_layer_ids", list, [])))  # counted from 1
    wrong = [layer for layer in listed if type(layer) is not int or not 1 <= layer <= c.num_layers]
    if wrong:
        raise UserError(f"{c.source}: 'ple_layer_ids' must be numbers from 1 to {c.num_layers}; got {wrong}.")
    return {
        layer - 1: _table(c, number, _FP8_TABLE if c.quantized else _WIDE_TABLE) for number, layer in enumerate(listed)
    }


def _table(c: Config, number: int, dtype: str) -> NgramEmbedding:
    hidden = c.positive("hidden_size")
    longest, heads = c.positive("ngram_size", 3), c.positive("heads_per_ngram", 8)
    width = c.positive("ple_embed_dim", hidden)
    num_heads = (longest - 1) * heads
    if not num_heads or width % num_heads:
        raise UserError(
            f"{c.source}: 'ple_embed_dim' {width} is not a multiple of the {num_heads} rows that 'ngram_size' and"
            " 'heads_per_ngram' make of a token."
        )
    return NgramEmbedding(
        longest=longest,
        heads=heads,
        dim=width // num_heads,
        base_rows=_base_rows(c),
        row_multiple=c.positive("make_ngram_vocab_size_divisible_by", 128),
        number=number,
        seed=c.default("seed", int, 1234),
        vocab_size=c.positive("vocab_size"),
        end_token=_end_token(c),
        taps=c.positive("ple_conv_kernel_size", 4),
        streams=c.positive("hc_count"),
        stream_size=hidden,
        parts=c.positive("split_ngram_parts", 512),
        table_dtype=_TABLE_DTYPES.get(c.default("ple_embedding_dtype", str, dtype), ""),
    )


_MAX_ROWS = 1 << 28
"""Most rows of a head's part of a table: primes are searched one by one."""


def _base_rows(c: Config) -> int:
    base = c.default("ngram_vocab_size_base", int, 20_000_000)
    if not 2 <= base <= _MAX_ROWS:
        raise UserError(f"{c.source}: 'ngram_vocab_size_base' must be between 2 and {_MAX_ROWS:,}; got {base:,}.")
    return base


def _end_token(c: Config) -> int:
    """Returns the first of the end tokens."""
    written = c.values.get("eos_token_id")
    token = written[0] if isinstance(written, list) and written else written
    if type(token) is not int or not 0 <= token < c.positive("vocab_size"):
        raise UserError(f"{c.source}: n-grams end at 'eos_token_id', which must be a token id; got {written!r}.")
    return token


def _draft_keys(keys: ConfigReader) -> dict[str, Any]:
    return one_layer(keys) | {"ple_layer_ids": []}


def _draft_layer(layer: LayerSpec) -> LayerSpec:
    """Returns a draft layer, which attends to all tokens: its indexer, which would select as many tokens as the
    target's, is not used. Draft tokens are verified either way."""
    return replace(layer, mixer=layer.mixer.unselected())


def _draft_form(residual: Residual) -> Form:
    assert isinstance(residual, GatedStreams), "the model's layers have such streams"
    return Streamed(residual.streams, residual.rank)


_MTP = MTPPass(
    tensors=MTPTensors(
        at="mtp.",
        layer="layers.{layer}.",
        names={
            "fc_embedding": "fc_embedding",
            "fc_hidden": "fc_hidden",
            "embedding_norm": "pre_fc_norm_embedding",
            "hidden_norm": "pre_fc_norm_hidden",
            "norm": "hyper_connection_mixer.hc_norm",
            "head_mix.gates": "hyper_connection_mixer.{{part}}",
            "head_mix.up": "hyper_connection_mixer.input_mix_weight_up",
        },
        unread=("layers.0.self_attn.indexer.",),
    ),
    form=_draft_form,
    keys=_draft_keys,
    layer=_draft_layer,
    counts=("mtp_num_hidden_layers", COUNT),
    refused={"mtp_use_dedicated_embeddings": True},
)


QWEN4_EXP_TEXT = Family(
    title="Qwen3.8-Flash-Next",
    model_types=("qwen4_exp", "qwen3_8_flash_next"),
    architectures=("Qwen4ExpForCausalLM",),
    read=qwen3_8_next,
    names=_NAMES,
    mtp=_MTP,
)
QWEN4_EXP = replace(
    QWEN4_EXP_TEXT,
    model_types=(),
    architectures=("Qwen4ExpForConditionalGeneration", "Qwen3_8_FlashNextForConditionalGeneration"),
    read=partial(qwen3_8_next, expert_form="stacked"),
    names=replace(
        _NAMES.below("model.language_model."),
        behind=("model.language_model.hyper_connection_mixer.",),
        unread=("mtp.", "model.visual."),
    ),
)
"""The text half of a checkpoint with an image encoder."""
