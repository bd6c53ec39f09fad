"""A step of a model on one rank, op by op, with predicted times, the best measured ones, and floors.

rows = time_step(model, serving, decode_step(batch=16, context=4096), arch)
total(rows).seconds
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import singledispatch

from sglang.srt.blocks.compressed.spec import CompressedSparse
from sglang.srt.blocks.gated_delta.spec import GatedDelta
from sglang.srt.blocks.gated_streams.spec import GatedStreams
from sglang.srt.blocks.hyper_connections.spec import HyperConnections
from sglang.srt.blocks.kimi_delta.spec import KimiDelta
from sglang.srt.blocks.mamba2.spec import Mamba2
from sglang.srt.blocks.ngram_embedding.spec import NgramEmbedding
from sglang.srt.blocks.pooled_sparse.spec import PooledSparse
from sglang.srt.blocks.recurrent_state.spec import CHUNK_TOKENS
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.hardware.topology import Topology
from sglang.srt.kernels.all_reduce_table import quantized_from
from sglang.srt.kernels.ledger_file import Ledger
from sglang.srt.kernels.resolve import resolve
from sglang.srt.kernels.spec import NoKernel
from sglang.srt.plan.attention_parts import ElementGate, RelativeBias, Whole
from sglang.srt.plan.block_selection import BlockIndexer
from sglang.srt.plan.kv_spec import KV_DTYPE_BYTES, value_bytes
from sglang.srt.plan.layer_spec import FeedForward, LayerSpec, Matrix, Mixer, ParallelConfig
from sglang.srt.plan.mixers import GQA, MLA
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.needs import needs_of
from sglang.srt.plan.rank_weights import expert_rows, rank_weights
from sglang.tuning.attention_model import Keys, Prompt
from sglang.tuning.best_times import Best, best
from sglang.tuning.ops import (
    AllGather,
    AllReduce,
    DecodeAttention,
    Elementwise,
    EntryChoice,
    Experts,
    ExtendAttention,
    GatedDeltaRule,
    HyperConnection,
    LatentAbsorb,
    Linear,
    Op,
    QuantizedSum,
    SelectedAttention,
    floor,
)
from sglang.tuning.predicted_times import FLASHINFER, FLASHINFER_LATENT_DIMS, Predicted, predicted
from sglang.tuning.rates import ceilings_of


@dataclass(frozen=True, slots=True)
class Step:
    """`batch` requests. Decoding: one new token each, `context` tokens including it. A prompt: `new` tokens each.
    `verifies`: the `new` tokens are the last one and draft tokens, and all of them have logits."""

    batch: int
    new: int
    context: int
    verifies: bool = False

    @property
    def tokens(self) -> int:
        """Returns the new tokens of all requests."""
        return self.batch * self.new

    @property
    def decodes(self) -> bool:
        """Returns whether each request brings one token."""
        return self.new == 1

    def __str__(self) -> str:
        if self.decodes:
            return f"decode {self.batch} at {self.context} tokens"
        if self.verifies:
            return f"verify {self.new} tokens of each of {self.batch} at {self.context} tokens"
        return f"prefill of {self.tokens} tokens"


def decode_step(batch: int, context: int = 2048) -> Step:
    """Returns a step of `batch` requests that decode, each with `context` cached tokens."""
    return Step(batch, 1, context)


def verify_step(batch: int, width: int, context: int = 2048) -> Step:
    """Returns a step that verifies: each request brings `width` tokens."""
    return Step(batch, width, context, verifies=width > 1)


def prefill_step(tokens: int) -> Step:
    """Returns a step with one prompt and no cached tokens."""
    return Step(1, tokens, tokens)


@dataclass(frozen=True, slots=True)
class TimedOp:
    """`count` equal ops of a step, and the times of one. `own` None: nothing here computes it."""

    name: str
    op: Op
    count: int
    ours: Predicted | None
    best: Best | None
    floor: float

    @property
    def seconds(self) -> float:
        """Returns the seconds of all ops; if nothing here computes one, another framework's time or the floor."""
        one = self.ours.seconds if self.ours else self.best.served if self.best else self.floor
        return self.count * one

    @property
    def lost(self) -> float:
        """Returns the seconds that the best measured kernels would save, by times with the same inputs."""
        return self.count * (self.ours.comparable - self.best.served) if self.ours and self.best else 0.0


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds. `low` and `high`: all predictions off by their error at once. `best`: with the best measured op where
    there is one. `missing`: ops that nothing here computes, counted with others' times."""

    seconds: float
    low: float
    high: float
    best: float
    floor: float
    missing: tuple[str, ...]


