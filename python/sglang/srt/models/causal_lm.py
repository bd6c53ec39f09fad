"""A decoder-only language model, built from its description: a table maps each kind of block to its class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sglang.srt.blocks.compressed.layer import BlockWindowAttention, CompressedAttention
from sglang.srt.blocks.compressed.spec import CompressedSparse
from sglang.srt.blocks.engram.layer import EngramBlock
from sglang.srt.blocks.engram.spec import Engram
from sglang.srt.blocks.gated_delta.layer import GatedDeltaNet
from sglang.srt.blocks.gated_delta.spec import GatedDelta
from sglang.srt.blocks.gated_streams.layer import GatedResidual
from sglang.srt.blocks.gated_streams.spec import GatedStreams
from sglang.srt.blocks.gated_sum.layer import GatedSumResidual
from sglang.srt.blocks.gated_sum.spec import GatedSum
from sglang.srt.blocks.gqa.layer import BlockAttention, GQAttention
from sglang.srt.blocks.gqa.shared_cache import SharedCacheAttention
from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.hyper_connections.layer import HyperResidual
from sglang.srt.blocks.hyper_connections.spec import HyperConnections
from sglang.srt.blocks.kimi_delta.layer import KimiDeltaAttention
from sglang.srt.blocks.kimi_delta.spec import KimiDelta
from sglang.srt.blocks.mamba2.layer import Mamba2Mixer
from sglang.srt.blocks.mamba2.spec import Mamba2
from sglang.srt.blocks.mla.layer import LatentAttention
from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.blocks.mlp.alternating import AlternatingMLP
from sglang.srt.blocks.mlp.layer import GatedMLP
from sglang.srt.blocks.mlp.spec import Dense
from sglang.srt.blocks.moe.branches import ExpertBranches
from sglang.srt.blocks.moe.layer import MoELayer
from sglang.srt.blocks.moe.spec import MoE
from sglang.srt.blocks.ngram_embedding.layer import NgramBlock
from sglang.srt.blocks.ngram_embedding.spec import NgramEmbedding
from sglang.srt.blocks.per_layer_embedding.layer import LAYER_INPUTS, PerLayerBlock, PerLayerInputs
from sglang.srt.blocks.per_layer_embedding.spec import PerLayerEmbedding
from sglang.srt.blocks.pooled_latent.layer import PooledLatentAttention
from sglang.srt.blocks.pooled_latent.spec import PooledLatent
from sglang.srt.blocks.pooled_sparse.layer import PooledSparseAttention
from sglang.srt.blocks.pooled_sparse.spec import PooledSparse
from sglang.srt.blocks.region_sparse.layer import RegionSparseAttention
from sglang.srt.blocks.region_sparse.spec import RegionSparse
from sglang.srt.blocks.shared_sparse.layer import SharedSparseAttention
from sglang.srt.blocks.shared_sparse.spec import SharedSparse
from sglang.srt.blocks.short_convolution.layer import ConvolvedOutput
from sglang.srt.blocks.short_convolution.spec import ShortConvolution
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.groups import Groups
from sglang.srt.distributed.ping_pong import Blocks, PingPong
from sglang.srt.errors import UserError
from sglang.srt.layers.adapter_memory import StepTokens
from sglang.srt.layers.adapters import AdapterLayers
from sglang.srt.layers.block import Site
from sglang.srt.layers.embedding import LMHead, VocabParallelEmbedding
from sglang.srt.layers.linear import Unquantized
from sglang.srt.layers.moe.cpu_experts.shared import CpuExperts
from sglang.srt.layers.moe.expert_buffers import ExpertBuffers
from sglang.srt.layers.parameter import Param, QuantMethod, Scope
from sglang.srt.layers.quantization.dense import QuantizedMethod
from sglang.srt.layers.quantization.layout import is_redundant
from sglang.srt.layers.residual import FFN, INPUTS, MIXER, NGRAMS, ResidualStream, SumJoin, SumResidual
from sglang.srt.layers.rotary_embedding import RotaryTables
from sglang.srt.layers.row_exchange import RowExchange
from sglang.srt.layers.shared_block import SharedByAllGroups
from sglang.srt.plan.layer_spec import ABSENT, BLOCK_ROWS, LayerSpec, Sum

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.mem_cache.memory_pool import CacheStore
    from sglang.srt.plan.model_description import ModelDescription
    from sglang.srt.plan.plan import Plan
    from sglang.srt.plan.weight_names import WeightMap

Block = Callable[[torch.Tensor, "ForwardBatch"], torch.Tensor]
"""Computes a block: x [T, H] -> [T, H]."""

WrapBlock = Callable[[str, Any], Any]


@dataclass(frozen=True, slots=True)
class BlockKind:
    """A kind of block. `name`: of its scope in a layer. `build(scope, description of the block, site)` creates one."""

    name: str
    build: Callable[[Scope, Any, Site], Any]


def _grouped_queries(scope: Scope, spec: GQA, site: Site) -> Block:
    if spec.mask.rows > 1:
        return BlockAttention(scope, spec, site)
    return (GQAttention if spec.caches_tokens else SharedCacheAttention)(scope, spec, site)


def _compressed(scope: Scope, spec: CompressedSparse, site: Site) -> Block:
    return (BlockWindowAttention if spec.block > 1 else CompressedAttention)(scope, spec, site)


def _dense(scope: Scope, spec: Dense, site: Site) -> Block:
    return AlternatingMLP(scope, spec) if spec.alternating else GatedMLP(scope, spec)


def _experts(scope: Scope, spec: MoE, site: Site) -> Block:
    return ExpertBranches(scope, spec, site) if spec.branches else MoELayer(scope, spec)


BLOCKS: Mapping[type, BlockKind] = {
    GQA: BlockKind("attn", _grouped_queries),
    MLA: BlockKind("attn", LatentAttention),
    CompressedSparse: BlockKind("attn", _compressed),
    SharedSparse: BlockKind("attn", SharedSparseAttention),
    PooledSparse: BlockKind("attn", PooledSparseAttention),
    PooledLatent: BlockKind("attn", PooledLatentAttention),
    RegionSparse: BlockKind("attn", RegionSparseAttention),
    GatedDelta: BlockKind("gdn", GatedDeltaNet),
    KimiDelta: BlockKind("kda", KimiDeltaAttention),
    Mamba2: BlockKind("ssm", Mamba2Mixer),
    Dense: BlockKind("mlp", _dense),
    MoE: BlockKind("moe", _experts),
    PerLayerEmbedding: BlockKind("inputs", PerLayerBlock),
    NgramEmbedding: BlockKind("ngrams", NgramBlock),
    Engram: BlockKind("ngrams", EngramBlock),
}
"""Kinds of blocks, by the type of a LayerSpec's mixer, ffn, inputs or ngrams."""
RESIDUALS: Mapping[type, Callable[..., ResidualStream]] = {
    Sum: SumResidual,
    HyperConnections: HyperResidual,
    GatedStreams: GatedResidual,
    GatedSum: GatedSumResidual,
}
"""Residual streams, by the type of a LayerSpec's residual: built with (scope of the model, ModelDescription,
residual)."""


