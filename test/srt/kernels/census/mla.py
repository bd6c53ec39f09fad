"""Launches of blocks/mla."""

from __future__ import annotations

import itertools

import torch

from sglang.srt.blocks.mla.kernels import latent_pack, latent_prompt, latent_store
from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.blocks.recurrent_state.kernels import gated_norm
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.layers.attention.latent_chunks import LatentChunk
from sglang.srt.layers.attention.triton_ops.sparse_packed import PACKED_BYTES
from sglang.srt.layers.triton_ops import norm, part_rows
from sglang.srt.mem_cache.memory_pool import STORAGE_DTYPES
from sglang.srt.plan.attention_parts import HeadGate

from .gqa import launch_attention
from .inputs import BF16, CACHES, CONTEXT, FP4, SLOTS, empty, tiles_of
from .selection import launch_index_rows, launch_indexer, launch_records, launch_selected_attention, selected


def launch_mla(mixer: MLA, tp_size: int, arch: ArchTraits) -> None:
    """Absorbed attention, the store, and prompts over the prefixes of two requests in two chunks each, or in one that
    their window sees."""
    shape = mixer.attention_shape(tp_size)
    launch_attention(shape, mixer.window, 0.0, mixer.sinks, arch, latent=True)
    if mixer.sparse:
        for dtype, width, stored in (("bfloat16", shape.head_dim, BF16), ("fp8_e4m3", PACKED_BYTES, torch.uint8)):
            cache = empty(SLOTS, 1, width, dtype=stored)
            launch_selected_attention(shape, [(cache, selected(2048))], mixer.sinks, dtype, arch)
        latent_pack.latent_pack_store(empty(100, shape.head_dim), cache, empty(100, dtype=torch.int64))
    record = mixer.record(FP4)
    if record is not None:
        launch_records(shape, mixer.record, [2048], mixer.sinks, arch, in_table=not mixer.sparse)
    if mixer.indexer is not None:
        launch_indexer(mixer.indexer, 1, arch)
        launch_index_rows(mixer.indexer, mixer.rope_dim)
    if isinstance(mixer.gate, HeadGate):
        gated_norm.attention_head_gate(empty(8, shape.num_heads * mixer.v_dim), empty(8, shape.num_heads))
    elif mixer.gate is not None:
        output = empty(8, shape.num_heads * mixer.v_dim)
        gated_norm.attention_output_gate(output, output)
    heads, dim, rank, rot = shape.num_heads, mixer.latent_dim, mixer.kv_lora_rank, mixer.rope_dim
    head_dim, v_dim = prompt = (mixer.qk_dim, mixer.v_dim)
    # The latent is a part of the product that makes q's latent too, or queries.
    before = mixer.q_lora_rank or heads * head_dim
    of_latents = torch.float32 if mixer.norms.scaled else BF16
    of_keys = empty(rot) if mixer.norms.rotary_key else None
    if mixer.q_lora_rank:
        for tokens in (1, 100):
            norm.rmsnorm(empty(tokens, before + dim)[:, :before], empty(before, dtype=of_latents), 1e-6)
    w_uk, w_uv = empty(heads, head_dim - rot, rank), empty(heads, rank, v_dim)
    cos_sin = empty(CONTEXT, rot, dtype=torch.float32)
    bounds = empty(3, dtype=torch.int32)
    for dtype, is_neox_style in itertools.product(CACHES[:1] if mixer.window else CACHES, (False, True)):
        cache = empty(SLOTS, 1, dim, dtype=STORAGE_DTYPES[dtype])
        for tokens, absorbed in ((1, 1), (100, None), (300, 16)):
            latents, positions = empty(tokens, before + dim)[:, before:], empty(tokens, dtype=torch.int64)
            queries = empty(tokens, heads, head_dim)
            if not mixer.q_lora_rank:
                queries = empty(tokens, before + dim)[:, :before].unflatten(-1, (heads, head_dim))
            entries = latent_store.latent_norm_rope_store(
                queries, latents, None if absorbed is None else empty(absorbed, heads, dim), positions, cos_sin,
                empty(rank, dtype=of_latents), 1e-6, cache, positions, 1.0, is_neox_style, of_keys,
            )  # fmt: skip
        chunks = [LatentChunk(empty(64, dtype=torch.int64), bounds)] * (1 if mixer.window else 2)
        if record is not None:
            records = empty(SLOTS, 1, record.size, dtype=torch.uint8)
            latent_prompt.gather_records(records, chunks[0].slots, empty(64, heads, head_dim), record, 1.0)
        for tile in tiles_of("latent_prompt_attention", *prompt, "bfloat16", arch):
            for prefix in ([], chunks):
                out = empty(tokens, heads, v_dim)
                latent_prompt.latent_prompt_attention(
                    queries, entries, w_uk, w_uv, out, bounds, cache, prefix, scale=0.1, window=mixer.window,
                    sinks=empty(heads, dtype=torch.float32) if mixer.sinks else None, tile=tile,
                )  # fmt: skip


def launch_part_exchange(heads: int, v_head_dim: int, ranks: int) -> None:
    """What ranks that share out tokens exchange, merged with sinks and without."""
    for tokens in (1, 100) if ranks > 1 else ():
        parts = empty(tokens, ranks * heads, v_head_dim)
        received = part_rows.pack_parts(parts, empty(tokens, ranks * heads, dtype=torch.float32), ranks)
        for sinks in (None, empty(heads, dtype=torch.float32)):
            part_rows.merge_parts(received, sinks, empty(tokens, heads, v_head_dim))
