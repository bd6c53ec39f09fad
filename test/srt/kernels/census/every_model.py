"""Launches of every model: a step's inputs, embedding, norms, logits, sampling, sums over ranks."""

from __future__ import annotations

import itertools
from typing import get_args

import torch

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.layers.attention.triton_ops.prefill_attention import context_attention_fwd
from sglang.srt.layers.quantization.activations import RowForm
from sglang.srt.layers.triton_ops import (
    decode_inputs,
    draft_rows,
    embedding,
    ngram,
    norm,
    norm_quantize,
    quantized_sums,
    sampling,
)
from sglang.srt.sampling.sampling_table import ROW_WIDTH

from .inputs import BF16, CONTEXT, REQUESTS, empty, tiles_of


def launch_quantized_sums(hidden: int, ranks: int) -> None:
    """Sums over all ranks, whose shares begin on 16 bytes, and the halves of sums that attention groups exchange."""
    codec = quantized_sums.TritonCodec()
    for rows, aligned in itertools.product((1, 100), (True, False)):
        x = empty(rows, hidden).flatten()
        share = -(-x.numel() // (quantized_sums.SIZE * ranks))
        share = -(-share // 16) * 16 if aligned else share
        messages, total = (empty(parts, share * 33, dtype=torch.uint8) for parts in (ranks, 1))
        codec.encode(x, messages)
        codec.decode(messages, x)
        codec.add_encoded(messages, total)
        codec.add(messages, empty(share * quantized_sums.SIZE))


def launch_decode_inputs() -> None:
    """Of models without a window and with two."""
    for tables, batch in itertools.product((1, 3), (1, 100)):
        slots, lens = empty(batch, dtype=torch.int64), empty(batch, dtype=torch.int32)
        next_tokens = empty(REQUESTS + 1, dtype=torch.int64)
        table = empty(tables, REQUESTS + 1, CONTEXT, dtype=torch.int32)
        decode_inputs.decode_inputs(slots, lens, empty(batch, dtype=torch.int64), next_tokens, table)


def launch_draft_rows() -> None:
    """Of models without a window and with two."""
    for tables, batch in itertools.product((1, 3), (1, 100)):
        slots, lens = empty(batch, dtype=torch.int64), empty(batch, dtype=torch.int32)
        computed = empty(REQUESTS + 1, dtype=torch.int32)
        next_tokens = empty(REQUESTS + 1, 4, dtype=torch.int64)
        table = empty(tables, REQUESTS + 1, CONTEXT, dtype=torch.int32)
        for width in (1, 4):
            draft_rows.verify_inputs(slots, lens, computed, next_tokens, table, width)
            draft_rows.draft_inputs(slots, lens, lens, table, width)
            rows = empty(batch, width, dtype=torch.int64)
            draft_rows.accept_drafts(rows, slots, lens, next_tokens, computed)
    draft_rows.accept_drafts(rows, slots, lens, next_tokens, computed, lens)


def launch_ngram_drafts() -> None:
    """With and without external texts, for short and long contexts."""
    texts = empty(1000, dtype=torch.int32), empty(1000, dtype=torch.int32), empty(1, dtype=torch.int32)
    for context, longest, corpus in itertools.product((1000, CONTEXT, 1 << 20), (1, 64), (None, texts)):
        history = empty(REQUESTS + 1, context, dtype=torch.int32)
        slots, lens = empty(3, dtype=torch.int64), empty(3, dtype=torch.int32)
        ngram.ngram_drafts(history, slots, lens, slots, longest, 5, corpus)


def launch_embedding_rows(rows: int, hidden: int) -> None:
    for tokens, first in ((1, 0), (100, rows)):
        embedding.embedding_rows(empty(tokens, dtype=torch.int64), empty(rows, hidden), first)


def launch_norms(hidden: int, zero_centred: bool) -> None:
    """Weights that checkpoints store minus 1 are kept in fp32."""
    weight = empty(hidden, dtype=torch.float32 if zero_centred else BF16)
    for tokens in (1, 100):
        norm.rmsnorm(empty(tokens, hidden), weight, 1e-6)
        norm.fused_add_rmsnorm(empty(tokens, hidden), empty(tokens, hidden), weight, 1e-6)
    for form in get_args(RowForm):
        norm_quantize.add_rmsnorm_quantize(empty(100, hidden), empty(100, hidden), weight, 1e-6, form)


def launch_image_encoder(dim: int, arch: ArchTraits) -> None:
    for tile in tiles_of("prefill_attention", dim, dim, "bfloat16", arch):
        q, k, v, o = (empty(100, 16, dim) for _ in "qkvo")
        context_attention_fwd(q, k, v, o, empty(9, dtype=torch.int32), is_causal=False, tile=tile)


def launch_sampling(vocab: int) -> None:
    table = empty(REQUESTS + 1, ROW_WIDTH, dtype=torch.int32)
    state = empty(REQUESTS + 1, vocab, dtype=torch.int32)
    next_token = empty(REQUESTS + 1, dtype=torch.int64)
    for batch in (1, 8, 256):
        slots, positions = empty(batch, dtype=torch.int64), empty(batch, dtype=torch.int32)
        logits = empty(batch, vocab, dtype=torch.float32)
        mask = empty(batch, -(-vocab // 32), dtype=torch.int32)
        for own_state, own_mask in ((state, None), (None, mask), (state, mask)):
            sampling.adjust_logits(logits, table, slots, own_state, own_mask)
        thresholds = sampling.filter_thresholds(logits, table, slots)
        for of, greedy in ((None, True), (None, False), (thresholds, False)):
            for target in (next_token, None):
                sampling.draw_tokens(logits, table, slots, positions, of, greedy, target)
