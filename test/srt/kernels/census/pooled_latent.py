"""Launches of blocks/pooled_latent."""

from __future__ import annotations

import torch

from sglang.srt.blocks.compressed.kernels import compressor, tail_rotation
from sglang.srt.blocks.pooled_latent.spec import PooledLatent
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.layers.triton_ops import index_rope, norm
from sglang.srt.plan.layer_spec import AttentionShape

from .inputs import REQUESTS, SLOTS, empty
from .selection import launch_indexer, launch_records, launch_selected_attention, selected


def launch_pooled_latent(mixer: PooledLatent, tp_size: int, arch: ArchTraits) -> None:
    """The latents' store, the indexer's keys, queries and choice, and attention to tokens of what it selects and to
    those behind."""
    rank, index, rot = mixer.heads.kv_lora_rank, mixer.indexer, mixer.rope.rot_dim
    shape = AttentionShape(mixer.shares(tp_size).padded_heads, 1, rank, rank)
    cache, cos_sin = empty(SLOTS, 1, rank), empty(1, rot, dtype=torch.float32)
    before = mixer.heads.q_lora_rank
    for tokens in (1, 100, 300):
        joined, at = empty(tokens, before + rank), empty(tokens, dtype=torch.int64)
        norm.rmsnorm(joined[:, :before], empty(before), 1e-6)
        none, latents, weight = empty(tokens, 0, rank), joined[:, before:], empty(rank)
        tail_rotation.shared_kv_norm_rope_store(none, latents, at, cos_sin, weight, 1e-6, cache, at)
        norms = [empty(index.head_dim, dtype=torch.float32)] * 2
        index_rope.index_norm_rope(empty(tokens, index.head_dim), None, 0, at, cos_sin, *norms, 1e-6)
        rows = empty(tokens, 2, index.head_dim, dtype=torch.float32)
        bias = rows.new_empty(mixer.block, index.head_dim)
        state = rows.new_empty(REQUESTS, mixer.block, *rows.shape[1:])
        keys = empty(SLOTS // mixer.block, 1, index.head_dim)
        compressor.compress(rows, bias, state, at, at, at, None, 0.0, None, keys, at)
        compressor.keep(rows, state, at, at, at)
    launch_selected_attention(
        shape, [(cache, selected(64)), (cache, selected(mixer.block - 1))], False, "bfloat16", arch
    )
    launch_records(shape, mixer.record, [64, mixer.block - 1], False, arch)
    launch_indexer(index, mixer.block, arch)
