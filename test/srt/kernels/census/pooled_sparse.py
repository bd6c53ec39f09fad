"""Launches of blocks/pooled_sparse."""

from __future__ import annotations

import torch

from sglang.srt.blocks.compressed.kernels import compressor, tail_rotation
from sglang.srt.blocks.pooled_sparse.block_selection import BlockSelection
from sglang.srt.blocks.pooled_sparse.kernels.selected_blocks import selected_block_attention_fwd
from sglang.srt.blocks.pooled_sparse.spec import PooledSparse
from sglang.srt.blocks.recurrent_state.kernels import gated_norm
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.layers.attention.selection import EntryRows
from sglang.srt.layers.attention.triton_ops.index_logits import index_logits
from sglang.srt.layers.attention.triton_ops.select_entries import select_entries
from sglang.srt.layers.triton_ops import norm
from sglang.srt.mem_cache.memory_pool import STORAGE_DTYPES
from sglang.srt.plan.layer_spec import AttentionShape

from .gqa import launch_rope_store
from .inputs import CACHES, CONTEXT, REQUESTS, SLOTS, empty, tiles_of
from .selection import launch_indexer


def launch_pooled_sparse(mixer: PooledSparse, tp_size: int, arch: ArchTraits) -> None:
    """The heads' store and gate, the indexer's keys, queries and choice, and attention to what it selects."""
    heads, index, tokens = mixer.heads, mixer.indexer, 100
    shape = heads.attention_shape(tp_size)
    launch_rope_store(shape, heads)
    width, dim = shape.num_heads * shape.head_dim, index.head_dim
    gated_norm.attention_output_gate(empty(8, width), empty(8, 2 * width)[:, width:])
    at, cos_sin = empty(tokens, dtype=torch.int64), empty(CONTEXT, heads.rotary_dim, dtype=torch.float32)
    weight, rows = empty(dim, dtype=torch.float32), empty(tokens, 2, dim, dtype=torch.float32)
    keys, state = empty(SLOTS // mixer.block, 1, dim), empty(REQUESTS, mixer.block, 2, dim, dtype=torch.float32)
    compressor.compress(rows, None, state, at, at, at, weight, 1e-6, None, keys, at, angles=heads.rotary_dim)
    compressor.keep(rows, state, at, at, at)
    q = norm.rmsnorm(empty(tokens, index.num_heads, dim), weight, 1e-6)
    tail_rotation.tail_rotation(q, at, cos_sin)
    counts, slots = empty(tokens, dtype=torch.int32), empty(tokens, index.top_k, dtype=torch.int32)
    table = empty(REQUESTS + 1, CONTEXT, dtype=torch.int32)
    for run in (1, 1000):
        entries = EntryRows(table, at, counts, CONTEXT // mixer.block, mixer.block, run)
        logits, scores = (empty(tokens, wide, dtype=torch.float32) for wide in (entries.max_count, index.num_heads))
        for tile in tiles_of("sparse_indexer", dim, dim, "bfloat16", arch):
            index_logits(q, scores, keys, None, entries, index.top_k, logits, tile=tile, num_sms=arch.num_sms)
        select_entries(logits, entries, index.top_k, slots, counts)
    chosen = BlockSelection(slots, counts, counts, counts, mixer.block)
    queries, group = empty(tokens, shape.num_heads, shape.head_dim), shape.num_heads // shape.num_kv_heads
    launch_indexer(index, mixer.block, arch)
    for name in CACHES:
        k_cache = empty(SLOTS, shape.num_kv_heads, shape.head_dim, dtype=STORAGE_DTYPES[name])
        _attention(shape, chosen, queries, k_cache, name, group, arch)


def _attention(
    shape: AttentionShape, chosen: BlockSelection, queries: torch.Tensor, k_cache: torch.Tensor, name: str, group: int,
    arch: ArchTraits,
) -> None:  # fmt: skip
    slots, counts, tokens = chosen.blocks, chosen.counts, len(queries)
    for tile in tiles_of("selected_block_attention", shape.head_dim, shape.v_head_dim, name, arch, group):
        for some in (1, tokens):
            part = BlockSelection(*(x[:some] for x in (slots, counts, counts, counts)), chosen.block)
            selected_block_attention_fwd(
                queries[:some], k_cache, k_cache, part, empty(some, *queries.shape[1:]), scale=0.1, tile=tile,
                num_sms=arch.num_sms,
            )  # fmt: skip
