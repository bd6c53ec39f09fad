"""Launches of blocks/engram."""

from __future__ import annotations

import torch

from sglang.srt.blocks.engram.spec import Engram
from sglang.srt.blocks.ngram_embedding.kernels import ngram_embedding
from sglang.srt.blocks.ngram_embedding.ngram_kernels import NgramHash
from sglang.srt.layers.compressed_step import TokenRequests
from sglang.srt.layers.triton_ops import keep_last

from .inputs import REQUESTS, SLOTS, empty


def launch_engram(spec: Engram, tp_size: int) -> None:
    heads, size, width = spec.num_heads // tp_size, spec.stream_size, spec.streams * spec.stream_size
    numbers = empty(heads, dtype=torch.int64)
    hashed = NgramHash(empty(spec.longest, dtype=torch.int64), numbers, numbers, 0, spec.heads, spec.end_token, 0)
    kept = empty(REQUESTS, spec.longest - 1, dtype=torch.int32)
    norms = empty(spec.streams, size, dtype=torch.float32)
    for tokens in (1, 100):
        at = empty(tokens, dtype=torch.int64)
        requests = TokenRequests(at, at, at, at)
        table, scale = (
            empty(SLOTS, spec.dim, dtype=torch.float8_e4m3fn),
            empty(SLOTS, spec.dim // 32, dtype=torch.uint8),
        )
        ngram_embedding.ngram_rows(at, kept, requests, hashed, table, scale, empty(tokens, heads * spec.dim))
        keep_last.keep_last(at, kept, requests)
        streams = empty(tokens, spec.streams, size)
        ngram_embedding.gate_values(empty(tokens, width + size), streams, norms, norms, norms, 1e-6)