def unserved_ops(model: ModelDescription, parallel: ParallelConfig, arch: ArchTraits) -> frozenset[str]:
    """Returns the model's ops that no kernel of this server computes there, as `explain` finds them. Raises
    UserError."""
    unserved = set()
    for need in needs_of(rank_weights(model, parallel.ranks), parallel):
        try:
            resolve(need, arch, Ledger.load(), frozenset({"triton"}))
        except NoKernel:
            unserved.add(need.op)
    return frozenset(unserved)


def time_step(model: ModelDescription, parallel: ParallelConfig, step: Step, arch: ArchTraits) -> list[TimedOp]:
    """Returns the ops of a step with their times. Raises UserError if experts cannot be divided, or for a card that
    nobody measured."""
    return timed(ops_of(model, parallel, step), unserved_ops(model, parallel, arch), arch)


def timed(ops: Iterable[tuple[str, Op]], unserved: frozenset[str], arch: ArchTraits) -> list[TimedOp]:
    """Returns the ops with their times, equal ones joined. Raises UserError for a card that nobody measured."""
    counts: dict[tuple[str, Op], int] = {}
    for name, op in ops:
        counts[name, op] = counts.get((name, op), 0) + 1
    ceilings = ceilings_of(arch)
    return [
        TimedOp(
            name,
            op,
            count,
            None if name.partition(" ")[0] in unserved else predicted(op, arch),
            best(op, arch),
            floor(op, ceilings),
        )
        for (name, op), count in counts.items()
    ]


def total(rows: list[TimedOp]) -> StepTime:
    """Returns the time of a step and its range from the times of its ops."""
    seconds = sum(row.seconds for row in rows)
    off = sum(row.seconds * (row.ours.error if row.ours else 0.3) for row in rows)
    # Errors of different ops partly cancel; those of one kind do not.
    off *= 0.7
    fastest = sum(row.seconds if row.ours is None else row.seconds - max(0.0, row.lost) for row in rows)
    missing = tuple(dict.fromkeys(row.name for row in rows if row.ours is None))
    return StepTime(seconds, seconds - off, seconds + off, fastest, sum(row.count * row.floor for row in rows), missing)


def ops_of(model: ModelDescription, parallel: ParallelConfig, step: Step) -> Iterator[tuple[str, Op]]:
    """Yields the ops of a step in their order, each with its name."""
    tokens, hidden = step.tokens, model.hidden_size
    rows, quant = expert_rows(model, parallel.ranks), model.expert_quant
    scheme = quant.scheme if quant else None
    yield "embedding", Elementwise("embedding", 4.0 * tokens * hidden)
    for i, layer in enumerate(model.layers):
        yield from layer_ops(model, i, layer, parallel, step, rows, scheme)
    yield from head_ops(model, parallel, tokens if step.verifies else step.batch)


