"""Divides the memory of one rank, before anything is allocated. All sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sglang.srt.configs.quant_scheme import EXL3
from sglang.srt.configs.trellis import CHUNK_TOKENS, DECODED_BYTES
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.spec import Choice
from sglang.srt.plan.attention_memory import AttentionSizes, attention_bytes
from sglang.srt.plan.attention_sites import attention_sites
from sglang.srt.plan.defaults import mixed_decode_sizes
from sglang.srt.plan.kv_spec import KV_DTYPE_BYTES
from sglang.srt.plan.layer_spec import LayerSpec
from sglang.srt.plan.media import FEATURE_BYTES, PATCH_BUFFERS, PATCHES_A_STEP
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.pool_sizes import CacheCost, Pools, plan_pools
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.sizes import Sizes

MIB = 1024**2
GIB = 1024**3

CPU_KV_LIMIT = GIB
CPU_KV_SHARE = 0.25
CPU_KV_TOKENS = 131072
MIN_POOL_TOKENS = 64
"""Fewest tokens of a pool: a smaller one cannot serve anything."""

_SELECTING_BYTES = 25
"""Of an entry while it is selected: numbers of an entry, where it lies, and its slot, some as wide as an index."""

# Estimates, with room: Qwen3-8B and 0.6B served within them on an H200. A graph holds its kernels' launch records.
_GRAPH_BASE = 6 * MIB
_GRAPH_PER_LAYER = 160 * 1024
_LIBRARY_RESERVE = 768 * MIB  # cuBLAS workspaces, compiled kernels, allocator slack
_COLLECTIVE_RESERVE = 512 * MIB  # NCCL channels and staging buffers
# Divisor of unified memory for the share of the system and the server's host processes; recipes for GB10 leave 0.15.
_HOST_SHARE = 8
_FRAGMENTATION = 1.2
_LOGITS_COPIES = 4  # fp32 logits, probabilities, sorted copies of a sampling step
OWN_SLOT_BYTES = 8
"""Bytes of a DCP rank's own slot number and of the shared slot number that it is computed from."""
GATHER_BYTES = 32
"""Bytes of a token's place, owner and order where DCP ranks gather the tokens of a prefix."""
SLOT_BYTES = 4
PREFILL_GRAPH_PROMPTS = 16
"""Number of prompts whose last tokens a prefill graph makes logits of; a test holds it to the graphs'."""


class DoesNotFit(UserError):
    """Raised where there is no room for the weights, or none for a cache besides them. The message is one clause,
    without advice."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The division of a rank's memory, in bytes. `available` was free before the first allocation; the fields below it
    add up to at most that.

        kv_cache: the pool of all tokens
        windows: the pools of sliding windows
        states: recurrent states of running requests, and checkpoints of states
        penalties: token counts of all running requests, allocated once requests ask for penalties
        media: what encoder steps hold, and the features that are kept
        copies: staging buffers of cached prefixes on their way to and from main memory
    """

    available: int
    weights: int
    kv_cache: int
    tables: int
    activations: int
    logits: int
    graphs: int
    reserve: int
    rotary: int
    penalties: int
    attention: int
    states: int
    windows: int
    media: int
    copies: int

    @property
    def caches(self) -> int:
        return self.kv_cache + self.windows + self.states

    @property
    def mem_fraction_static(self) -> float:
        """Share of `available` for weights and caches, as --mem-fraction-static means it."""
        return (self.weights + self.caches) / self.available if self.available else 0.0

    def describe(self) -> dict[str, Any]:
        return asdict(self) | {"mem_fraction_static": round(self.mem_fraction_static, 4)}

    def log_line(self) -> str:
        """Describes where the memory goes, in GiB."""
        parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in asdict(self).items() if name != "available")
        return f"Memory plan of {self.available / GIB:.2f} GiB available: {parts} GiB"


