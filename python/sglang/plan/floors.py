"""Lower bounds of a step's time: the bytes and multiplications that it cannot do without, at the rates of a GPU.

A floor counts what a rank must read (weights once, the caches that its requests attend to) over the memory's bandwidth,
what it must multiply over the rate of the chosen kernels' matrix instructions, and what collectives must send over the
link. It leaves out launches, norms, routing, and what kernels fall short of these rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from sglang.srt.blocks.moe.spec import MoE
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.spec import Choice
from sglang.srt.plan.cache_spec import CacheSpec, PerRequest, Window
from sglang.srt.plan.equal_layers import of_each
from sglang.srt.plan.kv_spec import KV_DTYPE_BYTES
from sglang.srt.plan.layer_spec import ABSENT, LayerSpec, ParallelConfig
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.rank_weights import RankWeights, rank_weights
from sglang.srt.plan.weight_spec import Matrix
from sglang.srt.plan.weights import matrix_bytes
from sglang.tuning.cost_model import used_blocks
from sglang.tuning.rates import rates_of

CHOSEN_BY_INDEX = frozenset({"latent", "compressed"})
"""Names of the caches of which attention reads only the entries that an indexer selects, if the model has one."""
HALF = ("wgmma bf16",)
"""Instructions that stand for 16-bit products whose kernel is not recorded; they have every GPU's full rate."""
BETWEEN_MACHINES = "200 Gb/s"
"""The link between two DGX Sparks, as published."""
LINK_RATES: Mapping[str, float] = {"PCIe 5 x16": 63e9, "NVLink": 450e9, BETWEEN_MACHINES: 25e9}
"""Bytes a second of each link, in each direction."""
NCCL_SECONDS: Mapping[int, tuple[tuple[int, float], ...]] = {
    2: ((4096, 6.6e-6), (65536, 10.5e-6), (1 << 20, 59e-6)),
    4: ((4096, 13.5e-6), (65536, 20.9e-6), (1 << 20, 117e-6)),
    8: ((4096, 26.1e-6), (65536, 39.6e-6), (1 << 20, 194e-6)),
}
"""Ranks -> (bytes of a message, seconds of an all-reduce), measured with NCCL 2.29.2 on RTX PRO 6000 Server cards."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The floor of one step, on one rank. `flop_seconds` None: the rate of some instruction is unknown."""

    read_bytes: float
    read_seconds: float
    flops: float
    flop_seconds: float | None
    reduced_bytes: float  # bytes that each rank sends, and receives, in collectives
    link_seconds: float
    nccl_seconds: float  # measured time of these collectives, which is no floor

    @property
    def seconds(self) -> float:
        """Lower bound of the step's seconds."""
        return max(self.read_seconds, self.flop_seconds or 0.0) + self.link_seconds

    @property
    def seconds_with_nccl(self) -> float:
        """The floor, with collectives as measured with NCCL if they take longer."""
        return max(self.read_seconds, self.flop_seconds or 0.0) + max(self.link_seconds, self.nccl_seconds)


