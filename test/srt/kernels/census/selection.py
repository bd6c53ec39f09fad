"""Launches of indexers and of attention to selected entries, which several blocks have."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from sglang.srt.blocks.mla.spec import Indexer
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.attention.triton_ops.index_logits import index_logits
from sglang.srt.layers.attention.triton_ops.select_entries import select_entries
from sglang.srt.layers.attention.triton_ops.sparse_records import attention_fwd
from sglang.srt.layers.triton_ops import index_rope, index_store, latent_records
from sglang.srt.mem_cache.memory_pool import STORAGE_DTYPES
from sglang.srt.plan.latent_record import LatentRecord
from sglang.srt.plan.layer_spec import AttentionShape

from .inputs import BF16, CONTEXT, FP4, REQUESTS, SLOTS, empty, tiles_of


def selected(width: int, tokens: int = 100) -> Selection:
    return Selection(empty(tokens, width, dtype=torch.int32), empty(tokens, dtype=torch.int32))


def _of_tokens(entries: Selection, tokens: int) -> Selection:
    if entries.rows is None:
        return selected(entries.slots.shape[1], tokens)
    return Selection(entries.slots, empty(tokens, dtype=torch.int32), empty(tokens, dtype=torch.int64))


def launch_selected_attention(
    shape: AttentionShape,
    caches: list[tuple[torch.Tensor, Selection]],
    sinks: bool,
    dtype: str,
    arch: ArchTraits,
    record: LatentRecord | None = None,
) -> None:
    """Of prompts, and of batches of every size that is cut into shares."""
    sink = empty(shape.num_heads, dtype=torch.float32) if sinks else None
    for tile in tiles_of("sparse_attention", shape.head_dim, shape.v_head_dim, dtype, arch):
        for tokens in (1, 4, 8, 60, 1000):
            q, out = empty(tokens, shape.num_heads, shape.head_dim), empty(tokens, shape.num_heads, shape.v_head_dim)
            for lse in (None, empty(tokens, shape.num_heads, dtype=torch.float32)):
                sources = [(cache, _of_tokens(entries, tokens)) for cache, entries in caches]
                attention_fwd(
                    q, sources, out, scale=0.1, tile=tile, num_sms=arch.num_sms, sinks=sink, lse=lse, record=record
                )


def launch_records(
    shape: AttentionShape, record_of: Callable[[str], LatentRecord | None], widths: list[int], sinks: bool,
    arch: ArchTraits, in_table: bool = False,
) -> None:  # fmt: skip
    """Latents or entries in eight and in four bits: what packs them, and attention to `widths` of one or two caches, or
    to all tokens (`in_table`)."""
    for dtype in ("fp8_e4m3", FP4):
        record = record_of(dtype)
        if record is None:
            continue
        cache = empty(SLOTS, 1, record.size, dtype=torch.uint8)
        for tokens in (1, 100):
            rows = empty(tokens, 1, record.dim)[:, 0]
            latent_records.latent_record_store(rows, cache, empty(tokens, dtype=torch.int64), record)
        chosen = [selected(width) for width in widths]
        if in_table:
            table = empty(REQUESTS + 1, CONTEXT, dtype=torch.int32)
            chosen = [Selection(table, chosen[0].counts, empty(100, dtype=torch.int64))]
        launch_selected_attention(shape, [(cache, each) for each in chosen], sinks, dtype, arch, record)


def launch_indexer(indexer: Indexer, rate: int, arch: ArchTraits) -> None:
    """Its keys in both types, over caches with an entry for each `rate` tokens, of steps of one token and of many."""
    heads, dim = indexer.num_heads, indexer.head_dim
    for name, tokens in itertools.product(("bfloat16", "fp8_e4m3"), (1, 100)):
        dtype = STORAGE_DTYPES[name]
        cache = empty(SLOTS, 1, dim, dtype=dtype)
        scales = empty(SLOTS, 1, dtype=torch.float32) if name == "fp8_e4m3" else None
        index_store.index_key_store(empty(tokens, dim), cache, scales, empty(tokens, dtype=torch.int64))
        for kind in (BF16, torch.float32):
            q, weights = index_store.index_queries(
                empty(tokens, heads, dim), empty(tokens, heads, dtype=kind), 0.1, dtype
            )
        table, counts = empty(REQUESTS + 1, CONTEXT, dtype=torch.int32), empty(tokens, dtype=torch.int32)
        slots = empty(tokens, indexer.top_k, dtype=torch.int32)
        for run in (1, 2, 4, 1000):
            rows = EntryRows(table, empty(tokens, dtype=torch.int64), counts, CONTEXT // rate, rate, run)
            logits = empty(tokens, rows.max_count, dtype=torch.float32)
            for tile in tiles_of("sparse_indexer", dim, dim, name, arch):
                index_logits(q, weights, cache, scales, rows, indexer.top_k, logits, tile=tile, num_sms=arch.num_sms)
            select_entries(logits, rows, indexer.top_k, slots, counts)


def launch_index_rows(indexer: Indexer, rot: int) -> None:
    """Keys with and without queries, of few tokens and of many."""
    dim, cos_sin = indexer.head_dim, empty(CONTEXT, rot, dtype=torch.float32)
    norm_row = empty(dim, dtype=torch.float32)
    for tokens, first, queries in ((1, 0, 1), (20, 4, 16), (100, 0, 100), (300, 0, 0), (300, 0, 300)):
        q = empty(queries, indexer.num_heads, dim) if queries else None
        positions = empty(tokens, dtype=torch.int64)
        index_rope.index_norm_rope(
            empty(tokens, dim), q, first, positions, cos_sin, norm_row, norm_row, 1e-6, indexer.is_neox_style,
            indexer.first_rotary(rot),
        )  # fmt: skip
