"""Launches of LoRA adapters."""

from __future__ import annotations

import itertools

import torch

from sglang.ledger.launch_form import named
from sglang.srt.layers.moe.fused_moe_triton import expert_adapters
from sglang.srt.layers.native_adapters import AdapterWeights, ExpertAdapterWeights
from sglang.srt.layers.triton_ops import adapters

from .inputs import empty

SLOTS = 8


def launch_adapters() -> None:
    """For every room of a rank, steps of one token, of few and of many, one module and several, and layers of a few
    rows."""
    for room, tokens, (rows, size) in itertools.product(
        (16, 32, 64, 128), (1, 100, 2000), ((6144, 4096), (24, 4096), (4096, 12288))
    ):
        parts = 3 if rows == 6144 else 1
        weights = AdapterWeights(
            empty(SLOTS, parts, room, size),
            empty(SLOTS, rows, room),
            empty(SLOTS, dtype=torch.int32),
            empty(rows, dtype=torch.int32),
            adapters.Tiles(empty(-(-rows // adapters.TILE), 3, dtype=torch.int32), 16),
        )
        with named("add_adapters", "all"):
            chunks = adapters.order_tokens(empty(tokens, dtype=torch.int32), SLOTS)
            low = adapters.shrink(empty(tokens, size), chunks, weights)
            adapters.expand(low, empty(tokens, rows), chunks, weights)


def launch_adapters_of_ends() -> None:
    """Those of the embedding, and of the output head, whose logits are in 32 bits."""
    for room, tokens in itertools.product((16, 64, 128), (1, 100, 2000)):
        for rows, size, end in ((4096, 151936, "embedding"), (151936, 4096, "head")):
            weights = AdapterWeights(
                empty(SLOTS, 1, room, size),
                empty(SLOTS, rows, room),
                empty(SLOTS, dtype=torch.int32),
                empty(rows, dtype=torch.int32),
                adapters.Tiles(empty(-(-rows // adapters.TILE), 3, dtype=torch.int32), 16),
            )
            with named("add_adapters", end):
                chunks = adapters.order_tokens(empty(tokens, dtype=torch.int32), SLOTS)
                if end == "embedding":
                    low = adapters.look_up(empty(tokens, dtype=torch.int64), 0, chunks, weights)
                else:
                    low = adapters.shrink(empty(tokens, size), chunks, weights)
                out = empty(tokens, rows, dtype=torch.float32 if end == "head" else torch.bfloat16)
                adapters.expand(low, out, chunks, weights)


def launch_latent_adapters() -> None:
    """Those of `kv_b_proj`, of 16 heads with latents of 512 numbers and rotary keys of 64."""
    heads, latent, rotary = 16, 512, 64
    for room, tokens, dim in itertools.product((16, 64, 128), (1, 1000), (128, 192)):
        ids = empty(tokens, heads, dtype=torch.int32)
        queries = empty(tokens * heads, dim + rotary)[:, :dim]
        absorbed = empty(tokens * heads, latent + rotary)[:, :latent]
        sides = (
            (queries, absorbed, empty(SLOTS, heads, 1, room, dim), empty(SLOTS, 1, latent, room)),
            (empty(tokens * heads, latent), empty(tokens * heads, dim), empty(SLOTS, 1, 1, room, latent),
             empty(SLOTS, heads, dim, room)),
        )  # fmt: skip
        with named("add_expert_adapters", "latents"):
            pairs = expert_adapters.order_pairs(empty(tokens, dtype=torch.int32), ids, SLOTS, heads)
            for x, out, a, b in sides:
                ranks, parts = empty(SLOTS, dtype=torch.int32), empty(out.shape[1], dtype=torch.int32)
                expert_adapters.add_to_pairs(x, out, pairs, ExpertAdapterWeights(a, b, ranks, parts, heads))


def launch_expert_adapters() -> None:
    """For every room of a rank, steps of few and many pairs, gate and up from tokens, and down from pairs."""
    for room, tokens, (parts, rows, cols) in itertools.product(
        (16, 32, 64, 128), (1, 1000), ((2, 1536, 2048), (1, 2048, 768))
    ):
        weights = ExpertAdapterWeights(
            empty(SLOTS, 128, parts, room, cols),
            empty(SLOTS, 128, rows, room),
            empty(SLOTS, dtype=torch.int32),
            empty(rows, dtype=torch.int32),
            128,
        )
        x = empty(tokens if parts == 2 else tokens * 8, cols)
        slots, ids = empty(tokens, dtype=torch.int32), empty(tokens, 8, dtype=torch.int32)
        with named("add_expert_adapters", "all"):
            pairs = expert_adapters.order_pairs(slots, ids, SLOTS, 128)
            expert_adapters.add_to_pairs(x, empty(tokens * 8, rows), pairs, weights)