@dataclass(frozen=True)
class StepFloors:
    """Computes the floors of steps, for one rank of a model on a GPU. `choices`: the kernels of its needs, by key."""

    model: ModelDescription
    parallel: ParallelConfig
    arch: ArchTraits
    choices: Mapping[str, Choice]
    crosses_machines: bool = False
    """True: the ranks of an all-reduce are on several machines."""

    def decode(self, num_requests: int, length: int) -> Floor:
        """Returns the floor of a decode step of `num_requests` requests, each `length` tokens long."""
        of_group = -(-num_requests // self.parallel.ranks.attn_dp_size)
        read = self._weight_bytes(num_requests) + of_group * self._cache_bytes(length)
        pairs = sum(of_each(self.model.layers, lambda layer: self._attended(layer, length, _entries)))
        return self._floor(read, num_requests, of_group * pairs, num_requests, self._exchanged(num_requests))

    def prefill(self, num_tokens: int) -> Floor:
        """Returns the floor of the prefill of one prompt without a cached prefix, with the logits of its last token."""
        pairs = sum(of_each(self.model.layers, lambda layer: self._attended(layer, num_tokens, _entries_of_all)))
        return self._floor(self._weight_bytes(num_tokens), num_tokens, pairs, 1)

    def _exchanged(self, num_requests: int) -> list[float]:
        """Returns the bytes of each collective in which DCP ranks gather queries and exchange partial attention: those
        that one rank receives or keeps. An all-reduce of half the bytes would take as long."""
        ranks, sizes = self.parallel.ranks, []
        for site in (layer.mixer.attention_site(ranks.attn_tp_size, ranks.dcp_size) for layer in self.model.layers):
            if site is not None and site.dcp_size > 1:
                heads = num_requests * site.gathered.num_heads * self._item
                sizes += [float(heads * site.shape.head_dim), float(heads * site.shape.v_head_dim)]
        return sizes

    def exchange_seconds(self, num_requests: int) -> float:
        """Returns the seconds of the DCP collectives of a decode step, as measured with NCCL."""
        return self._exchange_seconds(self._exchanged(num_requests))

    def _exchange_seconds(self, exchanged: Sequence[float]) -> float:
        return sum(nccl_seconds(self.parallel.ranks.dcp_size, size / 2) for size in exchanged)

    def _floor(self, read: float, tokens: int, attention: float, logits: int, exchanged: Sequence[float] = ()) -> Floor:
        flops, seconds = attention, self._seconds_of(attention, HALF)
        head = self.model.head_quant
        products = [(f"linear/{head.scheme}" if head else "linear", 2.0 * self._head.rows * self._head.cols * logits)]
        products += [(key, 2.0 * elements * tokens) for key, elements in self._elements.items()]
        for key, work in products:
            flops += work
            more = self._seconds_of(work, self._instructions(key))
            seconds = None if seconds is None or more is None else seconds + more
        message = tokens * self.model.hidden_size * KV_DTYPE_BYTES[self.parallel.dtype]
        ranks, reduces = self.parallel.ranks.tp_size, self._reduces
        sent = reduces * 2 * (ranks - 1) / ranks * message
        sharing = self.parallel.ranks.dcp_size
        sent += sum(exchanged) * (sharing - 1) / sharing
        nccl = 0.0
        if ranks > 1 and self.link != "NVLink":
            nccl = reduces * nccl_seconds(ranks, message) + self._exchange_seconds(exchanged)
        return Floor(read, read / self.arch.bandwidth, flops, seconds, sent, sent / LINK_RATES[self.link], nccl)

    @property
    def link(self) -> str:
        """Name of the ranks' link, a key of LINK_RATES."""
        if self.crosses_machines:
            return BETWEEN_MACHINES
        return "NVLink" if "nvlink" in self.arch.features else "PCIe 5 x16"

    def _instructions(self, key: str) -> tuple[str, ...]:
        choice = self.choices.get(key)
        return (choice.record.mma if choice is not None and choice.record is not None else ()) or HALF

    def _seconds_of(self, flops: float, instructions: tuple[str, ...]) -> float | None:
        try:
            return flops / rates_of(self.arch).slowest_rate(instructions)
        except UserError:
            return None

    @cached_property
    def _held(self) -> RankWeights:
        return rank_weights(self.model, self.parallel.ranks)

    @cached_property
    def _item(self) -> int:
        return KV_DTYPE_BYTES[self.parallel.dtype]

    @property
    def _head(self) -> Matrix:
        """The output head on this rank."""
        return self._held.head

    @cached_property
    def _elements(self) -> Mapping[str, float]:
        """Elements of the weights that every token is multiplied with, without the output head, by the need's key."""
        totals: dict[str, float] = {}
        for matrix, quant, experts in self._held.matrices_of_layers():
            key = "fused_moe" if matrix.experts else f"linear/{quant.scheme}" if quant else "linear"
            times = self._chosen(experts) if matrix.experts and experts is not None else 1
            totals[key] = totals.get(key, 0.0) + float(matrix.rows * matrix.cols * times)
        return totals

    def _chosen(self, experts: MoE) -> float:
        """Returns the average number of a token's experts of a layer on this rank."""
        return experts.top_k / self.parallel.ranks.ep_size + experts.fused_shared

    def _weight_bytes(self, num_tokens: int) -> float:
        """Returns the bytes of weights that a step reads; of the experts those that some token is expected to
        choose."""
        total = float(matrix_bytes(self._head, self.model.head_quant, self._item))
        for matrix, quant, experts in self._held.matrices_of_layers():
            size = matrix_bytes(matrix, quant, self._item if matrix.dtype is None else KV_DTYPE_BYTES[matrix.dtype])
            total += size * self._share_read(matrix, experts, num_tokens)
        return total

    def _share_read(self, matrix: Matrix, experts: MoE | None, num_tokens: int) -> float:
        if not matrix.experts or experts is None:
            return 1.0
        used, _ = used_blocks(num_tokens, experts.num_experts, experts.top_k, 16)
        return (used / self.parallel.ranks.ep_size + experts.fused_shared) / matrix.experts

    def _cache_bytes(self, length: int) -> float:
        by_layer = of_each(self.model.layers, lambda layer: layer.caches(self.parallel))
        return sum(cache.entry_bytes * self._read(cache, length, _entries) for caches in by_layer for cache in caches)

    def _read(self, cache: CacheSpec, length: int, count: Callable[[int, float, float], float]) -> float:
        """Returns the entries of one request's cache that attention reads. A state counts twice: it is read and
        written."""
        if isinstance(cache.lifetime, PerRequest):
            return 2.0 if cache.name == "state" else 0.0
        reach, rate = float(length), float(cache.entries_per_token)
        if isinstance(cache.lifetime, Window):
            reach = cache.lifetime.tokens
        elif self._index_top_k and (cache.name in CHOSEN_BY_INDEX or (cache.name == "kv" and cache.neighbours > 1)):
            reach = self._index_top_k / (rate * cache.dcp_size)
        elif self._block_budget and cache.name == "kv":
            reach = self._block_budget
        return count(length, min(reach, length), rate)

    @cached_property
    def _index_top_k(self) -> int:
        """Number of entries that the indexers select; 0: no layer has one."""
        indexers = (getattr(layer.mixer, "indexer", None) for layer in self.model.layers)
        return next((indexer.top_k for indexer in indexers if indexer is not None), 0)

    @cached_property
    def _block_budget(self) -> int:
        """Most tokens in the selected blocks; 0: no layer selects blocks."""
        return next((layer.mixer.block_budget for layer in self.model.layers if layer.mixer.block_budget), 0)

    def _attended(self, layer: LayerSpec, length: int, count: Callable[[int, float, float], float]) -> float:
        """Returns the operations of a rank's heads over the entries that they attend to, without an indexer's
        scores."""
        mixer, shape = layer.mixer, layer.mixer.attention_shape(self.parallel.attn_tp_size)
        if shape is None:
            return 0.0
        dims = shape.head_dim + shape.v_head_dim
        if (latents := mixer.latents) and count is _entries_of_all:
            dims = latents.qk_dim + latents.v_dim
        caches = [
            c for c in mixer.caches(self.parallel) if not isinstance(c.lifetime, PerRequest) and c.name != "index"
        ]
        # A DCP rank attends to its own tokens, with the heads of all DCP ranks.
        return 2.0 * shape.num_heads * dims * sum(self._read(c, length, count) * c.dcp_size for c in caches)

    @cached_property
    def _reduces(self) -> int:
        """Number of all-reduces of a step: one after the embedding, one after each block."""
        if self.parallel.ranks.tp_size == 1:
            return 0
        return 1 + sum(block != ABSENT for layer in self.model.layers for block in (layer.mixer, layer.ffn))


def _entries(length: int, reach: float, rate: float) -> float:
    """Returns the number of cache entries that the last of `length` tokens attends to."""
    return reach * rate


def _entries_of_all(length: int, reach: float, rate: float) -> float:
    """Returns the sum of the entries that each of `length` tokens attends to: i for the i-th token, at most `reach`."""
    return (reach * (reach + 1) / 2 + (length - reach) * reach) * rate


def nccl_seconds(ranks: int, message: float) -> float:
    """Returns the seconds of an all-reduce of `message` bytes, interpolated linearly between the measured sizes and
    extrapolated beyond them. Uses the next larger measured number of ranks."""
    table = NCCL_SECONDS[next((n for n in NCCL_SECONDS if n >= ranks), max(NCCL_SECONDS))]
    if message <= table[0][0]:
        return table[0][1]
    (low, fast), (high, slow) = next((pair for pair in pairwise(table) if message <= pair[1][0]), table[-2:])
    return fast + (slow - fast) * (message - low) / (high - low)
