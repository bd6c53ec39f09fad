"""Launches of blocks/ngram_embedding."""

from __future__ import annotations

import torch

from sglang.srt.blocks.ngram_embedding.kernels import ngram_embedding
from sglang.srt.blocks.ngram_embedding.ngram_kernels import NgramHash
from sglang.srt.blocks.ngram_embedding.spec import NgramEmbedding
from sglang.srt.layers.compressed_step import TokenRequests
from sglang.srt.layers.triton_ops import keep_last

from .inputs import BF16, REQUESTS, SLOTS, empty


def launch_ngram_embedding(spec: NgramEmbedding, tp_size: int) -> None:
    """Rows of tables in both types, and the values that go into the streams."""
    heads, size, width = spec.num_heads // tp_size, spec.stream_size, spec.streams * spec.stream_size
    numbers = empty(heads, dtype=torch.int64)
    hashed = NgramHash(empty(spec.longest, dtype=torch.int64), numbers, numbers, 0, spec.heads, spec.end_token)
    kept_ids = empty(REQUESTS, spec.longest - 1, dtype=torch.int32)
    kept_rows, norms = empty(REQUESTS, spec.kept_tokens, width), empty(spec.streams, size, dtype=torch.float32)
    for tokens in (1, 100):
        at = empty(tokens, dtype=torch.int64)
        requests = TokenRequests(at, at, at, at)
        for dtype, scale in ((BF16, None), (torch.float8_e4m3fn, empty(1, dtype=torch.float32))):
            table = empty(SLOTS, spec.dim, dtype=dtype)
            ngram_embedding.ngram_rows(at, kept_ids, requests, hashed, table, scale, empty(tokens, heads * spec.dim))
        streams = empty(tokens, spec.streams, size)
        values, normed = ngram_embedding.gate_values(empty(tokens, width + size), streams, norms, norms, norms, 1e-6)
        ngram_embedding.convolve_values(values, normed, empty(width, spec.taps), spec.longest, kept_rows, requests)
        keep_last.keep_last(at, kept_ids, requests)
        keep_last.keep_last(normed, kept_rows, requests)