def head_ops(model: ModelDescription, parallel: ParallelConfig, rows: int) -> Iterator[tuple[str, Op]]:
    """Yields the ops from the last hidden states of `rows` tokens to sampling."""
    vocab, head = -(-model.vocab_size // parallel.ranks.vocab_tp_size), model.head_quant
    yield "lm_head", Linear(rows, vocab, model.hidden_size, head.scheme if head else None)
    if parallel.tp_size > 1:
        yield "all_gather of logits", AllGather(4 * rows * model.vocab_size, parallel.tp_size)
    yield "sampling", Elementwise("sampling", 4.0 * 3 * rows * model.vocab_size, 3)


def layer_ops(
    model: ModelDescription,
    index: int,
    layer: LayerSpec,
    parallel: ParallelConfig,
    step: Step,
    rows: int,
    expert_scheme: str | None,
) -> Iterator[tuple[str, Op]]:
    """Yields the ops of a layer on one rank, in order, each with its name in reports."""
    tokens, hidden = step.tokens, model.hidden_size
    of_group = step_of_group(step, parallel.attn_dp_size)
    prompt = not step.decodes and not step.verifies
    quantized = parallel.quantized_sums == "all" or (parallel.quantized_sums == "prefill" and prompt)
    mixer = (layer.mixer.weights(hidden, parallel.attn_tp_size), _mixer(layer.mixer, parallel, of_group))
    blocks = [(*mixer, of_group.tokens, _sums(of_group.tokens * hidden, parallel.attn_tp_size, quantized))]
    blocks += (
        (
            block.weights(hidden, parallel.ranks, rows),
            _feed_forward(hidden, block, parallel, tokens, rows, expert_scheme),
            tokens,
            _sums_of_groups(tokens * hidden, parallel, quantized),
        )
        for block in layer.token_blocks
    )
    for parts, ops, computed, sums in blocks:
        matrices = [part for part in parts if isinstance(part, Matrix)]
        if not parts:
            continue
        yield from _residual(layer, of_group.tokens, hidden)
        for matrix in matrices:
            if not matrix.experts:
                quant = model.quant_of(index, matrix)
                yield matrix.name, Linear(computed, matrix.rows, matrix.cols, quant.scheme if quant else None)
        yield from ops
        yield from sums


def step_of_group(step: Step, attn_dp_size: int) -> Step:
    """Returns the busiest attention group's part of a step, where groups have requests of their own."""
    return replace(step, batch=-(-step.batch // attn_dp_size))


def _sums(elements: int, ranks: int, quantized: bool) -> Iterator[tuple[str, Op]]:
    """Yields all-reduces. `quantized`: large ones are sent quantized."""
    if ranks > 1 and quantized and 2 * elements >= quantized_from(Topology.HOST_BRIDGE, ranks)[0]:
        yield "all_reduce in e4m3", QuantizedSum(2 * elements, ranks)
    elif ranks > 1:
        yield "all_reduce", AllReduce(2 * elements, ranks)


def _sums_of_groups(elements: int, parallel: ParallelConfig, quantized: bool) -> Iterator[tuple[str, Op]]:
    """Yields the all-gather of rows and reduce-scatter of sums of attention groups with their own requests: each moves
    half of the bytes of an all-reduce, and counts as an all-reduce of half the size."""
    if parallel.attn_dp_size == 1:
        yield from _sums(elements, parallel.tp_size, quantized)
        return
    yield from _sums(elements // 2, parallel.tp_size, quantized)
    yield from _sums(elements // 2, parallel.tp_size, quantized)
    yield from _sums(elements // parallel.attn_dp_size, parallel.attn_tp_size, quantized)


def _residual(layer: LayerSpec, tokens: int, hidden: int) -> Iterator[tuple[str, Op]]:
    if isinstance(layer.residual, HyperConnections):
        yield "hyper_connection", HyperConnection(tokens, hidden, layer.residual.streams)
    if isinstance(layer.residual, GatedStreams):
        yield from _gated_streams(layer.residual, tokens, hidden)
        return
    yield "fused_add_rmsnorm", Elementwise("fused_add_rmsnorm", 8.0 * tokens * hidden)


@singledispatch
def _mixer(mixer: Mixer, parallel: ParallelConfig, step: Step) -> Iterator[tuple[str, Op]]:
    """Yields the ops of a mixer besides its products; of kinds without a function below, none."""
    yield from ()


def _cache_bytes(parallel: ParallelConfig) -> int:
    """Returns the bytes of a cached element: the model has no four-bit kernels, which count as FP8."""
    return math.ceil(value_bytes(parallel.kv_dtype))


@_mixer.register
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
    sharing = mixer.effective_dcp_size(tp, parallel.dcp_size)
    yield from _gathered_queries(step, sharing, heads * dims[0])
    if mixer.mask.rows > 1:  # the rows of a draft block count as heads of one token
        one = decode_step(step.batch, step.context)
        yield _attention(one, heads * mixer.mask.rows, kv, dims, item, mixer.window)
    elif mixer.indexer is not None and step.context > mixer.top_k:
        yield from _blocks(mixer.indexer, step, heads, kv, dims, item)
    else:
        local = _own_tokens(step, sharing)
        long = parallel.library_prompts and step.tokens >= LONG_PROMPTS and not mixer.window
        here = _in_chunks(local, mixer.window) if mixer.mask.chunked else local
        yield _attention(here, heads * (sharing if step.decodes else 1), kv, dims, item, mixer.window, long)
    yield from _exchanged_parts(step, sharing, heads * dims[1])


@_mixer.register
def _latents(mixer: MLA, parallel: ParallelConfig, step: Step) -> Iterator[tuple[str, Op]]:
    tp, item = parallel.attn_tp_size, _cache_bytes(parallel)
    sharing = mixer.effective_dcp_size(tp, parallel.dcp_size)
    yield from _latent(mixer, step, mixer.shares(tp).padded_heads, item, sharing, parallel.library_latents)


@_mixer.register
def _gated_delta(mixer: GatedDelta, parallel: ParallelConfig, step: Step) -> Iterator[tuple[str, Op]]:
    tp = parallel.attn_tp_size
    heads, keys = mixer.value_heads // tp, mixer.key_heads // tp
    channels = 2 * keys * mixer.key_dim + heads * mixer.value_dim
    yield "causal_conv1d", Elementwise("causal_conv1d", step.tokens * channels * 4.0)
    state = KV_DTYPE_BYTES.get(parallel.state_dtype or mixer.state_dtype, 4)
    rule = GatedDeltaRule(step.batch, step.new, heads, keys, mixer.key_dim, mixer.value_dim, state)
    yield "gated_delta_rule", rule
    yield "gated_rmsnorm", Elementwise("gated_rmsnorm", 6.0 * step.tokens * heads * mixer.value_dim)


@_mixer.register
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


@_mixer.register
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
            keys_of = Keys(step.batch, context, heads * sharing * step.new, 1, mixer.latent_dim, lora, item, True)
            yield "decode_attention", DecodeAttention(keys_of)
        yield from _exchanged_parts(step, sharing, heads * lora)
        yield "latent_absorb", LatentAbsorb(tokens, heads, mixer.v_dim, lora)
    else:
        yield "kv_b", Linear(tokens, heads * (mixer.nope_dim + mixer.v_dim), lora)
        prompt = Prompt(step.batch, step.new, heads, heads, mixer.qk_dim, mixer.v_dim, step.context - step.new)
        if library and tokens >= LONG_PROMPTS and (mixer.qk_dim, mixer.v_dim) == FLASHINFER_LATENT_DIMS:
            yield "long_latent_prompt", ExtendAttention(prompt, library=True)
        else:
            yield "extend_attention", ExtendAttention(prompt)


@_mixer.register
def _compressed(mixer: CompressedSparse, parallel: ParallelConfig, step: Step) -> Iterator[tuple[str, Op]]:
    """Yields all ops except the products, whose weights are in the description. Entries are cached in 16 bits."""
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
    yield "sparse_attention", SelectedAttention(tokens, seen, step.batch * stored, heads, dim, dim)
    yield "tail_rotation", Elementwise("tail_rotation", 4.0 * tokens * heads * mixer.rope_dim)
    groups = max(1, mixer.o_groups * heads // mixer.num_heads)
    # Group by group, with the bytes and operations of one product of this size.
    yield "attn.o_a", Linear(tokens, groups * mixer.o_lora_rank, mixer.group_dim)


@_mixer.register
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


def _gated_streams(residual: GatedStreams, tokens: int, hidden: int) -> Iterator[tuple[str, Op]]:
    """Yields the two products of one of a layer's two blocks, and the launches around them."""
    width = residual.streams * hidden
    yield "gated_streams", Elementwise("gated_streams", 2.0 * tokens * (7 * width + 2 * hidden), 3)
    yield "gated_streams.down", Linear(tokens, residual.rank + residual.streams, width)
    yield "gated_streams.up", Linear(tokens, width, residual.rank)


FROM_HOST = 60.0
"""How much slower a GPU reads rows in the host's memory over PCIe 5 than in its own: a guess, 25 GB/s of 1,540."""


def _ngrams(table: NgramEmbedding, parallel: ParallelConfig, tokens: int) -> Iterator[tuple[str, Op]]:
    """Yields the lookup of n-gram rows, of which each rank has those of its heads, and their use in the streams. Every
    row is read separately, in whole pieces of 32 bytes."""
    ranks, item = parallel.attn_tp_size, KV_DTYPE_BYTES.get(table.table_dtype or parallel.dtype, 2)
    row = table.table_elements(ranks) / table.rank_rows(ranks) * item
    pieces = 32.0 * math.ceil(row / 32) * (FROM_HOST if table.on_host else 1.0)
    yield "ngram_embedding", Elementwise("ngram_embedding", tokens * table.num_heads / ranks * pieces, 2)
    if ranks > 1:
        yield "all_gather of n-grams", AllGather(2 * tokens * table.width, ranks)
    gated = 2.0 * tokens * table.streams * table.stream_size * (3 + 2 * (table.taps > 1))
    yield "ngram_embedding gates", Elementwise("ngram_embedding gates", gated, 2)


def _mean_context(step: Step) -> int:
    """Returns the average number of tokens before one of the step."""
    return step.context - (step.new - 1) // 2


def _feed_forward(
    hidden_size: int,
    ffn: FeedForward,
    parallel: ParallelConfig,
    tokens: int,
    rows: int,
    expert_scheme: str | None,
) -> Iterator[tuple[str, Op]]:
    """Yields the ops of a feed-forward block. With expert parallelism, each rank has its share of the pairs, counted as
    fewer tokens that all choose its experts."""
    if isinstance(ffn, NgramEmbedding):  # a table, which is no part of other blocks
        yield from _ngrams(ffn, parallel, tokens)
    if (experts := ffn.experts) is not None:
        yield experts.router.op, Elementwise(experts.router.op, 4.0 * tokens * experts.num_experts)
        top_k = experts.top_k + experts.fused_shared
        room = parallel.ranks.padded_experts(experts.num_experts) + experts.fused_shared
        share, gate = -(-tokens // parallel.ranks.ep_size), experts.activation.gated
        sizes = (share, room, min(top_k, room), experts.latent_size or hidden_size, rows)
        yield "fused_moe", Experts(*sizes, expert_scheme, experts.bias, gate, parallel.sgl_kernel_experts)
    if (mlp := ffn.mlp) is not None:
        size = 6.0 * tokens * mlp.padded_rows(parallel.tp_size)
        op = (ffn.experts or mlp).activation.op  # of a shared expert with another limit, too
        yield op, Elementwise(op, size)
