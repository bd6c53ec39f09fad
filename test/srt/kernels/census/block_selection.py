"""Launches of blocks/block_selection."""

from __future__ import annotations

import itertools

import torch

from sglang.srt.blocks.block_selection.kernels.block_scores import block_scores
from sglang.srt.blocks.block_selection.spec import BlockIndexer
from sglang.srt.blocks.token_selection.spec import TokenIndexer
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.attention.triton_ops.block_attention import block_attention_fwd
from sglang.srt.layers.attention.triton_ops.select_entries import select_entries
from sglang.srt.layers.triton_ops import rope_store
from sglang.srt.mem_cache.memory_pool import STORAGE_DTYPES
from sglang.srt.plan.layer_spec import AttentionShape

from .inputs import CACHES, CONTEXT, REQUESTS, SLOTS, empty, tiles_of
from .selection import launch_index_rows, launch_indexer


def launch_block_sparse(shape: AttentionShape, indexer: BlockIndexer, rot: int, arch: ArchTraits) -> None:
    """Index keys and their queries, scores and choices of blocks, and attention to them, of one token and of many."""
    heads, dim, block, chosen = shape.num_kv_heads, indexer.head_dim, indexer.block, indexer.top_blocks
    keys, weight = empty(SLOTS, 1, dim), empty(dim, dtype=torch.float32)
    table = empty(REQUESTS + 1, CONTEXT, dtype=torch.int32)
    for tokens, run in itertools.product((1, 100, 300), (1, 2, 8, 1000)):
        positions = empty(tokens, dtype=torch.int64)
        q, _, _ = rope_store.qk_norm_rope_store(
            empty(tokens, (heads + 1) * dim), positions, empty(CONTEXT, rot, dtype=torch.float32), weight, weight, 1e-6,
            heads, 1, dim, keys, None, positions,
        )  # fmt: skip
        rows = EntryRows(table, positions, empty(tokens, dtype=torch.int32), CONTEXT, run=run)
        blocks = rows.blocks(block, heads)
        scores = empty(tokens, heads, -(-blocks.max_count // 16) * 16, dtype=torch.float32)
        for tile in tiles_of("block_indexer", dim, dim, "bfloat16", arch):
            block_scores(q, keys, rows, block, chosen, indexer.local_blocks, scores, tile=tile, num_sms=arch.num_sms)
        selection = Selection(empty(tokens * heads, chosen, dtype=torch.int32), blocks.counts)
        select_entries(scores.flatten(0, 1), blocks, chosen, selection.slots, selection.counts)
        launch_block_attention(shape, selection, rows, block, arch)


def launch_token_sparse(shape: AttentionShape, indexer: TokenIndexer, rot: int, arch: ArchTraits) -> None:
    """Scores and choices of tokens, and attention to them, of one token and of many."""
    launch_indexer(indexer.scores, 1, arch)
    launch_index_rows(indexer.scores, rot)
    table = empty(REQUESTS + 1, CONTEXT, dtype=torch.int32)
    for tokens in (1, 100, 300):
        counts = empty(tokens, dtype=torch.int32)
        rows = EntryRows(table, empty(tokens, dtype=torch.int64), counts, CONTEXT)
        selection = Selection(empty(tokens, indexer.top_k, dtype=torch.int32), counts)
        launch_block_attention(shape, selection, rows, indexer.block, arch)


def launch_block_attention(
    shape: AttentionShape, selection: Selection, rows: EntryRows, block: int, arch: ArchTraits
) -> None:
    heads, tokens = shape.num_kv_heads, len(rows)
    for dtype in CACHES:
        k, v = (empty(SLOTS, heads, dim, dtype=STORAGE_DTYPES[dtype]) for dim in (shape.head_dim, shape.v_head_dim))
        queries, out = (empty(tokens, shape.num_heads, dim) for dim in (shape.head_dim, shape.v_head_dim))
        for tile in tiles_of("block_attention", shape.head_dim, shape.v_head_dim, dtype, arch):
            for sms in (1, 188):
                block_attention_fwd(
                    queries, k, v, selection, rows.counts, block, out, scale=0.1, tile=tile, num_sms=sms
                )
