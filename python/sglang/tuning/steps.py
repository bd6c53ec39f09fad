"""A step of a model on one rank, op by op, with predicted times, the best measured ones, and floors.

rows = time_step(model, serving, decode_step(batch=16, context=4096), arch)
total(rows).seconds
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from sglang.srt.blocks.gated_streams.spec import GatedStreams
from sglang.srt.blocks.gated_sum.spec import GatedSum
from sglang.srt.blocks.hyper_connections.spec import HyperConnections
from sglang.srt.blocks.ngram_embedding.spec import NgramEmbedding
from sglang.srt.configs.quant_scheme import EXL3
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.hardware.topology import Topology
from sglang.srt.kernels.all_reduce_table import quantized_from
from sglang.srt.kernels.ledger_file import Ledger
from sglang.srt.kernels.resolve import resolve
from sglang.srt.kernels.spec import NoKernel
from sglang.srt.plan.equal_layers import of_each
from sglang.srt.plan.kv_spec import KV_DTYPE_BYTES
from sglang.srt.plan.layer_spec import FeedForward, LayerSpec, ParallelConfig
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.needs import needs_of
from sglang.srt.plan.rank_weights import expert_rows, rank_weights
from sglang.srt.plan.weight_spec import Matrix
from sglang.tuning.best_times import Best, best
from sglang.tuning.mixer_ops import mixer_ops
from sglang.tuning.ops import (
    AllGather,
    AllReduce,
    Elementwise,
    Experts,
    HyperConnection,
    Linear,
    Op,
    QuantizedSum,
    floor,
)
from sglang.tuning.predicted_times import Predicted, predicted
from sglang.tuning.rates import ceilings_of
from sglang.tuning.step import Step


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
    nobody measured, and for EXL3, whose products nobody measured."""
    if model.quantization is not None and EXL3.name in model.quantization.schemes():
        raise UserError("times of products in EXL3 are not predicted")
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
    yield from ops_to_hidden_states(model, parallel, step)
    yield from head_ops(model, parallel, step.tokens if step.verifies else step.batch)


def ops_to_hidden_states(model: ModelDescription, parallel: ParallelConfig, step: Step) -> Iterator[tuple[str, Op]]:
    """Yields the ops of the embedding and of all layers. Those of equal layers are the same objects."""
    hidden, rows, quant = model.hidden_size, partial(expert_rows, model, parallel.ranks), model.expert_quant
    scheme = quant.scheme if quant else None
    yield "embedding", Elementwise("embedding", 4.0 * step.tokens * hidden)
    known: dict[tuple[int, tuple[str | None, ...]], list[tuple[str, Op]]] = {}
    by_layer = of_each(model.layers, lambda layer: layer.weights(hidden, parallel.ranks, rows(layer.ffn.experts)))
    for i, (layer, weights) in enumerate(zip(model.layers, by_layer, strict=True)):
        matrices = (part for part in weights if isinstance(part, Matrix) and not part.experts)
        quants = (model.quant_of(i, matrix) for matrix in matrices)
        kind = id(layer), tuple(quant.scheme if quant else None for quant in quants)
        if kind not in known:
            known[kind] = list(layer_ops(model, i, layer, parallel, step, scheme))
        yield from known[kind]


def head_ops(model: ModelDescription, parallel: ParallelConfig, rows: int) -> Iterator[tuple[str, Op]]:
    """Yields the ops from the last hidden states of `rows` tokens to sampling."""
    vocab, head = -(-model.vocab_size // parallel.ranks.vocab_tp_size), model.head_quant
    yield "lm_head", Linear(rows, vocab, model.hidden_size, head.scheme if head else None)
    if parallel.ranks.tp_size > 1:
        yield "all_gather of logits", AllGather(4 * rows * model.vocab_size, parallel.ranks.tp_size)
    yield "sampling", Elementwise("sampling", 4.0 * 3 * rows * model.vocab_size, 3)


def layer_ops(
    model: ModelDescription,
    index: int,
    layer: LayerSpec,
    parallel: ParallelConfig,
    step: Step,
    expert_scheme: str | None,
) -> Iterator[tuple[str, Op]]:
    """Yields the ops of a layer on one rank, in order, each with its name in reports."""
    tokens, hidden, rows = step.tokens, model.hidden_size, expert_rows(model, parallel.ranks, layer.ffn.experts)
    of_group = step_of_group(step, parallel.ranks.attn_dp_size)
    prompt = not step.decodes and not step.verifies
    quantized = parallel.quantized_sums == "all" or (parallel.quantized_sums == "prefill" and prompt)
    mixer = (layer.mixer.weights(hidden, parallel.attn_tp_size), mixer_ops(layer.mixer, parallel, of_group))
    blocks = [(*mixer, of_group.tokens, _sums(of_group.tokens * hidden, parallel.attn_tp_size, quantized))]
    blocks += (
        (
            block.weights(hidden, parallel.ranks, rows),
            _feed_forward(hidden, block, parallel, tokens, rows, expert_scheme),
            tokens,
            _sums_of_block(block, tokens, hidden, parallel, quantized),
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


def _sums_of_block(
    block: FeedForward, tokens: int, hidden: int, parallel: ParallelConfig, quantized: bool
) -> Iterator[tuple[str, Op]]:
    """Yields the collectives of a feed-forward block: around cut projections of experts (`MoE.cuts_latents`) those of
    their latents, and then what every rank has needs no sum."""
    ranks, experts = parallel.ranks.tp_size, block.experts
    if experts is None or not experts.cuts_latents or ranks == 1:
        yield from _sums_of_groups(tokens * hidden, parallel, quantized)
        return
    if parallel.ranks.attn_dp_size > 1:
        yield "all_gather of rows", AllGather(2 * tokens * hidden, ranks)
    yield from _sums(tokens * experts.latent_size, ranks, quantized)
    for features in (experts.latent_size, hidden):
        if experts.latent_share(features, 0, ranks).count < features:
            yield "all_gather of latents", AllGather(2 * tokens * features, ranks)


def _sums_of_groups(elements: int, parallel: ParallelConfig, quantized: bool) -> Iterator[tuple[str, Op]]:
    """Yields the all-gather of rows and reduce-scatter of sums of attention groups with their own requests: each moves
    half of the bytes of an all-reduce, and counts as an all-reduce of half the size."""
    if parallel.ranks.attn_dp_size == 1:
        yield from _sums(elements, parallel.ranks.tp_size, quantized)
        return
    yield from _sums(elements // 2, parallel.ranks.tp_size, quantized)
    yield from _sums(elements // 2, parallel.ranks.tp_size, quantized)
    yield from _sums(elements // parallel.ranks.attn_dp_size, parallel.attn_tp_size, quantized)


def _residual(layer: LayerSpec, tokens: int, hidden: int) -> Iterator[tuple[str, Op]]:
    if isinstance(layer.residual, HyperConnections):
        yield "hyper_connection", HyperConnection(tokens, hidden, layer.residual.streams)
    if isinstance(layer.residual, GatedStreams):
        yield from _gated_streams(layer.residual, tokens, hidden)
        return
    if isinstance(layer.residual, GatedSum):
        yield "gated_sum", Elementwise("gated_sum", 8.0 * tokens * hidden + 12.0 * hidden)
        return
    yield "fused_add_rmsnorm", Elementwise("fused_add_rmsnorm", 8.0 * tokens * hidden)


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
        size = 6.0 * tokens * mlp.padded_rows(parallel.ranks.tp_size)
        op = (ffn.experts or mlp).activation.op  # of a shared expert with another limit, too
        yield op, Elementwise(op, size)
