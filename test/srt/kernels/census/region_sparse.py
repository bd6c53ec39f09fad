"""Launches of blocks/region_sparse."""

from __future__ import annotations

import torch

from sglang.srt.blocks.compressed.kernels import compressor
from sglang.srt.blocks.recurrent_state.kernels import gated_norm
from sglang.srt.blocks.region_sparse.spec import RegionSparse
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.attention.triton_ops.index_logits import index_logits
from sglang.srt.layers.attention.triton_ops.select_entries import select_entries
from sglang.srt.layers.triton_ops import index_rope, index_store, norm

from .block_selection import launch_block_attention
from .gqa import launch_rope_store
from .inputs import CONTEXT, REQUESTS, SLOTS, empty, tiles_of


def launch_region_sparse(mixer: RegionSparse, tp_size: int, arch: ArchTraits) -> None:
    """The heads' store and gate, the indexer's keys, queries and choice, and attention to what each KV head selects, of
    one token and of many."""
    heads, index, block = mixer.heads, mixer.indexer, mixer.block
    shape, dim = heads.attention_shape(tp_size), index.head_dim
    kv_heads, width = shape.num_kv_heads, shape.num_heads * shape.head_dim
    launch_rope_store(shape, heads, four_bits=False)
    gated_norm.attention_head_gate(empty(8, width), empty(8, shape.num_heads))
    cos_sin, weight = empty(CONTEXT, mixer.index_rope.rot_dim, dtype=torch.float32), empty(dim, dtype=torch.float32)
    state, keys = empty(REQUESTS, block, 2, dim, dtype=torch.float32), empty(SLOTS // block, 1, dim)
    table = empty(REQUESTS + 1, CONTEXT, dtype=torch.int32)
    for tokens in (1, 100, 300):
        at, products = empty(tokens, dtype=torch.int64), empty(tokens, (kv_heads * index.num_heads + 2) * dim)
        queries, k, _ = products.split((kv_heads * index.num_heads * dim, dim, dim), dim=-1)
        rows, pooled = empty(tokens, 2, dim, dtype=torch.float32), empty(tokens, 1, dim)
        bias = empty(block, dim, dtype=torch.float32)
        compressor.compress(rows, bias, state, at, at, at, None, 0.0, None, pooled, at)
        compressor.keep(rows, state, at, at, at)
        new = index_rope.index_norm_rope(pooled[:, 0], None, 0, at, cos_sin, weight, weight, 1e-6)
        index_store.index_key_store(new, keys, None, at)
        q = norm.rmsnorm(queries.unflatten(1, (-1, dim)), weight, 1e-6)
        index_rope.index_norm_rope(k, q, 0, at, cos_sin, weight, weight, 1e-6)
        q = q.view(tokens * kv_heads, index.num_heads, dim)
        scores = empty(*q.shape[:2], dtype=torch.float32)
        counts = empty(len(q), dtype=torch.int32)
        slots = empty(len(q), index.top_k, dtype=torch.int32)
        for run in (1, 2, 4, 1000):
            entries = EntryRows(
                table, empty(len(q), dtype=torch.int64), counts, CONTEXT // block, block, run * kv_heads
            )
            logits = empty(len(q), entries.max_count, dtype=torch.float32)
            for tile in tiles_of("sparse_indexer", dim, dim, "bfloat16", arch):
                index_logits(q, scores, keys, None, entries, index.top_k, logits, tile=tile, num_sms=arch.num_sms)
            select_entries(logits, entries, index.top_k, slots, counts)
        selection = Selection(empty(len(q), index.top_k + 1, dtype=torch.int32), counts)
        lens = EntryRows(table, at, empty(tokens, dtype=torch.int32), CONTEXT)
        launch_block_attention(shape, selection, lens, block, arch)