def patch_buffer_bytes(model: ModelDescription, dtype: str) -> int:
    """Returns the bytes of the device buffers that receive image patches; as many are pinned in host memory."""
    if model.media is None or not model.encodes_media:
        return 0
    tower = model.media.tower
    return PATCH_BUFFERS * PATCHES_A_STEP * tower.patch_values * KV_DTYPE_BYTES[tower.pixel_dtype(dtype)]


def media_bytes(model: ModelDescription, dtype: str, num_tokens: int, ranks: RankLayout) -> int:
    """Returns the bytes of kept image and video features, of the largest encoder step, of the rows of features that a
    chunk of `num_tokens` tokens gathers, of the queries, keys, values and outputs of as many image tokens that
    attend once more (`attention.metadata.WithImages`), and of windows that are selections with whole images."""
    if model.media is None:
        return 0
    encoding = model.media.tower.step_values(PATCHES_A_STEP) if model.encodes_media else 0
    pixels = patch_buffer_bytes(model, dtype)
    windows = [
        site.shape for site in attention_sites(model, ranks.attn_tp_size) if site.window and model.media.both_ways
    ]
    sizes = [(shape.num_heads + shape.num_kv_heads) * (shape.head_dim + shape.v_head_dim) for shape in windows]
    selected = num_tokens * model.media.tower.longest_run * _SELECTING_BYTES
    gathered = model.hidden_size * (1 + model.media.deepstack_levels) if model.encodes_media else 0
    of_chunk = num_tokens * (gathered + max(sizes, default=0))
    return FEATURE_BYTES + pixels + selected + (encoding + of_chunk) * KV_DTYPE_BYTES[dtype]


def activation_bytes(model: ModelDescription, dtype: str, num_tokens: int, ranks: RankLayout) -> int:
    """Returns the bytes of `num_tokens` tokens at the widest point of a layer: the residual stream plus attention or
    feed-forward buffers. With DP attention `num_tokens` are those of one attention group; feed-forward blocks compute
    the gathered, padded tokens of all groups (`layers/row_exchange`)."""
    groups = ranks.attn_dp_size
    gathered = 3 * groups * model.hidden_size if groups > 1 else 0
    item, hidden = KV_DTYPE_BYTES[dtype], model.hidden_size
    widest = max(
        max(
            layer.mixer.activation_elements(ranks.attn_tp_size),
            groups * layer.ffn.activation_elements(hidden, ranks) + gathered,
            *(block.activation_elements(hidden, ranks) for block in (layer.ngrams, layer.inputs)),
        )
        + (2 + layer.residual.streams) * hidden
        for layer in dict.fromkeys(model.layers)
    )
    if model.per_layer_inputs is not None:
        widest += model.per_layer_inputs.stream_elements
    routing = groups * 4 * 2 * max((experts.num_experts for experts in model.kinds_of_experts), default=0)
    selected = 4 * max((layer.mixer.selected_slots(ranks.attn_tp_size) for layer in model.layers), default=0)
    transformed = _transformed_bytes(model, num_tokens, widest, ranks)
    return int((num_tokens * (widest * item + routing + selected) + transformed) * _FRAGMENTATION)


