"""Launches of blocks/compressed."""

from __future__ import annotations

import torch

from sglang.srt.blocks.compressed.kernels import compressor, tail_rotation
from sglang.srt.blocks.compressed.spec import CompressedSparse
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.plan.layer_spec import AttentionShape

from .inputs import CONTEXT, REQUESTS, SLOTS, empty
from .selection import launch_indexer, launch_records, launch_selected_attention, selected


def launch_compressed_sparse(mixer: CompressedSparse, tp_size: int, arch: ArchTraits) -> None:
    """A window alone, or with compressed entries."""
    shape = AttentionShape(mixer.num_heads // tp_size, 1, mixer.head_dim, mixer.head_dim)
    cache = empty(SLOTS, 1, shape.head_dim)
    launch_rotations(shape, mixer, cache)
    if mixer.rate:
        _compressors(mixer)
    more = [(cache, selected(64))] if mixer.rate else []
    launch_selected_attention(shape, [(cache, selected(mixer.window)), *more], True, "bfloat16", arch)
    launch_records(shape, mixer.record, [mixer.window, *([64] if mixer.rate else [])], True, arch)
    if mixer.indexer is not None:
        launch_indexer(mixer.indexer, mixer.rate, arch)


def launch_rotations(shape: AttentionShape, mixer: CompressedSparse, cache: torch.Tensor) -> None:
    """Norms, rotations and the store, of attention's heads and of the indexer's."""
    cos_sin = empty(CONTEXT, mixer.rope_dim, dtype=torch.float32)
    for tokens in (1, 100, 300):
        q, row = empty(tokens, shape.num_heads, shape.head_dim), empty(tokens, shape.head_dim)
        at, weight = empty(tokens, dtype=torch.int64), empty(shape.head_dim)
        tail_rotation.shared_kv_norm_rope_store(q, row, at, cos_sin, weight, 1e-6, cache, at)
        tail_rotation.tail_rotation(q, at, cos_sin, inverse=True)
        if mixer.indexer is not None:
            tail_rotation.tail_rotation(empty(tokens, mixer.indexer.num_heads, mixer.indexer.head_dim), at, cos_sin)


def _compressors(mixer: CompressedSparse) -> None:
    cos_sin = empty(CONTEXT, mixer.rope_dim, dtype=torch.float32)
    for dim in (mixer.head_dim, *([mixer.indexer.head_dim] if mixer.indexer is not None else [])):
        width, of_tokens = mixer.overlap * dim, {"dtype": torch.int64}
        state = empty(REQUESTS, mixer.overlap * mixer.rate, 2, width, dtype=torch.float32)
        for tokens in (1, 100):
            rows, at = empty(tokens, 2, width, dtype=torch.float32), empty(tokens, **of_tokens)
            bias = empty(mixer.rate, width, dtype=torch.float32)
            cache = empty(SLOTS // mixer.rate, 1, dim)
            compressor.compress(rows, bias, state, at, at, at, empty(dim), 1e-6, cos_sin, cache, at)
            compressor.keep(rows, state, at, at, at)