class DecoderLayer:
    """A decoder layer: a mixer, a feed-forward block or both, and optional per-layer inputs and n-grams, joined to the
    residual stream."""

    def __init__(
        self, scope: Scope, spec: LayerSpec, site: Site, residual: ResidualStream, around: WrapBlock | None = None
    ) -> None:
        """`around`: wraps each block, given its name."""
        around = around or (lambda name, block: block)
        self.blocks = [
            (residual.join(scope, name), around(name, _build_layer_block(scope, name, block, site, spec.convolution)))
            for name, block in ((NGRAMS, spec.ngrams), (MIXER, spec.mixer), (FFN, spec.ffn), (INPUTS, spec.inputs))
            if block != ABSENT
        ]
        for join, block in self.blocks:
            join.attach(block)
        self.residual = residual
        self.aux_layer: int | None = None
        """Number of the preceding layer if a draft reads its output stream, which this layer then stores in
        `batch.layer_outputs`."""

    def __call__(self, stream: Any, batch: ForwardBatch) -> None:
        for _ in self.by_block(stream, batch):
            pass

    def by_block(self, stream: Any, batch: ForwardBatch) -> Iterator[None]:
        """Computes the layer, and yields after each block."""
        # Feed-forward blocks get the batch too: routing may read token ids and which rows are padding.
        for number, (join, block) in enumerate(self.blocks):
            rows = join.before(stream)
            if self.aux_layer is not None and number == 0:  # the norm has added up what the layer before it made
                batch.layer_outputs[self.aux_layer] = self.residual.aux_hidden_state(stream)
            join.after(stream, block(rows, batch))
            yield

    @property
    def defers_all_reduce(self) -> bool:
        """Returns whether every block leaves its all-reduce to the next norm."""
        return all(isinstance(join, SumJoin) and join.group is not None for join, _ in self.blocks)


