"""The ops of each kind of mixer in a step, with their sizes. Its products are not among them: their weights are in the
model's description."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import singledispatch

from sglang.srt.blocks.block_selection.spec import BlockIndexer
from sglang.srt.blocks.compressed.spec import CompressedSparse
from sglang.srt.blocks.gated_delta.spec import GatedDelta
from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.kimi_delta.spec import KimiDelta
from sglang.srt.blocks.mamba2.spec import Mamba2
from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.blocks.pooled_latent.spec import PooledLatent
from sglang.srt.blocks.pooled_sparse.spec import PooledSparse
from sglang.srt.blocks.recurrent_state.spec import CHUNK_TOKENS
from sglang.srt.blocks.region_sparse.spec import RegionSparse
from sglang.srt.blocks.token_selection.spec import TokenIndexer
from sglang.srt.plan.attention_parts import ElementGate, RelativeBias, Whole
from sglang.srt.plan.kv_spec import KV_DTYPE_BYTES, value_bytes
from sglang.srt.plan.latent_record import LatentRecord
from sglang.srt.plan.layer_spec import Mixer, ParallelConfig
from sglang.tuning.attention_model import Keys, Prompt
from sglang.tuning.ops import (
    AllGather,
    AllReduce,
    DecodeAttention,
    Elementwise,
    EntryChoice,
    ExtendAttention,
    GatedDeltaRule,
    LatentAbsorb,
    Linear,
    Op,
    SelectedAttention,
)
from sglang.tuning.predicted_times import FLASHINFER, FLASHINFER_LATENT_DIMS
from sglang.tuning.step import Step, decode_step


@singledispatch
def mixer_ops(mixer: Mixer, parallel: ParallelConfig, step: Step) -> Iterator[tuple[str, Op]]:
    """Yields the ops of a mixer besides its products; of kinds without a function below, none."""
    yield from ()


def _cache_bytes(parallel: ParallelConfig) -> int:
    """Returns the bytes of a cached element: the model has no four-bit kernels, which count as FP8."""
    return math.ceil(value_bytes(parallel.kv_dtype))


@mixer_ops.register
def _grouped(mixer: GQA, parallel: ParallelConfig, step: Step) -> Iterator[tuple[str, Op]]:
    tp, item = parallel.attn_tp_size, _cache_bytes(parallel)
    heads, kv = mixer.shares(tp).padded_heads, mixer.shares(tp).padded_kv_heads
    dims = (mixer.head_dim, mixer.v_head_dim)
    size = step.tokens * (2 * heads + 3 * kv) * mixer.head_dim * 2.0
    if isinstance(mixer.qk_norm, Whole):
        yield from _whole_norm(step.tokens, (heads + kv) * mixer.head_dim, tp)
    yield "qk_norm_rope_store", Elementwise("qk_norm_rope_store", size)
    if (gate := mixer.gate) is not None:
        passes = 3.0 if isinstance(gate, ElementGate) else 2.0  # over 16-bit outputs, results, and gates of elements
        yield gate.op, Elementwise(gate.op, passes * 2 * step.tokens * heads * dims[1])
    if (bias := mixer.softmax.relative_bias) is not None:
        yield "attention_biases", _biases(bias, mixer.window, step, heads)
    sharing = mixer.effective_dcp_size(tp, parallel.ranks.dcp_size)
    yield from _gathered_queries(step, sharing, heads * dims[0])
    if mixer.mask.rows > 1:  # the rows of a draft block count as heads of one token
        one = decode_step(step.batch, step.context)
        yield _attention(one, heads * mixer.mask.rows, kv, dims, item, mixer.window)
    elif isinstance(mixer.indexer, TokenIndexer) and step.context > mixer.top_k:
        choice = EntryChoice(step.tokens, _mean_context(step), step.batch, mixer.indexer.scores.num_heads)
        yield "sparse_indexer", choice
        yield "block_attention", _attention(step, heads, kv, dims, item, mixer.top_k)[1]
    elif isinstance(mixer.indexer, BlockIndexer) and step.context > mixer.top_k:
        yield from _blocks(mixer.indexer, step, heads, kv, dims, item)
    else:
        local = _own_tokens(step, sharing)
        long = parallel.library_prompts and step.tokens >= LONG_PROMPTS and not mixer.window
        here = _in_chunks(local, mixer.window) if mixer.mask.chunked else local
        yield _attention(here, heads * (sharing if step.decodes else 1), kv, dims, item, mixer.window, long)
    yield from _exchanged_parts(step, sharing, heads * dims[1])


@mixer_ops.register
def _latents(mixer: MLA, parallel: ParallelConfig, step: Step) -> Iterator[tuple[str, Op]]:
    tp, item = parallel.attn_tp_size, _cache_bytes(mixer.stored(parallel))
    sharing = mixer.effective_dcp_size(tp, parallel.ranks.dcp_size)
    yield from _latent(mixer, step, mixer.shares(tp).padded_heads, item, sharing, parallel.library_latents)


@mixer_ops.register
def _gated_delta(mixer: GatedDelta, parallel: ParallelConfig, step: Step) -> Iterator[tuple[str, Op]]:
    tp = parallel.attn_tp_size
    heads, keys = mixer.value_heads // tp, mixer.key_heads // tp
    channels = 2 * keys * mixer.key_dim + heads * mixer.value_dim
    yield "causal_conv1d", Elementwise("causal_conv1d", step.tokens * channels * 4.0)
    state = KV_DTYPE_BYTES.get(parallel.state_dtype or mixer.state_dtype, 4)
    rule = GatedDeltaRule(step.batch, step.new, heads, keys, mixer.key_dim, mixer.value_dim, state)
    yield "gated_delta_rule", rule
    yield "gated_rmsnorm", Elementwise("gated_rmsnorm", 6.0 * step.tokens * heads * mixer.value_dim)


@mixer_ops.register
def _mamba(mixer: Mamba2, parallel: ParallelConfig, step: Step) -> Iterator[tuple[str, Op]]:
    tp = parallel.attn_tp_size
    heads = mixer.num_heads // tp
    states = 2.0 * step.batch * heads * mixer.head_dim * mixer.state_dim * 4
    yield (
        "state_space_duality",
        Elementwise("state_space_duality", states + 8.0 * step.tokens * heads * mixer.head_dim, 2),
    )
    yield "causal_conv1d", Elementwise("causal_conv1d", 8.0 * step.tokens * heads * mixer.head_dim)


def _biases(bias: RelativeBias, window: int, step: Step, heads: int) -> Elementwise:
    """Returns the 16-bit product that makes a bias of each distance for each head and token, and the biases that
    attention reads besides keys."""
    seen = min(bias.extent, window or bias.extent, _mean_context(step))
    return Elementwise("attention_biases", 2.0 * step.tokens * heads * (bias.elements + seen))


@mixer_ops.register
def _kimi_delta(mixer: KimiDelta, parallel: ParallelConfig, step: Step) -> Iterator[tuple[str, Op]]:
    """Yields the ops. Prompts take four launches, which pass on cumulative decays in fp32, u, w, and values for pairs
    of tokens."""
    width, heads = mixer.width(parallel.attn_tp_size), mixer.num_heads // parallel.attn_tp_size
    yield "causal_conv1d", Elementwise("causal_conv1d", 12.0 * step.tokens * width)
    item = KV_DTYPE_BYTES.get(parallel.state_dtype or mixer.state_dtype, 4)
    states, rows = 2.0 * step.batch * width * mixer.head_dim * item, 10.0 * step.tokens * width
    intermediate = 0.0 if step.decodes else 2.0 * step.tokens * (8 * width + 6 * heads * CHUNK_TOKENS)
    yield "kimi_delta_rule", Elementwise("kimi_delta_rule", states + rows + intermediate, 1 if step.decodes else 4)
    yield "gated_rmsnorm", Elementwise("gated_rmsnorm", 6.0 * step.tokens * width)


LONG_PROMPTS = 2048
"""Tokens of prompts from which a library computes them; a test holds it to that of `attention/sites`."""


def _whole_norm(tokens: int, columns: int, ranks: int) -> Iterator[tuple[str, Op]]:
    """Yields norms over the heads of all ranks, which all-reduce two fp32 numbers of each token."""
    yield "qk_whole_norm", Elementwise("qk_whole_norm", (6.0 if ranks > 1 else 4.0) * tokens * columns, min(ranks, 2))
    if ranks > 1:
        yield "all_reduce of norms", AllReduce(8 * tokens, ranks)


def _attention(
    step: Step, heads: int, kv: int, dims: tuple[int, int], item: int, window: int = 0, long: bool = False
) -> tuple[str, Op]:
    name = " in a window" if window else ""
    if step.decodes:
        context = min(step.context, window) if window else step.context
        return "decode_attention" + name, DecodeAttention(Keys(step.batch, context, heads, kv, *dims, item))
    prompt = Prompt(step.batch, step.new, heads, kv, *dims, step.context - step.new, window, item)
    if long and not step.verifies and dims[0] == dims[1] and dims[0] in FLASHINFER:
        return "long_prompt_attention", ExtendAttention(prompt, library=True)
    return "extend_attention" + name, ExtendAttention(prompt)


def _in_chunks(step: Step, size: int) -> Step:
    """Returns the step for attention within chunks of `size` tokens: a prompt counts as a request for each chunk; a
    token decoding after the first chunk sees half a chunk on average."""
    if step.decodes:
        return step if step.context <= size else replace(step, context=(size + 1) // 2)
    pieces, new = -(-step.new // size), min(step.new, size)
    before = min((step.context - step.new) % size, size - new)
    return replace(step, batch=step.batch * pieces, new=new, context=before + new)


def _own_tokens(step: Step, sharing: int) -> Step:
    """Returns the step with the tokens of one rank, if `sharing` ranks shard the context in decode; prompts have
    all."""
    return replace(step, context=-(-step.context // sharing)) if step.decodes else step


def _gathered_queries(step: Step, sharing: int, elements: int) -> Iterator[tuple[str, Op]]:
    """Yields the all-gather of queries. elements: of a token's queries on one rank."""
    if sharing > 1 and step.decodes:
        yield "all_gather of queries", AllGather(2 * step.tokens * elements * sharing, sharing)