def _transformed_bytes(model: ModelDescription, num_tokens: int, widest: int, ranks: RankLayout) -> int:
    """Returns what products of EXL3 hold in float16: a decoded matrix, inputs for each of up to three modules, outputs
    before their transform, and as much for each choice of an expert."""
    if model.quantization is None or EXL3.name not in model.quantization.schemes():
        return 0
    hidden, tp_size = model.hidden_size, ranks.expert_tp_size
    of_choices = (
        experts.top_k * (3 * hidden + 5 * -(-experts.intermediate_size // tp_size))
        for experts in model.kinds_of_experts
    )
    of_experts = 2 * min(num_tokens, CHUNK_TOKENS) * max(of_choices, default=0)
    return DECODED_BYTES + 2 * num_tokens * (3 * hidden + widest) + of_experts


def verified_bytes(model: ModelDescription, dtype: str, sizes: Sizes) -> int:
    """Returns the bytes that recurrent layers and convolutions keep of the tokens of a verify step until it is known
    which draft tokens are accepted."""
    if sizes.verified_tokens == 1:
        return 0
    kept = [layer.mixer.verified_elements(sizes.ranks.attn_tp_size) for layer in model.layers]
    of_token = sum(elements * KV_DTYPE_BYTES[dtype] + 4 * wide for elements, wide in kept)
    of_token += KV_DTYPE_BYTES[dtype] * sum(_convolved(layer, sizes.ranks.attn_tp_size) for layer in model.layers)
    return sizes.decode_rows * of_token


def _convolved(layer: LayerSpec, tp_size: int) -> int:
    """Returns the elements of a token that a layer's short convolutions take."""
    blocks = 0 if layer.convolution is None else 2 * layer.convolution.channels
    return blocks + layer.mixer.convolved_elements(tp_size)


def selection_bytes(model: ModelDescription, num_tokens: int, context_len: int) -> int:
    """Returns the bytes of the selections of all compressed entries that a step of `num_tokens` tokens keeps for its
    layers, one for each rate, and of the mask with which one is made."""
    rates = {layer.mixer.unselected_rate for layer in model.layers} - {0}
    entries = [context_len // rate for rate in rates]
    return num_tokens * (SLOT_BYTES * sum(entries) + max(entries, default=0))


def output_bytes(model: ModelDescription, sizes: Sizes) -> int:
    """Returns the bytes of the logits of a step; for a model that generates no text those of what it makes of the
    hidden states of the texts: the states and the results of all tokens in fp32, and which tokens each text has."""
    if model.pooling is None:
        return logits_bytes(model, sizes.decode_rows, sizes.ranks)
    of_token = model.hidden_size + model.pooling.width(model.hidden_size) + sizes.max_running_requests
    return sizes.tokens_per_step * of_token * 4


def logits_bytes(model: ModelDescription, rows: int, ranks: RankLayout) -> int:
    """Returns the bytes of the logits of a step with `rows` rows of logits: one for each token of a decoding request.
    With DP attention a rank computes its vocabulary columns for the rows of all groups and exchanges them for whole
    rows of its own."""
    columns = 2 * ranks.attn_dp_size * -(-model.vocab_size // ranks.tp_size) if ranks.attn_dp_size > 1 else 0
    return rows * (model.vocab_size * _LOGITS_COPIES + columns) * 4


def table_bytes(sizes: Sizes) -> int:
    """Returns the bytes of req_to_token, last tokens, scalar sampling parameters (256 bytes a request) and the tables
    of n-gram drafts."""
    of_requests = (sizes.max_running_requests + 1) * (sizes.row_tables * sizes.context_len * 4 + 8 + 256)
    return of_requests + sizes.ngram_bytes


def penalty_bytes(model: ModelDescription, sizes: Sizes) -> int:
    """Returns the bytes of one count for each vocabulary token, for each request and the padding slot. While the table
    grows, the previous one exists too, with at most half as many rows (`PenaltyState`). Models that generate no text
    have no penalties."""
    if model.pooling is not None:
        return 0
    rows = sizes.max_running_requests + 1
    return (rows + rows // 2) * model.vocab_size * 4


def rotary_bytes(model: ModelDescription, sizes: Sizes) -> int:
    """Returns the bytes of cosines and sines in fp32 of every position, one table for each kind of rotation in the
    model."""
    rotations = {rope for layer in model.layers for rope in (layer.mixer.rope, *layer.mixer.further_ropes)}
    positions = sizes.num_positions, sizes.context_len
    return sum(rope.table_rows(*positions) * rope.rot_dim * 4 for rope in rotations if rope is not None)


def graph_bytes(model: ModelDescription, dtype: str, sizes: Sizes) -> int:
    """Returns the bytes of the launch records of all CUDA graphs, and of the results and activations of the largest
    graph of each kind.

    Decode graphs have logits [B * width, V] fp32. Prefill graphs have hidden states [T, H] and the logits of decoding
    requests and of some prompts' last tokens. Each exists once in the graphs' memory and once where results are read.
    Pipeline stages add their inputs and outputs, and models with images add the rows of features.
    """
    prefill = sizes.prefill_graph_tokens
    if not sizes.graph_batch_sizes:
        return 0
    mixed = _mixed_graphs(sizes)
    records = (sizes.num_decode_graphs + len(mixed)) * (_GRAPH_BASE + len(model.layers) * _GRAPH_PER_LAYER)
    rows, tokens = sizes.graph_rows, max(prefill, default=0)
    if prefill:
        rows += PREFILL_GRAPH_PROMPTS + max(decodes for _, decodes in mixed)
    item = KV_DTYPE_BYTES[dtype]
    rows *= sizes.ranks.attn_dp_size if sizes.ranks.dp_lm_head is False else 1
    results = 2 * (rows * model.vocab_size * 4 + tokens * model.hidden_size * item)
    results += 2 * (sizes.graph_rows + tokens) * _stream_width(model) * item if sizes.ranks.pp_size > 1 else 0
    results += feature_row_bytes(model, dtype, tokens)
    results += selection_bytes(model, sizes.graph_rows + tokens, sizes.context_len)
    return records + results + activation_bytes(model, dtype, sizes.graph_rows + tokens, sizes.ranks)


def feature_row_bytes(model: ModelDescription, dtype: str, num_tokens: int) -> int:
    """Returns the bytes of the buffers from which prefill graphs of up to `num_tokens` tokens read image features."""
    media = model.media
    if media is None or media.both_ways or not model.encodes_media:
        return 0
    return num_tokens * model.hidden_size * (1 + media.deepstack_levels) * KV_DTYPE_BYTES[dtype]


def draft_graph_bytes(layers: int, sizes: Sizes) -> int:
    """Returns the bytes of the launch records that a draft's layers add to each graph: once for the step's rows and
    once for each draft token but the first."""
    graphs = sizes.num_decode_graphs + len(_mixed_graphs(sizes))
    return graphs * sizes.verified_tokens * (layers + 1) * _GRAPH_PER_LAYER


def _mixed_graphs(sizes: Sizes) -> list[tuple[int, int]]:
    """Returns (tokens, decoding requests among them) of each prefill graph."""
    decode = sizes.graph_batch_sizes
    return [
        (tokens, decodes)
        for tokens in (sizes.prefill_graph_tokens if decode else ())
        for decodes in mixed_decode_sizes(decode)
        if decodes <= tokens
    ]


def intermediate_bytes(model: ModelDescription, dtype: str, sizes: Sizes) -> int:
    """Returns the bytes of hidden states on their way to the next pipeline stage: of the step that is computed, of one
    that is received, and of those that `Group.send_to_next` has in flight."""
    if sizes.ranks.pp_size == 1:
        return 0
    return (sizes.ranks.pp_size + 3) * sizes.tokens_per_step * _stream_width(model) * KV_DTYPE_BYTES[dtype]


def _stream_width(model: ModelDescription) -> int:
    """Returns the elements of a token in the residual stream, of all streams together."""
    return model.hidden_size * max(layer.residual.streams for layer in model.layers)


@dataclass(frozen=True, slots=True)
class FixedMemory:
    """The memory, in bytes, that a rank needs besides weights and caches. Fields as in MemoryPlan."""

    tables: int
    activations: int
    logits: int
    graphs: int
    reserve: int
    rotary: int
    penalties: int
    attention: int
    media: int
    copies: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of a rank. `available`: free before the first allocation. `fraction`: --mem-fraction-static, the share
    of `available` that weights and caches get; None: caches get what everything else leaves."""

    weights: int
    available: int
    fraction: float | None

    def of_caches(self, fixed: FixedMemory) -> int:
        """Returns the bytes for all caches, states included. Negative where even the weights do not fit."""
        if self.fraction is None:
            return self.available - fixed.total - self.weights
        allocated_first = fixed.tables + fixed.rotary + fixed.attention
        return min(int(self.available * self.fraction), self.available - allocated_first) - self.weights

    def on_cpu(self, others: int = 0) -> int:
        """Returns the bytes for all caches on a CPU: a modest share of what weights and `others` leave."""
        return int((self.available - self.weights - others) * CPU_KV_SHARE)


def fixed_memory(
    model: ModelDescription,
    everything: ModelDescription,
    dtype: str,
    room: Room,
    sizes: Sizes,
    cost: CacheCost,
    choices: Mapping[str, Choice],
    arch: ArchTraits,
) -> FixedMemory:
    """Computes the memory that a GPU needs besides weights and caches. `everything`: the model with the layers of a
    draft."""
    ranks = sizes.ranks
    groups = (ranks.tp_size > 1) + (ranks.pp_size > 1) + (1 < ranks.dcp_size < ranks.tp_size)
    groups += (1 < ranks.attn_dp_size < ranks.tp_size) + (ranks.attn_dp_size > 1)
    available = room.available
    heads = _attention_sizes(everything, sizes, arch.num_sms, available - room.weights, cost)
    return FixedMemory(
        tables=table_bytes(sizes),
        activations=activation_bytes(model, dtype, sizes.tokens_per_step, sizes.ranks)
        + intermediate_bytes(model, dtype, sizes)
        + selection_bytes(model, sizes.tokens_per_step, sizes.context_len)
        + verified_bytes(everything, dtype, sizes),
        logits=output_bytes(model, sizes),
        graphs=graph_bytes(model, dtype, sizes),
        reserve=_LIBRARY_RESERVE
        + available // 100
        + _COLLECTIVE_RESERVE * groups
        + (available // _HOST_SHARE if arch.unified_memory else 0),
        rotary=rotary_bytes(model, sizes),
        penalties=penalty_bytes(model, sizes),
        attention=attention_bytes(choices, heads),
        media=media_bytes(model, dtype, sizes.tokens_per_step, sizes.ranks)
        + (patch_buffer_bytes(model, dtype) if arch.unified_memory else 0),
        copies=sizes.copy_bytes,
    )


def plan_gpu_memory(
    room: Room, sizes: Sizes, cost: CacheCost, fixed: FixedMemory, max_tokens: int
) -> tuple[MemoryPlan, Pools]:
    """Plans the memory of a GPU. The pools of tokens get what states leave of the room for caches, for at most
    `max_tokens` tokens. Raises DoesNotFit where nothing is left."""
    states = cost.states_bytes(sizes.state_rows)
    pools = room.of_caches(fixed) - states
    if pools <= 0:
        raise DoesNotFit(_why_nothing_is_left(room, states, fixed.total))
    split = plan_pools(cost, pools, sizes.page_size, max_tokens)
    pools_of = {"kv_cache": split.token_bytes, "windows": split.window_bytes, "states": states}
    return MemoryPlan(available=room.available, weights=room.weights, **pools_of, **asdict(fixed)), split


def _why_nothing_is_left(room: Room, states: int, others: int) -> str:
    """Explains why no memory is left for a cache. `others`: everything but weights, states of requests and caches."""
    weights, available, fraction = room.weights, room.available, room.fraction
    what = f"the weights take {weights / GIB:.2f} GiB"
    if states:
        what += f" and the states of the running requests {states / GIB:.2f} GiB"
    head = f"{what} of {available / GIB:.2f} GiB a GPU: nothing is left for the KV cache"
    if fraction is not None and weights + states < available - others:
        lowest = (weights + states) / available
        return f"{head} with --mem-fraction-static {fraction}, which must be well above {lowest:.3f}"
    if weights > available:
        return f"the weights take {weights / GIB:.2f} GiB a GPU, and {available / GIB:.2f} GiB are free"
    return f"{head} after {others / GIB:.2f} GiB for activations, logits, graphs and reserve"


def _attention_sizes(
    model: ModelDescription, sizes: Sizes, num_sms: int, pool_limit: int, cost: CacheCost
) -> AttentionSizes:
    pages_each = -(-sizes.context_len // sizes.page_size)
    in_pool = cost.tokens_in(max(0, pool_limit)) // sizes.page_size
    sites = attention_sites(model, sizes.ranks.attn_tp_size, sizes.ranks.dcp_size)
    shapes = dict.fromkeys(site.shape for site in sites if site.dcp_size == 1)
    shared = dict.fromkeys(site.gathered for site in sites if site.dcp_size > 1)
    own_rows = 2 * sizes.max_running_requests + PREFILL_GRAPH_PROMPTS + 1
    return AttentionSizes(
        heads=tuple((shape.num_heads, shape.v_head_dim) for shape in shapes),
        value_dim=max(layer.mixer.value_dim for layer in model.layers),
        index_logits=sizes.tokens_per_step
        * 4
        * max(layer.mixer.token_scores(sizes.context_len, sizes.ranks.attn_tp_size) for layer in model.layers),
        num_sms=num_sms,
        max_running_requests=sizes.max_running_requests,
        graph_batch_sizes=sizes.graph_batch_sizes,
        pages_per_request=pages_each,
        max_pages=min(in_pool, pages_each * sizes.max_running_requests),
        windows=tuple(
            -(-(site.window + sizes.page_size - 1) // sizes.page_size) if site.window else 0 for site in sites
        ),
        part_heads=tuple((shape.num_heads, shape.v_head_dim) for shape in shared),
        token_rows=sizes.token_rows if shared else 0,
        verified_tokens=sizes.verified_tokens,
        verify_rows=sizes.step_widths.step_rows(max(sizes.max_running_requests, *sizes.graph_batch_sizes, 1)),
        own_tables=own_rows * -(-sizes.context_len // sizes.ranks.dcp_size) * OWN_SLOT_BYTES if shared else 0,
        gathered=sizes.context_len * (cost.shared_entry + GATHER_BYTES) if shared else 0,
        gathered_tokens=sizes.context_len if shared else 0,
    )


def plan_cpu_memory(
    model: ModelDescription,
    dtype: str,
    room: Room,
    sizes: Sizes,
    cost: CacheCost,
    max_tokens: int,
    max_total_tokens: int | None,
) -> tuple[MemoryPlan, Pools]:
    """Plans main memory for a CPU: a modest share of it for caches, unless --max-total-tokens asks for another size.
    Raises UserError where it does not fit."""
    weights, available, tables, rotary = room.weights, room.available, table_bytes(sizes), rotary_bytes(model, sizes)
    states = cost.states_bytes(sizes.state_rows)
    fixed = weights + tables + rotary + states
    if fixed >= available:
        raise UserError(
            f"the weights take {weights / GIB:.2f} GiB and tables of {sizes.context_len:,} positions for"
            f" {sizes.max_running_requests} requests {(fixed - weights) / GIB:.2f} GiB, but only"
            f" {available / GIB:.2f} GiB of main memory are free; choose a smaller model or --dtype bfloat16, a smaller"
            " --context-length or --max-running-requests"
        )
    share = min(room.on_cpu(fixed - weights), CPU_KV_LIMIT)
    split = plan_pools(cost, share, sizes.page_size, min(CPU_KV_TOKENS, max_tokens))
    if max_total_tokens is not None:
        wanted = cost.pool_bytes(max_total_tokens + sizes.page_size)
        split = plan_pools(cost, wanted, sizes.page_size, max_total_tokens)
    pools = split.token_bytes + split.window_bytes
    if fixed + pools > available:
        raise UserError(
            f"--max-total-tokens {max_total_tokens} takes {pools / GIB:.2f} GiB of KV cache beside"
            f" {weights / GIB:.2f} GiB of weights, but only {available / GIB:.2f} GiB of main memory are free"
        )
    memory = MemoryPlan(
        available,
        weights,
        split.token_bytes,
        tables,
        activation_bytes(model, dtype, sizes.tokens_per_step, sizes.ranks) + verified_bytes(model, dtype, sizes),
        output_bytes(model, sizes),
        graphs=0,
        reserve=0,
        rotary=rotary,
        penalties=penalty_bytes(model, sizes),
        attention=0,
        states=states,
        windows=split.window_bytes,
        media=0,
        copies=0,
    )
    return memory, split