def _build_layer_block(scope: Scope, name: str, spec: object, site: Site, convolution: ShortConvolution | None) -> Any:
    """Builds a block of a layer, with its convolution if there is one. With data-parallel attention a feed-forward
    block computes the tokens of all attention groups, other blocks those of their own group."""
    block = build_block(scope, spec, site)
    if name == FFN and scope.groups.dp.size > 1:
        block = SharedByAllGroups(block, reads_ids=isinstance(spec, MoE) and spec.router.reads_ids)
    place = {MIXER: "mixer", FFN: "ffn"}.get(name)
    if convolution is None or place is None:
        return block
    cache = scope.cache(site.layer_id, BLOCK_ROWS)
    return ConvolvedOutput(scope.sub(f"{place}_convolution"), convolution, block, cache, place)


@dataclass(frozen=True, slots=True)
class AuxLayers:
    """The target layers whose residual streams a draft reads (`layers`). The stream after a layer is taken where the
    next one begins: `taken` in this pipeline stage, `received` from earlier stages, and `sent` to the next stage."""

    layers: tuple[int, ...] = ()
    taken: frozenset[int] = frozenset()
    received: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()

    @classmethod
    def of(cls, layers: Sequence[int], here: Sequence[bool]) -> AuxLayers:
        """Returns the aux layers of this stage. `here`: which layers it has."""
        first, end = here.index(True), len(here) - 1 - [*reversed(here)].index(True) + 1
        distinct = dict.fromkeys(layers)
        last = end == len(here)
        taken = [layer for layer in distinct if first <= layer + 1 < end or (last and layer + 1 == end)]
        received = [layer for layer in distinct if layer + 1 < first]
        return cls(tuple(layers), frozenset(taken), tuple(received), (*received, *taken))


def build_block(scope: Scope, spec: object, site: Site) -> Any:
    """Builds the block that `spec` describes. Raises UserError for an unknown kind."""
    kind = BLOCKS.get(type(spec))
    if kind is None:
        raise UserError(f"{site.model.architecture}: nothing here computes {type(spec).__name__} layers yet")
    return kind.build(scope.sub(kind.name), spec, site)


def embedding_of(scope: Scope, model: ModelDescription) -> VocabParallelEmbedding:
    """Returns the embedding of the model, with its norm if it has one."""
    norm = model.embedding.norm
    embedding = VocabParallelEmbedding(
        scope.sub("embed"),
        model.vocab_size,
        model.hidden_size,
        model.embedding.scale,
        None if norm is None else model.norm_eps,
        model.stored_vocab_size,
        model.embedding.on_host,
    )
    if norm is None and scope.adapters is not None:
        embedding.take_adapters(scope.adapters, scope.sub("embed").module(), model.vocab_size)
    if norm is not None and norm.weighted:
        embedding.multiply_by(scope.sub("embed_norm"))
    return embedding


def _residual_stream(scope: Scope, model: ModelDescription) -> ResidualStream:
    """Creates the residual stream of all layers. Raises UserError for one that nothing computes, or for several."""
    first = model.layers[0].residual
    if other := next((layer.residual for layer in model.layers if layer.residual != first), None):
        raise UserError(
            f"{model.architecture}: layers have the residual streams {first} and {other}; all have one here"
        )
    kind = RESIDUALS.get(type(first))
    if kind is None:
        raise UserError(f"{model.architecture}: nothing here computes {first} yet")
    return kind(scope, model, first)


