"""Launches of blocks/shared_sparse."""

from __future__ import annotations

import torch

from sglang.srt.blocks.compressed.kernels import compressor, tail_rotation
from sglang.srt.blocks.shared_sparse.spec import SharedSparse
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.plan.layer_spec import AttentionShape

from .compressed import launch_rotations
from .inputs import CONTEXT, REQUESTS, SLOTS, empty
from .selection import launch_indexer, launch_records, launch_selected_attention, selected


def launch_shared_sparse(mixer: SharedSparse, tp_size: int, arch: ArchTraits) -> None:
    """A window and entries that this layer or an earlier one made; runs of entries have the same scores."""
    shape = AttentionShape(mixer.num_heads // tp_size, 1, mixer.head_dim, mixer.head_dim)
    cache = empty(SLOTS, 1, shape.head_dim)
    launch_rotations(shape, mixer, cache)
    tail_rotation.shared_kv_norm_rope_store(
        empty(100, 0, shape.head_dim), empty(100, shape.head_dim), empty(100, dtype=torch.int64),
        empty(CONTEXT, mixer.rope_dim, dtype=torch.float32), empty(shape.head_dim), 1e-6, cache,
        empty(100, dtype=torch.int64),
    )  # fmt: skip
    launch_selected_attention(shape, [(cache, selected(mixer.window)), (cache, selected(64))], True, "bfloat16", arch)
    launch_records(shape, mixer.record, [mixer.window, 64], True, arch)
    if mixer.indexer is not None:
        launch_indexer(mixer.indexer, mixer.rate, arch)
    if mixer.makes and mixer.indexer is not None:
        _entries(mixer, mixer.indexer.head_dim)


def _entries(mixer: SharedSparse, index_dim: int) -> None:
    """Entries of a run, normed and as they are, and entries and keys that are made of a token each."""
    cos_sin, at = empty(CONTEXT, mixer.rope_dim, dtype=torch.float32), empty(100, dtype=torch.int64)
    for rate, dim in ((mixer.rate, mixer.head_dim), (1, mixer.head_dim), (1, index_dim)):
        rows, state = (empty(*shape, dtype=torch.float32) for shape in ((100, 2, dim), (REQUESTS, rate, 2, dim)))
        bias, cache = empty(rate, dim, dtype=torch.float32), empty(SLOTS // rate, 1, dim)
        compressor.compress(rows, bias, state, at, at, at, empty(dim), 1e-6, cos_sin, cache, at)
        if rate > 1:
            compressor.compress(rows, bias, state, at, at, at, None, 0.0, None, cache, at)
            compressor.keep(rows, state, at, at, at)
