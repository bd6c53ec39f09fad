"""Computes when attention to what an indexer selects costs less than attention to all tokens, for one rank."""

from __future__ import annotations

import math

from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_description import ModelDescription

E4M3_COST = 0.5
"""Cost of an e4m3 product relative to a 16-bit one: matrix units have twice the rate."""
MIN_HEADS = 16
"""Rows of the smallest matrix instruction: fewer heads of a rank take as long."""


def prompts_cost_more_until(mixer: MLA, indexed: float, tp_size: int) -> int:
    """Returns the tokens of a prompt up to which attending to selected tokens takes more multiplications than attending
    to all of them with expanded keys and values. `indexed`: the share of the layers that have an indexer.

    A prompt of n tokens takes n^2 heads (qk + v) multiplications for all pairs that see each other, n^2 D H in e4m3 for
    the indexer's scores, and 2 n top_k heads (576 + 512) for what is selected. Example: GLM-5 at TP8, 8 heads of 256 +
    256 dims, 32 x 128 for scores, 2,048 selected: 34,816 tokens.
    """
    assert mixer.indexer is not None
    heads = mixer.shares(tp_size).padded_heads
    dense = heads * (mixer.qk_dim + mixer.v_dim)
    scores = mixer.indexer.num_heads * mixer.indexer.head_dim * E4M3_COST * indexed
    selected = 2 * mixer.top_k * max(MIN_HEADS, heads) * (mixer.latent_dim + mixer.kv_lora_rank)
    return math.ceil(selected / (dense - scores)) if dense > scores else 0


def decoding_reads_less_from(mixer: MLA, indexed: float, parallel: ParallelConfig) -> int:
    """Returns the tokens of a request from which on decode reads fewer cache bytes than all latents."""
    latent, *index = (cache.entry_bytes for cache in mixer.caches(parallel))
    return math.ceil(mixer.top_k * latent / (latent - sum(index) * indexed))


def _describe_blocks(model: ModelDescription) -> str:
    indexers = [layer.mixer.block_indexer for layer in model.layers]
    chosen = [indexer for indexer in indexers if indexer is not None]
    if not chosen:
        return ""
    return (
        f"{len(chosen)} of {len(model.layers)} layers have an indexer that selects {chosen[0].chosen}; requests of up"
        f" to {chosen[0].top_k:,} tokens attend to all of them without scores"
    )


def describe_selection(model: ModelDescription, parallel: ParallelConfig) -> str:
    """Describes the selection for people; "" where no layer selects. All layers with an indexer must be alike."""
    layers = [mixer for layer in model.layers if (mixer := layer.mixer.latents) and mixer.sparse]
    with_indexer = [mixer for mixer in layers if mixer.indexer is not None]
    if not with_indexer:
        return _describe_blocks(model)
    mixer, indexed = with_indexer[0], len(with_indexer) / len(layers)
    bytes_from = decoding_reads_less_from(mixer, indexed, parallel)
    text = (
        f"{len(with_indexer)} of {len(layers)} layers have an indexer that selects {mixer.top_k:,} tokens; requests"
        f" with no more attend to all of them without scores. Decoding reads fewer bytes so from {bytes_from:,} tokens"
        " on"
    )
    until = prompts_cost_more_until(mixer, indexed, parallel.attn_tp_size)
    if until > mixer.top_k:
        text += (
            f"; prompts of up to {until:,} tokens would take fewer multiplications without a selection, but that would"
            " change answers"
        )
    return text
