"""Reads DeepSeek-V4.1's layers from a config.json: which make compressed entries, which select among them, and which
take what others made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.plan.compressed import CompressedSparse
from sglang.srt.plan.mixers import Indexer
from sglang.srt.plan.shared_sparse import CandidateBlocks, SharedSparse

RATES = (0, 1, 2)
"""Compression rates of published layers: a window alone, an entry for each token, an entry for two tokens."""

LONGEST_RUN = 16
"""Most entries of a run; rows of scores have a multiple of as many."""


def shared_sparse_mixers(
    keys: ConfigReader, rates: Sequence[Any], plain: CompressedSparse, rotated: CompressedSparse
) -> list[CompressedSparse]:
    """Returns a mixer for each of the `rates`. `plain`: the mixer of a layer with a window alone; `rotated`: one with
    the rotary embedding of layers that read entries. Raises UserError that names the key whose layers contradict each
    other."""
    wrong = sorted({repr(rate) for rate in rates if type(rate) is not int or rate not in RATES})
    if wrong:
        allowed = ", ".join(map(str, RATES))
        raise UserError(f"{keys.source}: 'compress_ratios' must be {allowed} for this model; got {', '.join(wrong)}.")
    makers = _layers(keys, "kv_source_layer_ids", len(rates))
    choosers = _layers(keys, "index_source_layer_ids", len(rates))
    missing = [layer for layer in makers if layer not in choosers]
    if missing:
        raise UserError(f"{keys.source}: layers {missing} make entries, but no indexer chooses in them there.")
    for key, listed in (("kv_source_layer_ids", makers), ("index_source_layer_ids", choosers)):
        if windows := [layer for layer in listed if not rates[layer]]:
            raise UserError(f"{keys.source}: {key!r} has layers {windows}, whose 'compress_ratios' are 0.")
    indexer = None
    if choosers:
        heads, dim = keys.positive("index_n_heads"), keys.positive("index_head_dim")
        indexer = Indexer(heads, dim, keys.positive("index_topk"))
    bounded_by, candidates = _candidates(keys, choosers, len(rates))
    shared = {field.name: getattr(rotated, field.name) for field in fields(rotated)}
    mixers: list[CompressedSparse] = []
    for i, rate in enumerate(rates):
        if not rate:
            mixers.append(plain)
            continue
        source = max((layer for layer in makers if layer <= i), default=-1)
        if source < 0 or rates[source] != rate:
            raise UserError(
                f"{keys.source}: layer {i} reads entries of {rate} tokens, but the last layer of 'kv_source_layer_ids'"
                f" up to it {'is none' if source < 0 else f'({source}) makes entries of {rates[source]}'}."
            )
        chosen_by = max(layer for layer in choosers if layer <= i)
        bounds = candidates is not None and i >= bounded_by
        if bounds and rate != rates[bounded_by]:
            raise UserError(
                f"{keys.source}: layer {i} reads entries of {rate} tokens, but the runs that layer {bounded_by} chooses"
                f" ('candidate_source_layer_id') are of entries of {rates[bounded_by]}."
            )
        of_layer = {
            "rate": rate,
            "indexer": indexer if i in choosers else None,
            "layer": i,
            "source": source,
            "chosen_by": chosen_by,
            "top_k": keys.positive("index_topk"),
            "candidates": candidates if bounds else None,
            "bounded_by": bounded_by if bounds else -1,
            "run": candidates.block if candidates is not None and rate == rates[bounded_by] else 1,
        }
        mixers.append(SharedSparse(**{**shared, **of_layer}))
    return mixers


def _candidates(keys: ConfigReader, choosers: Sequence[int], num_layers: int) -> tuple[int, CandidateBlocks | None]:
    """Returns the layer that selects runs of entries, and what it selects; (-1, None) without one."""
    layer = keys.values.get("candidate_source_layer_id")
    if layer is None or layer == -1 or (type(layer) is int and layer >= num_layers):
        return -1, None
    if layer not in choosers:
        raise UserError(
            f"{keys.source}: 'candidate_source_layer_id' {layer!r} is none of 'index_source_layer_ids' {choosers}."
        )
    blocks = CandidateBlocks(keys.positive("candidate_topk_blocks"), keys.positive("candidate_block_size"))
    if blocks.block & (blocks.block - 1) or blocks.block > LONGEST_RUN:
        raise UserError(f"{keys.source}: 'candidate_block_size' {blocks.block} is no power of two up to {LONGEST_RUN}.")
    return layer, blocks


def _layers(keys: ConfigReader, key: str, num_layers: int) -> list[int]:
    """Returns the layers that a key lists; those behind the last layer of a shortened model are left out. Raises
    UserError."""
    listed = keys.require(key, list)
    if any(type(layer) is not int or layer < 0 for layer in listed):
        raise UserError(f"{keys.source}: {key!r} must be a list of layers' numbers; got {listed!r}.")
    return sorted({layer for layer in listed if layer < num_layers})