def _exchanged_parts(step: Step, sharing: int, elements: int) -> Iterator[tuple[str, Op]]:
    """Yields the exchange of partial outputs, as an all-gather of as many bytes. elements: of a token's outputs on one
    rank."""
    if sharing > 1 and step.decodes:
        yield "exchange of parts", AllGather(2 * step.tokens * elements * sharing, sharing)


def _blocks(
    indexer: BlockIndexer, step: Step, heads: int, kv: int, dims: tuple[int, int], item: int
) -> Iterator[tuple[str, Op]]:
    """Yields the indexer's scores (for decoding by the bytes of keys, for prompts as one 16-bit product) and attention
    like that in a window of the chosen tokens. For prompts this is too low: neighbours in a window share reads, but
    blocks are read for each token, if from the L2."""
    dim, context = indexer.head_dim, _mean_context(step)
    if step.decodes:
        yield "block_indexer", Elementwise("block_indexer", 2.0 * dim * step.batch * context, 2)
    else:
        yield "block_indexer", Linear(step.tokens * kv, context, dim)
    yield "block_attention", _attention(step, heads, kv, dims, item, indexer.top_k)[1]


def _latent(
    mixer: MLA, step: Step, heads: int, item: int, sharing: int, library: bool = False
) -> Iterator[tuple[str, Op]]:
    """Yields MLA's ops: absorbed where a step decodes, verifies or selects; other prompts use keys and values computed
    from latents."""
    tokens, lora = step.tokens, mixer.kv_lora_rank
    windowed = " in a window" if mixer.window else ""
    size = tokens * (heads * mixer.qk_dim * 2 + mixer.latent_dim * 2) * 2.0
    yield "latent_norm_rope_store", Elementwise("latent_norm_rope_store", size)
    selects = mixer.sparse and step.context > mixer.top_k
    if mixer.indexer is not None and selects:
        yield "sparse_indexer", EntryChoice(tokens, _mean_context(step), step.batch, mixer.indexer.num_heads)
    if step.decodes or step.verifies or selects:
        yield "latent_absorb", LatentAbsorb(tokens, heads, lora, mixer.nope_dim)
        yield from _gathered_queries(step, sharing, heads * mixer.latent_dim)
        if selects:
            stored = step.batch * step.context
            sizes = (tokens, mixer.top_k, stored, heads * sharing, mixer.latent_dim, lora, item)
            yield "sparse_attention", SelectedAttention(*sizes)
        else:
            context = _own_tokens(step, sharing).context
            context = min(context, mixer.window) if mixer.window else context
            keys_of = Keys(step.batch, context, heads * sharing * step.new, 1, mixer.latent_dim, lora, item, True)
            yield "decode_attention" + windowed, DecodeAttention(keys_of)
        yield from _exchanged_parts(step, sharing, heads * lora)
        yield "latent_absorb", LatentAbsorb(tokens, heads, mixer.v_dim, lora)
    else:
        yield "kv_b", Linear(tokens, heads * (mixer.nope_dim + mixer.v_dim), lora)
        dims = (heads, heads, mixer.qk_dim, mixer.v_dim)
        prompt = Prompt(step.batch, step.new, *dims, step.context - step.new, mixer.window)
        if library and tokens >= LONG_PROMPTS and (mixer.qk_dim, mixer.v_dim) == FLASHINFER_LATENT_DIMS:
            yield "long_latent_prompt", ExtendAttention(prompt, library=True)
        else:
            yield "extend_attention" + windowed, ExtendAttention(prompt)


