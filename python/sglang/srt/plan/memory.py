"""How the memory of one rank is divided, computed before anything is allocated. All sizes in bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sglang.srt.errors import UserError
from sglang.srt.plan.kv_spec import KV_DTYPE_BYTES, KVSpec
from sglang.srt.plan.model_facts import ModelFacts

MIB = 1024**2
GIB = 1024**3

CPU_KV_LIMIT = GIB
CPU_KV_SHARE = 0.25
CPU_KV_TOKENS = 131072
MIN_POOL_TOKENS = 64
"""A pool below this cannot serve anything."""

# Estimates, with room: Qwen3-8B and 0.6B served within them on an H200. A graph holds its kernels' launch records.
_GRAPH_BASE = 6 * MIB
_GRAPH_PER_LAYER = 160 * 1024
_LIBRARY_RESERVE = 768 * MIB  # cuBLAS workspaces, compiled kernels, allocator slack
_COLLECTIVE_RESERVE = 512 * MIB  # NCCL channels and staging buffers
_FRAGMENTATION = 1.2
_LOGITS_COPIES = 4  # fp32 logits, probabilities, sorted copies of a sampling step


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a rank runs at most at once."""

    max_running_requests: int
    context_len: int
    tokens_per_step: int
    graph_batch_sizes: tuple[int, ...]
    page_size: int
    tp_size: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`available` was free before the first allocation; the fields below it add up to at most that."""

    available: int
    weights: int
    kv_cache: int
    tables: int
    activations: int
    logits: int
    graphs: int
    reserve: int

    @property
    def mem_fraction_static(self) -> float:
        """Share of `available` for weights and KV cache, as --mem-fraction-static means it."""
        return (self.weights + self.kv_cache) / self.available if self.available else 0.0

    def describe(self) -> dict[str, Any]:
        return asdict(self) | {"mem_fraction_static": round(self.mem_fraction_static, 4)}

    def log_line(self) -> str:
        """Where the memory goes, in GiB."""
        parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in asdict(self).items() if name != "available")
        return f"Memory plan of {self.available / GIB:.2f} GiB available: {parts} GiB"


def activation_bytes(facts: ModelFacts, dtype: str, num_tokens: int, tp_size: int) -> int:
    """The widest point of a layer for `num_tokens`: the residual stream plus attention or feed-forward buffers."""
    item = KV_DTYPE_BYTES[dtype]
    hidden = 3 * facts.hidden_size
    heads = facts.num_heads // tp_size
    attention = (
        2 * heads * facts.head_dim
        + heads * facts.v_head_dim
        + 2 * max(1, facts.num_kv_heads // tp_size) * facts.head_dim
    )
    dense = 3 * facts.dense_inter // tp_size
    experts = facts.top_k * (3 * facts.expert_inter // tp_size + facts.hidden_size)
    routing = 4 * facts.num_experts * 2
    per_token = (hidden + max(attention, dense, experts)) * item + routing
    return int(num_tokens * per_token * _FRAGMENTATION)


def logits_bytes(facts: ModelFacts, rows: int) -> int:
    return rows * facts.vocab_size * 4 * _LOGITS_COPIES


def table_bytes(sizes: Sizes) -> int:
    """req_to_token, last tokens and scalar sampling parameters (256 bytes a request)."""
    return (sizes.max_running_requests + 1) * (sizes.context_len * 4 + 8 + 256)


def graph_bytes(facts: ModelFacts, dtype: str, sizes: Sizes) -> int:
    """Launch records of every graph, and one shared set of activations and logits of the largest."""
    if not sizes.graph_batch_sizes:
        return 0
    largest = max(sizes.graph_batch_sizes)
    records = len(sizes.graph_batch_sizes) * (_GRAPH_BASE + facts.num_layers * _GRAPH_PER_LAYER)
    return records + activation_bytes(facts, dtype, largest, sizes.tp_size) + largest * facts.vocab_size * 4


def plan_gpu_memory(
    facts: ModelFacts,
    dtype: str,
    weights: int,
    available: int,
    sizes: Sizes,
    kv: KVSpec,
    fraction: float | None,
    max_total_tokens: int | None,
) -> MemoryPlan:
    """KV cache gets what everything else leaves, or with `fraction` (--mem-fraction-static) what that leaves.

    Raises UserError if the weights do not fit.
    """
    tables = table_bytes(sizes)
    activations = activation_bytes(facts, dtype, sizes.tokens_per_step, sizes.tp_size)
    logits = logits_bytes(facts, sizes.max_running_requests)
    graphs = graph_bytes(facts, dtype, sizes)
    reserve = _LIBRARY_RESERVE + available // 100 + (_COLLECTIVE_RESERVE if sizes.tp_size > 1 else 0)
    others = tables + activations + logits + graphs + reserve
    static = available - others if fraction is None else int(available * fraction)
    kv_bytes = static - weights
    if kv_bytes <= 0:
        raise UserError(_weights_do_not_fit(weights, available, others, fraction, sizes.tp_size))
    kv_bytes = min(kv_bytes, available - weights - tables)
    if max_total_tokens is not None:
        kv_bytes = min(kv_bytes, (max_total_tokens + sizes.page_size) * kv.bytes_per_token)
    return MemoryPlan(available, weights, kv_bytes, tables, activations, logits, graphs, reserve)


def plan_cpu_memory(
    facts: ModelFacts, dtype: str, weights: int, available: int, sizes: Sizes, kv: KVSpec, max_total_tokens: int | None
) -> MemoryPlan:
    """A modest share of main memory, unless --max-total-tokens asks for another size. Raises UserError."""
    if weights >= available:
        raise UserError(
            f"the weights take {weights / GIB:.2f} GiB, but only {available / GIB:.2f} GiB of main memory are free;"
            " choose a smaller model or --dtype bfloat16"
        )
    tokens = min(CPU_KV_TOKENS, int(min((available - weights) * CPU_KV_SHARE, CPU_KV_LIMIT)) // kv.bytes_per_token)
    if max_total_tokens is not None:
        tokens = max_total_tokens
    kv_bytes = (tokens + sizes.page_size) * kv.bytes_per_token
    if weights + kv_bytes > available:
        raise UserError(
            f"--max-total-tokens {max_total_tokens} takes {kv_bytes / GIB:.2f} GiB of KV cache beside"
            f" {weights / GIB:.2f} GiB of weights, but only {available / GIB:.2f} GiB of main memory are free"
        )
    activations = activation_bytes(facts, dtype, sizes.tokens_per_step, sizes.tp_size)
    logits = logits_bytes(facts, sizes.max_running_requests)
    return MemoryPlan(available, weights, kv_bytes, table_bytes(sizes), activations, logits, 0, 0)


def _weights_do_not_fit(weights: int, available: int, others: int, fraction: float | None, tp_size: int) -> str:
    head = (
        f"the weights take {weights / GIB:.2f} GiB of {available / GIB:.2f} GiB a GPU: nothing is left for the KV cache"
    )
    if fraction is not None and weights < available - others:
        lowest = weights / available
        return f"{head} with --mem-fraction-static {fraction}; it must be well above {lowest:.3f}"
    return (
        f"{head} after {others / GIB:.2f} GiB for activations, logits, graphs and reserve; use more GPUs (--tp-size"
        f" {tp_size * 2}), --cuda-graph-max-bs 16, a smaller --chunked-prefill-size or --max-running-requests, or a"
        " quantized checkpoint"
    )