class Loadable(Protocol):
    """Parameters with their places in a checkpoint."""

    weights: WeightMap
    params: dict[str, Param]
    finish: list[Callable[[], None]]
    base_prefix: str
    """Prefix that names may lack in checkpoints saved without a head."""

    def ignored_weight(self, name: str) -> bool:
        """Returns whether this rank needs nothing of a checkpoint tensor."""


class CausalLM:
    """A decoder-only model. Construction allocates parameters; the loader fills `params`, the runner's pools `caches`.

    `model(batch)` -> hidden states [T, H] after the final norm; `model.logits(hidden [R, H])` -> [R, V] fp32. Both run
    under torch.inference_mode of the caller and are safe to capture in a CUDA graph.

    A pipeline stage receives its input from the previous stage and sends its output to the next; `compute` runs its
    layers between. Stages before the last return empty logits [R, 0].
    """

    expert_buffers: ExpertBuffers | None = None
    cpu_experts: CpuExperts | None = None
    """What layers whose experts lie in main memory share."""
    base_prefix = "model."
    """Prefix that names lack in checkpoints saved without a head, such as embedding models."""

    def __init__(
        self,
        plan: Plan,
        device: torch.device | str | None = None,
        first_layer: int = 0,
        groups: Groups | None = None,
    ) -> None:
        """Allocates the parameters. `device` overrides the plan's; `meta` builds the shapes only. `first_layer`: number
        of the first layer's caches. `groups`: None for those of this process."""
        scope = self._begin(plan, device, groups, first_layer)
        model = self.description
        self.vocab_is_in_group = plan.ranks.vocab_tp_size == plan.ranks.attn_tp_size
        """True if the ranks that share the vocabulary have the same requests."""
        self.embed: VocabParallelEmbedding | None = None
        if model.has_embedding:
            self.embed = embedding_of(scope, model)
        inputs = model.per_layer_inputs
        self.layer_inputs = None if inputs is None else PerLayerInputs(scope.sub("per_layer"), model, inputs)
        rotary = RotaryTables(plan.num_positions, plan.context_len, scope.device)
        self.residual = _residual_stream(scope, model)
        self.layers = [
            DecoderLayer(scope.sub("layers").sub(i), layer, Site(i, model, rotary), self.residual)
            for i, layer in enumerate(model.layers)
        ]
        self.defers_all_reduce = (
            scope.groups.dp.size == 1
            and all(layer.defers_all_reduce for layer in self.layers)
            and all(layer.mixer.defers_all_reduce for layer in model.layers)
        )
        """True if all blocks defer their all-reduce and use no other collective, so that microbatches of a step can
        alternate block by block."""
        tied_to = self.embed if model.tie_embeddings else None
        self.head: LMHead | None = None
        if model.last_stage:
            self.head = LMHead(
                scope.sub("lm_head"),
                model.vocab_size,
                tied_to,
                model.logits.cap,
                model.logits.scale,
                model.stored_vocab_size,
            )
        self.aux_layers = AuxLayers.of(plan.aux_layers, [not layer.on_other_stage for layer in model.layers])
        """Layers whose residual streams a draft reads; the last stage puts the streams into
        `batch.aux_hidden_states`."""
        self.aux_keeps_streams = plan.aux_keeps_streams
        for i in self.aux_layers.taken:
            if i + 1 < len(self.layers):
                self.layers[i + 1].aux_layer = i

    def _begin(
        self, plan: Plan, device: torch.device | str | None, groups: Groups | None, first_layer: int = 0
    ) -> Scope:
        """Returns the scope of the model's parameters; arguments as in `__init__`. What is allocated in it is in
        `params`, `caches`, `on_other_ranks` and `finish`."""
        self.description = model = plan.description
        quantization = model.quantization
        quant: QuantMethod = Unquantized() if quantization is None else QuantizedMethod(quantization)
        place, dtype = torch.device(device or plan.device), getattr(torch, plan.dtype)
        self.adapters = None if plan.adapters is None else AdapterLayers(plan, place, dtype)
        """LoRA adapters of the linear layers; None: the server takes none."""
        scope = Scope(
            plan=plan,
            device=place,
            dtype=dtype,
            groups=groups or parallel_state.groups(),
            quant=quant,
            weights=model.names,
            first_layer=first_layer,
            adapters=self.adapters,
        )
        self.weights = model.names
        self.expert_buffers, self.cpu_experts = scope.buffers, scope.cpu_experts
        self.params: dict[str, Param] = scope.params
        self.on_other_ranks, self.finish = scope.on_other_ranks, scope.finish
        self.caches: list[CacheStore] = scope.caches
        self.beside: dict[str, Loadable] = {}
        """Parts with checkpoints of their own, by their folder in the model's directory."""
        self.pp, self.dtype, self.device = scope.groups.pp, scope.dtype, scope.device
        return scope

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        received = self.input_buffer(len(batch.input_ids))
        if received is not None:
            self.pp.receive_from_previous(received)
        hidden = self.compute(batch, received)
        if not self.description.last_stage:
            self.pp.send_to_next(hidden)
        return hidden

    def forward_microbatches(
        self, batch: ForwardBatch, microbatches: tuple[ForwardBatch, ForwardBatch], ping_pong: PingPong
    ) -> torch.Tensor:
        """Returns the same as a call with `batch`, whose tokens are those of the microbatches one after the other. They
        alternate, so that the all-reduces of one travel while the other computes. Further tokens of the second
        microbatch are padding, for an attention group without work in it."""
        num_tokens, first, second = (len(part.input_ids) for part in (batch, *microbatches))
        received = self.input_buffer(first + second)
        if received is not None:
            self.pp.receive_from_previous(received[:num_tokens])
            received[num_tokens:] = 0
        parts = (None, None) if received is None else (received[:first], received[first:])
        both = zip(microbatches, parts, strict=True)
        if self.defers_all_reduce:
            computed = ping_pong.run_blocks(*(self.by_block(*microbatch) for microbatch in both))
        else:
            computed = ping_pong.run(*(partial(self.compute, *microbatch) for microbatch in both))
        hidden = torch.cat(computed)[:num_tokens]
        by_layer = zip(*(microbatch.aux_hidden_states for microbatch in microbatches), strict=True)
        batch.aux_hidden_states = [torch.cat(rows)[:num_tokens] for rows in by_layer]
        if not self.description.last_stage:
            self.pp.send_to_next(hidden)
        return hidden

    def input_buffer(self, num_tokens: int) -> torch.Tensor | None:
        """Returns a buffer [T, streams * H], with H more columns per received aux layer, for the intermediate tensors
        of the previous stage; None in the first stage."""
        if self.description.first_stage:
            return None
        residual = self.description.layers[0].residual
        width = (residual.streams + len(self.aux_layers.received)) * self.description.hidden_size
        width += residual.intermediate_elements(self.dtype.itemsize)
        return torch.empty((num_tokens, width), dtype=self.dtype, device=self.device)

    def compute(self, batch: ForwardBatch, received: torch.Tensor | None) -> torch.Tensor:
        """Computes this stage's layers. received: intermediate tensors of the previous stage (`input_buffer`), whose
        storage may be reused."""
        blocks = self.by_block(batch, received)
        while True:
            try:
                next(blocks)
            except StopIteration as end:
                hidden: torch.Tensor = end.value
                return hidden

    def by_block(self, batch: ForwardBatch, received: torch.Tensor | None) -> Blocks[torch.Tensor]:
        """Computes as `compute` does, and yields after each block."""
        if self.adapters is not None:
            self.adapters.begin_step(batch.adapter_slots)
        if received is not None:
            received = self._take_aux(received, batch)
        residual = self.residual
        stream = residual.begin(self._embedded(batch)) if received is None else residual.resume(received)
        rows = batch.embedding_rows
        num_levels = 0 if rows is None else rows.num_levels
        for number, layer in enumerate(self.layers):
            if batch.loads is not None:
                batch.loads.before(number)
            blocks = layer.by_block(stream, batch)
            yield from blocks if self.adapters is None else self.adapters.resumed(blocks)
            if rows is not None and number < num_levels and layer.blocks:
                rows.add_behind(number, residual.partial_sum(stream))
        if not self.description.last_stage:
            aux = [batch.layer_outputs[layer] for layer in self.aux_layers.sent]
            intermediate = self.residual.to_intermediate(stream)
            return torch.cat((intermediate, *aux), dim=-1) if aux else intermediate
        hidden = self.residual.finish(stream)
        if len(self.layers) - 1 in self.aux_layers.taken:
            read = residual.to_intermediate if self.aux_keeps_streams else residual.aux_hidden_state
            batch.layer_outputs[len(self.layers) - 1] = read(stream)
        batch.aux_hidden_states = [batch.layer_outputs[layer] for layer in self.aux_layers.layers]
        return hidden

    def _take_aux(self, received: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Takes the aux hidden states out of `received` and returns the stream [T, H]."""
        layers, hidden_size = self.aux_layers.received, self.description.hidden_size
        if not layers:
            return received
        streams = received.shape[-1] - len(layers) * hidden_size
        rows, *aux = received.split((streams, *[hidden_size] * len(layers)), dim=-1)
        batch.layer_outputs |= dict(zip(layers, aux, strict=True))
        return rows.contiguous()

    def logits(self, hidden: torch.Tensor, adapter_slots: torch.Tensor | None = None) -> torch.Tensor:
        """Returns logits [R, V] fp32 of hidden [R, H] on every rank. adapter_slots [R] int32: as in ForwardBatch."""
        if self.head is None:
            return hidden.new_empty((len(hidden), 0), dtype=torch.float32)
        return self.head(hidden, self._head_tokens(adapter_slots))

    def step_logits(
        self, hidden: torch.Tensor, exchange: RowExchange | None, adapter_slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns logits as `logits` does, or, with many rows and several ranks, this rank's columns
        (`LMHead.of_step`). exchange: gathers the rows of all attention groups, and the logits are then of all these
        rows, padding included."""
        if self.head is None:
            return self.logits(hidden)
        if exchange is not None and not self.vocab_is_in_group:
            hidden = exchange.gather(hidden)
        return self.head.of_step(hidden, self._head_tokens(adapter_slots))

    def slots_of_rows(self, batch: ForwardBatch, rows: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the slot of the adapter of each of these rows of a step [R] int32, None: of all, for the output head;
        None: it has no adapters."""
        slots = batch.adapter_slots
        if slots is None or self.head is None or self.head.adapters is None:
            return None
        return slots if rows is None else slots[rows]

    def _head_tokens(self, adapter_slots: torch.Tensor | None) -> StepTokens | None:
        return None if adapter_slots is None or self.adapters is None else self.adapters.ordered(adapter_slots)

    def _embedded(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns the embeddings [T, H] of the token ids, with image features in their places."""
        assert self.embed is not None, "the first stage has it"
        ids, rows = batch.input_ids, batch.embedding_rows
        exchange = None if self.vocab_is_in_group else batch.exchange
        embedded = self.embed.of_step(ids, exchange)
        if rows is not None:
            embedded = rows.put(embedded)
        if self.layer_inputs is not None:
            if rows is not None and self.description.media is not None:
                ids = rows.put_ids(ids, self.description.media.plain_token)
            batch.step_cache[LAYER_INPUTS] = self.layer_inputs(ids, embedded, exchange)
        return embedded

    def ignored_weight(self, name: str) -> bool:
        """Returns whether this rank needs nothing of a checkpoint tensor."""
        # Whatever repeats the embedding, quantized or not.
        tied_head = self.description.tie_embeddings and name.startswith(self.weights.model["lm_head"] + ".")
        if tied_head or name in self.on_other_ranks:
            return True
        if name.startswith(self.weights.unread) or name.endswith(self.weights.ignore):
            return True
        return is_redundant(self.description.quantization, name)