@mixer_ops.register
def _compressed(mixer: CompressedSparse, parallel: ParallelConfig, step: Step) -> Iterator[tuple[str, Op]]:
    """Yields all ops except the products, whose weights are in the description."""
    tokens, dim, heads = step.tokens, mixer.head_dim, mixer.num_heads // parallel.attn_tp_size
    seen, stored = min(step.context, mixer.window), min(step.context, mixer.window + step.new)
    yield "shared_kv_norm_rope_store", Elementwise("shared_kv_norm_rope_store", 4.0 * tokens * (heads + 1) * dim)
    if mixer.rate:
        entries, top_k = _mean_context(step) // mixer.rate, mixer.most_entries
        scored = mixer.scored_entries(entries)
        if mixer.makes:
            yield "kv_compressor", Elementwise("kv_compressor", 16.0 * tokens * dim, 2)
        if mixer.indexer is not None:
            if mixer.makes:
                yield "kv_compressor", Elementwise("kv_compressor", 16.0 * tokens * mixer.indexer.head_dim, 2)
            if scored > mixer.indexer.top_k:
                yield "sparse_indexer", EntryChoice(tokens, scored, step.batch, mixer.indexer.num_heads)
        entries = min(entries, top_k) if top_k else entries
        seen, stored = seen + entries, stored + step.context // mixer.rate
    record = mixer.record(parallel.kv_dtype)
    yield "sparse_attention", _selected(tokens, seen, step.batch * stored, heads, dim, record)
    yield from _packed(record, tokens, 2 if mixer.makes and mixer.rate else 1)
    yield "tail_rotation", Elementwise("tail_rotation", 4.0 * tokens * heads * mixer.rope_dim)
    groups = max(1, mixer.o_groups * heads // mixer.num_heads)
    # Group by group, with the bytes and operations of one product of this size.
    yield "attn.o_a", Linear(tokens, groups * mixer.o_lora_rank, mixer.group_dim)


@mixer_ops.register
def _pooled(mixer: PooledSparse, parallel: ParallelConfig, step: Step) -> Iterator[tuple[str, Op]]:
    """Yields attention to selected blocks, counted as requests that decode over as many tokens."""
    shares, index, dims = mixer.shares(parallel.attn_tp_size), mixer.indexer, mixer.heads
    heads, kv = shares.padded_heads, shares.padded_kv_heads
    tokens, blocks = step.tokens, _mean_context(step) // mixer.block
    size = 2.0 * tokens * (2 * heads + 3 * kv) * dims.head_dim
    yield "qk_norm_rope_store", Elementwise("qk_norm_rope_store", size)
    yield "kv_compressor", Elementwise("kv_compressor", 16.0 * tokens * index.head_dim, 2)
    if blocks > index.top_k:
        yield "sparse_indexer", EntryChoice(tokens, blocks, step.batch, index.num_heads)
    seen = min(_mean_context(step), mixer.budget + mixer.block - 1)
    keys = Keys(tokens, seen, heads, kv, dims.head_dim, dims.v_head_dim, _cache_bytes(parallel))
    yield "selected_block_attention", DecodeAttention(keys)
    yield "attention_output_gate", Elementwise("attention_output_gate", 6.0 * tokens * heads * dims.v_head_dim)


@mixer_ops.register
def _regions(mixer: RegionSparse, parallel: ParallelConfig, step: Step) -> Iterator[tuple[str, Op]]:
    """Yields attention to selected regions, counted as requests that decode over as many tokens, and the indexers of a
    rank's KV heads as one with more tokens."""
    shares, index, dims = mixer.shares(parallel.attn_tp_size), mixer.indexer, mixer.heads
    heads, kv = shares.padded_heads, shares.padded_kv_heads
    tokens, regions = step.tokens, _mean_context(step) // mixer.block
    size = 2.0 * tokens * (2 * heads + 3 * kv) * dims.head_dim
    yield "qk_norm_rope_store", Elementwise("qk_norm_rope_store", size)
    yield (
        "index_norm_rope",
        Elementwise("index_norm_rope", 4.0 * tokens * (kv * index.num_heads + 2) * index.head_dim, 2),
    )
    yield "kv_compressor", Elementwise("kv_compressor", 16.0 * tokens * index.head_dim, 2)
    if regions > index.top_k:
        # Keys have twice the bytes of those that such a choice counts.
        yield "sparse_indexer", EntryChoice(tokens * kv, regions, step.batch, index.num_heads, 2 * index.head_dim)
    seen = min(_mean_context(step), mixer.budget + mixer.block - 1)
    keys = Keys(tokens, seen, heads, kv, dims.head_dim, dims.v_head_dim, _cache_bytes(parallel))
    yield "block_attention", DecodeAttention(keys)
    if (gate := dims.gate) is not None:
        yield gate.op, Elementwise(gate.op, 4.0 * tokens * heads * dims.v_head_dim)


def _mean_context(step: Step) -> int:
    """Returns the average number of tokens before one of the step."""
    return step.context - (step.new - 1) // 2


@mixer_ops.register
def _pooled_latents(mixer: PooledLatent, parallel: ParallelConfig, step: Step) -> Iterator[tuple[str, Op]]:
    """Yields absorbed attention to the tokens of selected runs, whatever the step, and the indexer, all of whose heads
    every rank has."""
    tokens, index, rank = step.tokens, mixer.indexer, mixer.heads.kv_lora_rank
    heads, context = mixer.shares(parallel.attn_tp_size).padded_heads, _mean_context(step)
    yield "shared_kv_norm_rope_store", Elementwise("shared_kv_norm_rope_store", 4.0 * tokens * rank)
    yield "index_norm_rope", Elementwise("index_norm_rope", 4.0 * tokens * index.head_dim)
    yield "kv_compressor", Elementwise("kv_compressor", 16.0 * tokens * index.head_dim, 2)
    yield "index_queries", Elementwise("index_queries", 3.0 * tokens * index.num_heads * index.head_dim)
    if context // mixer.block > index.top_k:
        yield "sparse_indexer", EntryChoice(tokens, context // mixer.block, step.batch, index.num_heads, index.head_dim)
    yield "latent_absorb", LatentAbsorb(tokens, heads, rank, mixer.heads.nope_dim)
    seen = min(context, mixer.budget + mixer.block - 1)
    record = mixer.record(parallel.kv_dtype)
    yield "sparse_attention", _selected(tokens, seen, step.batch * step.context, heads, rank, record)
    yield from _packed(record, tokens, 1)
    yield "latent_absorb", LatentAbsorb(tokens, heads, mixer.heads.v_dim, rank)


def _selected(
    tokens: int, entries: int, stored: int, heads: int, dim: int, record: LatentRecord | None
) -> SelectedAttention:
    """Returns attention to entries of `dim` columns that are keys and values. Records in four bits have the tiles, and
    the times, of those in eight."""
    item, size = (2, 0) if record is None else (1, record.size)
    return SelectedAttention(tokens, entries, stored, heads, dim, dim, item, size)


def _packed(record: LatentRecord | None, tokens: int, caches: int) -> Iterator[tuple[str, Op]]:
    """Yields what packs rows of 16 bits into records."""
    if record is not None:
        size = float(tokens * caches * (2 * record.dim + record.size))
        yield "latent_record_store", Elementwise("latent_record_store", size, caches)
