"""DeepSeek-V4.1: attention over a window and compressed entries that layers share, lagged hyper-connections, Engram
tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from sglang.srt.blocks.compressed.spec import CompressedSparse
from sglang.srt.blocks.engram.spec import SCALE_GROUP, Engram
from sglang.srt.blocks.mla.spec import Indexer
from sglang.srt.blocks.moe.spec import Router
from sglang.srt.blocks.shared_sparse.spec import CandidateBlocks, SharedSparse
from sglang.srt.errors import UserError
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.deepseek_v4 import (
    DEEPSEEK_V4,
    LAYER_NAMES,
    NAMES,
    compress_ratios,
    compressed_sparse,
    v4_model,
)
from sglang.srt.plan.families.family import Model
from sglang.srt.plan.layer_spec import ABSENT

_OF_V4 = ("moe.hash", "attn.compressor.places")
_INDEXER = "attn.indexer."

V41_NAMES = replace(
    NAMES,
    model={ours: name for ours, name in NAMES.model.items() if ours != "head_mix"},
    layer={
        **{
            ours: name
            for ours, name in LAYER_NAMES.items()
            if ours not in _OF_V4 and not ours.startswith("attn.index_compressor")
        },
        "attn.index_k": f"{_INDEXER}wk",
        "attn.index_norm": f"{_INDEXER}k_norm",
        "ngrams": "engram",
        "ngrams.table": "engram.embed",
        "ngrams.project": "engram.wkv",
    },
    behind=(),
)


def deepseek_v41(c: Config) -> Model:
    rates = compress_ratios(c)
    plain, rotated = (compressed_sparse(c, rate, indexed=False, head_norm=False) for rate in (0, 2))
    router = Router(0, "sqrtsoftplus", correction="bias", exact_logits=True, image_correction="bias_vl")
    model = v4_model(c, _shared_sparse(c, rates, plain, rotated), router, lagged=True)
    tables = _engrams(c)
    layers = [replace(layer, ngrams=tables.get(i, ABSENT)) for i, layer in enumerate(model.layers)]
    return replace(model, layers=layers)


_RATES = (0, 1, 2)
"""Compression rates of published layers: a window alone, an entry for each token, an entry for two tokens."""

_LONGEST_RUN = 16
"""Most entries of a run; rows of scores have a multiple of as many."""


def _shared_sparse(
    c: Config, rates: Sequence[Any], plain: CompressedSparse, rotated: CompressedSparse
) -> list[CompressedSparse]:
    """Returns a mixer for each of the `rates`. `plain`: the mixer of a layer with a window alone; `rotated`: one with
    the rotary embedding of layers that read entries. Raises UserError that names the key whose layers contradict each
    other."""
    wrong = sorted({repr(rate) for rate in rates if type(rate) is not int or rate not in _RATES})
    if wrong:
        allowed = ", ".join(map(str, _RATES))
        raise UserError(f"{c.source}: 'compress_ratios' must be {allowed} for this model; got {', '.join(wrong)}.")
    makers = _layers(c, "kv_source_layer_ids", len(rates))
    choosers = _layers(c, "index_source_layer_ids", len(rates))
    missing = [layer for layer in makers if layer not in choosers]
    if missing:
        raise UserError(f"{c.source}: layers {missing} make entries, but no indexer chooses in them there.")
    for key, listed in (("kv_source_layer_ids", makers), ("index_source_layer_ids", choosers)):
        if windows := [layer for layer in listed if not rates[layer]]:
            raise UserError(f"{c.source}: {key!r} has layers {windows}, whose 'compress_ratios' are 0.")
    indexer = None
    if choosers:
        heads, dim = c.positive("index_n_heads"), c.positive("index_head_dim")
        indexer = Indexer(heads, dim, c.positive("index_topk"))
    bounded_by, candidates = _candidates(c, choosers, len(rates))
    shared = {field.name: getattr(rotated, field.name) for field in fields(rotated)}
    mixers: list[CompressedSparse] = []
    for i, rate in enumerate(rates):
        if not rate:
            mixers.append(plain)
            continue
        source = max((layer for layer in makers if layer <= i), default=-1)
        if source < 0 or rates[source] != rate:
            raise UserError(
                f"{c.source}: layer {i} reads entries of {rate} tokens, but the last layer of 'kv_source_layer_ids'"
                f" up to it {'is none' if source < 0 else f'({source}) makes entries of {rates[source]}'}."
            )
        chosen_by = max(layer for layer in choosers if layer <= i)
        bounds = candidates is not None and i >= bounded_by
        if bounds and rate != rates[bounded_by]:
            raise UserError(
                f"{c.source}: layer {i} reads entries of {rate} tokens, but the runs that layer {bounded_by} chooses"
                f" ('candidate_source_layer_id') are of entries of {rates[bounded_by]}."
            )
        of_layer = {
            "rate": rate,
            "indexer": indexer if i in choosers else None,
            "layer": i,
            "source": source,
            "chosen_by": chosen_by,
            "top_k": c.positive("index_topk"),
            "candidates": candidates if bounds else None,
            "bounded_by": bounded_by if bounds else -1,
            "run": candidates.block if candidates is not None and rate == rates[bounded_by] else 1,
        }
        mixers.append(SharedSparse(**{**shared, **of_layer}))
    return mixers


def _candidates(c: Config, choosers: Sequence[int], num_layers: int) -> tuple[int, CandidateBlocks | None]:
    """Returns the layer that selects runs of entries, and what it selects; (-1, None) without one."""
    layer = c.values.get("candidate_source_layer_id")
    if layer is None or layer == -1 or (type(layer) is int and layer >= num_layers):
        return -1, None
    if layer not in choosers:
        raise UserError(
            f"{c.source}: 'candidate_source_layer_id' {layer!r} is none of 'index_source_layer_ids' {choosers}."
        )
    blocks = CandidateBlocks(c.positive("candidate_topk_blocks"), c.positive("candidate_block_size"))
    if blocks.block & (blocks.block - 1) or blocks.block > _LONGEST_RUN:
        raise UserError(f"{c.source}: 'candidate_block_size' {blocks.block} is no power of two up to {_LONGEST_RUN}.")
    return layer, blocks


def _layers(c: Config, key: str, num_layers: int) -> list[int]:
    """Returns the layers that a key lists; those behind the last layer of a shortened model are left out. Raises
    UserError."""
    listed = c.require(key, list)
    if any(type(layer) is not int or layer < 0 for layer in listed):
        raise UserError(f"{c.source}: {key!r} must be a list of layers' numbers; got {listed!r}.")
    return sorted({layer for layer in listed if layer < num_layers})


def _engrams(c: Config) -> dict[int, Engram]:
    """Returns the embeddings by the number of the layer before which they are added. Raises UserError for tables whose
    size does not match their hash."""
    listed = c.default("engram_layer_ids", list, [])
    if any(type(layer) is not int or layer < 0 for layer in listed):
        raise UserError(f"{c.source}: 'engram_layer_ids' must be a list of layers' numbers; got {listed!r}.")
    sizes = c.default("engram_num_embeddings", list, [])
    if len(sizes) != len(listed):
        raise UserError(f"{c.source}: {len(listed)} 'engram_layer_ids', but {len(sizes)} 'engram_num_embeddings'.")
    tables: dict[int, Engram] = {}
    for number, (layer, stated) in enumerate(zip(listed, sizes, strict=True)):
        if layer >= c.num_layers:  # of draft layers
            continue
        tables[layer] = table = _engram(c, layer, number)
        if table.rows != stated:
            raise UserError(
                f"{c.source}: layer {layer}'s table of n-grams has {stated} rows by 'engram_num_embeddings', and"
                f" {table.rows} by 'engram_vocab_size' and the number of its heads."
            )
    return tables


def _engram(c: Config, layer: int, number: int) -> Engram:
    longest, dim = c.positive("engram_max_ngram_size"), c.positive("engram_head_dim")
    vocab_size, pad_token = c.positive("vocab_size"), c.require("engram_pad_token_id", int)
    if longest < 2 or not 0 <= pad_token < vocab_size:
        raise UserError(
            f"{c.source}: 'engram_max_ngram_size' {longest} must be 2 or more, and 'engram_pad_token_id'"
            f" {pad_token} a token."
        )
    if c.quantized and dim % SCALE_GROUP:
        raise UserError(f"{c.source}: 'engram_head_dim' {dim} is no multiple of {SCALE_GROUP}, which share a scale.")
    return Engram(
        longest=longest,
        heads=c.positive("engram_n_heads"),
        dim=dim,
        base_rows=c.positive("engram_vocab_size"),
        row_multiple=1,
        number=number,
        seed=0,
        vocab_size=vocab_size,
        end_token=-1,  # none ends a segment
        taps=1,
        streams=c.positive("hc_mult"),
        stream_size=c.positive("hidden_size"),
        parts=1,
        table_dtype="fp8_e4m3" if c.quantized else "",
        layer=layer,
        num_texts=c.positive("engram_compressed_vocab_size"),
        pad_token=pad_token,
    )


DEEPSEEK_V41 = replace(
    DEEPSEEK_V4,
    title="DeepSeek V4.1",
    model_types=("deepseek_v41",),
    architectures=("DeepseekV41ForCausalLM",),
    read=deepseek_v41,
    names=V41_NAMES,
    mtp=None,
)
