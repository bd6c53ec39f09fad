"""Predicted times of this project's kernels on a card, op by op, and their uncertainty.

Our kernels follow the cost models and the records of their compiled tiles; where a library is used (16-bit products of
several tokens, NCCL), published times are used. Weights and caches come from memory, as when a model is served. On
cards without such tables, libraries count by the ceilings measured for the card.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import ArchTraits, arch_by_name
from sglang.srt.kernels.conditions import FEW_MIN_K, FEW_MULTIPLE, SKINNY_MAX_ROWS, SKINNY_MIN_N
from sglang.srt.kernels.ledger_file import DEQUANTIZED_TAIL, SAME_LAUNCHES, Ledger, tile_key
from sglang.srt.kernels.scaled_product import product_of
from sglang.srt.kernels.spec import Need, Tile, TileRecord
from sglang.srt.kernels.tile_configs import TileConfig, TileConfigs, config_for
from sglang.srt.kernels.tiles import MIN_TOKENS, attention_tiles
from sglang.srt.layers.moe.fused_moe_triton.capacity import recorded_cost
from sglang.srt.layers.moe.fused_moe_triton.expert_tile_configs import mixed_tile_configs, triton_tile_configs
from sglang.srt.layers.moe.fused_moe_triton.tiles import FEW as FEW_PAIRS
from sglang.srt.layers.moe.fused_moe_triton.tiles import MIXED, few_pairs
from sglang.srt.layers.triton_ops import linear_tiles
from sglang.srt.layers.triton_ops.linear_tiles import FEW, FEW_ROWS, num_splits
from sglang.tuning.attention_model import Keys, Prompt, decode_seconds
from sglang.tuning.cost_model import Constants, GroupedProduct, blocks_per_sm, estimate, estimate_blocks, even_blocks
from sglang.tuning.grid import Grid
from sglang.tuning.measured import tables_of
from sglang.tuning.mixed_products import RECORDS, mixed_product, mixed_tile
from sglang.tuning.ops import (
    AllReduce,
    CompressedAttention,
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
    parts_of,
)
from sglang.tuning.rates import UNMEASURED, ceilings_of, rates_of
from sglang.tuning.search_space import KINDS, MoeShape, dequantize_cost_of, grouped_product, multiplies_in_16_bits
from sglang.tuning.served_attention import (
    READING,
    SCAN,
    carried_step_times,
    delta_rule_seconds,
    planned_pieces,
    reading_seconds_of,
    served_prompt_seconds,
    shared_times,
)
from sglang.tuning.sglang_times import product_seconds, time_by_sglang
from sglang.tuning.sparse_times import attention_seconds, choice_seconds
from sglang.tuning.streaming import LAUNCH, reading_seconds, stream_pairs, stream_rows, streamed_seconds

NORMALIZATION = 2e-6
"""The chain of 20 rounds of hyper-connections: 39 times two shuffles, sums and a division, about 100 clocks each. Not
measured."""
SIDE_LAUNCHES, SIDE_SHARE = 8e-6, 1.24
"""The times of grouping, quantization and the last sum of experts, as fitted for SGLang's (fit_experts.py): a part of
what they read is in the L2, so that they move more bytes a second than the memory."""
LIBRARY = 2.8e-6
"""The launch of a small product by cuBLAS, on an H200."""


PCIE_CARD = arch_by_name("rtx-pro-6000-server")
CONFIRMED = frozenset({"h200"})
"""Products that this project's kernels were timed on."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """`error`: one relative standard deviation. `how`: the basis of the figure. `as_measured`: seconds with the inputs
    of published times, where these differ (experts: evenly distributed pairs)."""

    seconds: float
    error: float
    how: str
    as_measured: float | None = None

    @property
    def comparable(self) -> float:
        """Returns the seconds to compare with published ones."""
        return self.seconds if self.as_measured is None else self.as_measured


def predicted(op: Op, arch: ArchTraits) -> Predicted | None:
    """Returns the prediction; None if nothing here computes the op. Raises UserError for a product whose ceilings were
    not measured and are not known from its data sheet either."""
    time: Predicted | None = _PREDICTORS[op.kind](op, arch)
    if time is None or ceilings_of(arch).measured:
        return time
    return replace(time, error=math.hypot(time.error, UNMEASURED), how=f"{time.how}; the card by its data sheet")


def beyond_cache(seconds: float, num_bytes: float, arch: ArchTraits) -> float:
    """Corrects a time measured in replays, with operands in the L2, by adding the time to read them from memory."""
    return max(seconds, num_bytes / ceilings_of(arch).read)


def _side_rate(arch: ArchTraits) -> float:
    return ceilings_of(arch).read * SIDE_SHARE


# --- products ---------------------------------------------------------------------------------------------------------


def linear_with(
    op: Linear, arch: ArchTraits, config: TileConfig | None = None, constants: Constants | None = None
) -> Predicted:
    if op.scheme is None:
        return _plain_linear(op, arch)
    if (op.tokens <= FEW_ROWS) if config is None else (config.variant == FEW):
        return Predicted(streamed_seconds(stream_rows(op, arch), arch), 0.15, "weights streamed once")
    kind, tile = kind_of(op.scheme, arch), linear_tile(op, arch) if config is None else config.tiles[0]
    record = _linear_record(op, tile, arch)
    if record is None:
        floor = ceilings_of(arch).floor(op.num_bytes, op.operations, op.operand)
        return Predicted(2 * LAUNCH + 1.3 * floor, 0.5, "no record of the tile: the floor and a third")
    blocks = -(-op.tokens // tile["BLOCK_M"])
    tiles = blocks * -(-op.rows // tile["BLOCK_N"])
    splits = 1
    if tiles <= -(-op.rows // 16):  # the limit of `PackedWeight.arrivals`
        splits = num_splits(op.tokens, tiles, op.cols, arch.num_sms, arch.features)
    product = _as_grouped(op, splits, record)
    shared = estimate_blocks(product, op.tokens, tile, record, arch, float(splits), float(blocks * splits), constants)
    assert shared is not None, "the ledger holds no tile that does not fit"
    quantized = SCHEMES[op.scheme].activation is not None and not multiplies_in_16_bits(record)
    quantizing = LAUNCH + op.tokens * op.cols * 3 / _side_rate(arch) if quantized else 0.0
    if kind == "planes" and "wgmma" in arch.features:  # waits between planes are not counted
        return Predicted(shared.total, 0.6, "cost model of experts, one expert, widened plane by plane")
    return Predicted(shared.total + quantizing, 0.2, "cost model of experts, one expert")


def _plain_linear(op: Linear, arch: ArchTraits) -> Predicted:
    if op.tokens == 1:
        return Predicted(LAUNCH + reading_seconds(op.num_bytes, arch), 0.1, "weights streamed once")
    if _skinny(op):
        seconds = LAUNCH + reading_seconds(op.num_bytes / SKINNY_SHARE, arch)
        return Predicted(seconds, 0.15, "weights streamed once, by the matrix unit")
    measured = product_seconds(tables_of(arch), "product/bf16/sglang", op)
    if measured is None:
        ceiling = ceilings_of(arch)
        return Predicted(LIBRARY + 1.1 * ceiling.floor(op.num_bytes, op.operations), 0.2, "cuBLAS by the ceilings")
    return Predicted(beyond_cache(measured, op.num_bytes, arch), 0.1, "cuBLAS as measured")


SKINNY_SHARE = 0.95
"""Of the rate at which one row's kernel reads weights, with 2 to 16 rows: on an H100 all products of Qwen3-8B took 5.34
ms with one row, 5.59 with 4 and 5.74 with 16 (benchmark/results/experts.md#products-of-few-rows)."""


def _skinny(op: Linear) -> bool:
    """Returns whether `skinny_gemm` computes it, whose programs share reads of rows of weights and of x."""
    few = 1 < op.tokens <= SKINNY_MAX_ROWS and op.rows >= SKINNY_MIN_N
    return few and op.cols >= FEW_MIN_K and op.cols % FEW_MULTIPLE == 0


def kind_of(scheme: str, arch: ArchTraits) -> str:
    """Returns the kind of product with which an architecture multiplies a scheme."""
    return product_of(SCHEMES[scheme], arch.features).kind


@functools.cache
def _linear_tile_configs(scheme: str, rows: int, cols: int, arch: ArchTraits) -> TileConfigs:
    return linear_tiles.tile_configs_of(SCHEMES[scheme], (rows, cols, False), arch)


def linear_tile(op: Linear, arch: ArchTraits) -> Tile:
    """Returns the tile of a quantized product by Triton."""
    assert op.scheme is not None
    return config_for(_linear_tile_configs(op.scheme, op.rows, op.cols, arch), op.tokens).tiles[0]


def _linear_record(op: Linear, tile: Tile, arch: ArchTraits) -> TileRecord | None:
    """Returns the record of the variant for columns that 16 divides, or of one that loads them in pieces."""
    assert op.scheme is not None
    name = tile_key(tile)
    pieces = op.cols % 16 != 0
    packed = "block_scaled_mma" in arch.features
    variants: tuple[tuple[bool, bool], ...]
    variants = ((False, pieces), (False, False)) if packed else ((True, False), (False, pieces))
    if op.scheme in SAME_LAUNCHES:
        variants = ((True, False), *variants)
    scheme = SAME_LAUNCHES.get(op.scheme, op.scheme)
    for dequantized, in_pieces in variants:
        record = _linear_records(scheme, arch.name, dequantized, in_pieces).get(name)
        if record is not None:
            return record
    return None


IN_PIECES = frozenset({"odd", "odd_rows"})
"""Ends of keys of variants for rows or columns that 16 does not divide."""


@functools.cache
def _linear_records(scheme: str, arch_name: str, dequantized: bool, in_pieces: bool) -> Mapping[str, TileRecord]:
    """Returns the records by tile from the newest Triton on record; `dequantized`: those of GPUs that do not multiply
    with block scales."""
    choice: dict[str, TileRecord] = {}
    for (op, key, tile), row in Ledger.load().rows.items():
        parts = key.split("/")
        if op != "linear" or parts[:2] != ["tiles", scheme] or "fp32" in parts:
            continue
        if (DEQUANTIZED_TAIL in key) == dequantized and bool(IN_PIECES & set(parts)) == in_pieces:
            for target in sorted(row.by_target):
                if target.endswith("/" + arch_name):
                    choice[tile] = TileRecord(*row.by_target[target])
    return choice


def _as_grouped(op: Linear, splits: int, record: TileRecord) -> GroupedProduct:
    """Treats parts of K as experts that every token chooses."""
    assert op.scheme is not None
    scheme = SCHEMES[op.scheme]
    dequantized = multiplies_in_16_bits(record)
    return GroupedProduct(
        num_experts=splits,
        top_k=splits,
        columns=op.rows,
        depth=-(-op.cols // splits),
        width=1,
        x_bytes=2.0 if dequantized else 0.5625 if scheme.activation == "nvfp4" else 1.0,
        w_bytes=scheme.bytes_per_weight(),
        out_bytes=8.0 if splits > 1 else 2.0,
        dequantize_cost=dequantize_cost_of(op.scheme, record),
        scaled_every=128 if op.scheme == "fp8_block" else 0,
    )


def _absorb(op: LatentAbsorb, arch: ArchTraits) -> Predicted:
    tables, ceiling = tables_of(arch), ceilings_of(arch)
    part = "mla_gen_pre" if op.rows >= op.cols else "mla_gen_post"
    table = tables.get(f"latent_absorb/{part}")
    if table is None:
        return Predicted(LIBRARY + 1.2 * ceiling.floor(op.num_bytes, op.operations), 0.3, "cuBLAS by the ceilings")
    seconds = table.seconds(op.heads, op.tokens) * op.rows * op.cols / (512 * 128)
    return Predicted(beyond_cache(seconds, op.num_bytes, arch), 0.15, "torch.bmm as measured")


# --- experts ----------------------------------------------------------------------------------------------------------


def experts_with(
    op: Experts, arch: ArchTraits, config: TileConfig | None = None, constants: Constants | None = None
) -> Predicted:
    four_bits = op.scheme is not None and SCHEMES[op.scheme].bits == 4
    if few_pairs(op.pairs, op.num_experts) if config is None else config.variant == FEW_PAIRS:
        error = 0.3 if four_bits and arch.product not in CONFIRMED else 0.2
        return Predicted(streamed_seconds(stream_pairs(op, arch), arch), error, "chosen experts streamed, pair by pair")
    products = _grouped_products(op, arch, config, constants)
    if not products:
        floor = ceilings_of(arch).floor(op.num_bytes, op.operations, op.operand)
        return Predicted(SIDE_LAUNCHES + 1.3 * floor, 0.4, "no record of the tiles: the floor and a third")
    independent, even = (sum(of_routing) for of_routing in zip(*products, strict=True))
    moved = op.pairs * (op.intermediate * 4 + op.hidden * 2) + 2 * op.tokens * op.hidden
    side = SIDE_LAUNCHES + moved / _side_rate(arch)
    error = (0.15 if arch.product in CONFIRMED else 0.3) if four_bits else 0.1
    return Predicted(independent + side, error, "cost model with the tiles' records", even + side)


def _grouped_products(
    op: Experts, arch: ArchTraits, config: TileConfig | None, constants: Constants | None
) -> list[tuple[float, float]]:
    """Returns the seconds of both products, with tokens that choose independently and with evenly distributed pairs;
    None where a tile is not on record or does not fit."""
    shape = MoeShape(op.num_experts, op.intermediate, op.hidden, op.top_k, op.scheme, op.bias, op.gate)
    config = config or config_for(_expert_tile_configs(shape, arch, op.sgl_kernel), op.tokens)
    times = []
    for at, kind in enumerate(KINDS):
        if config.variant == MIXED:
            block_m = config.tiles[0]["BLOCK_M"]
            tile, record = mixed_tile(shape, kind, block_m), RECORDS[kind, block_m]
            product = mixed_product(shape, kind, block_m)
        else:
            tile = dict(config.tiles[at])
            cost = recorded_cost(shape.product_tile(kind, tile), arch)
            if not isinstance(cost, TileRecord):
                return []
            record, product = cost, grouped_product(shape, kind, cost)
        experts, blocks = even_blocks(op.pairs, op.num_experts, tile["BLOCK_M"])
        independent = estimate(product, op.tokens, tile, record, arch, constants)
        even = estimate_blocks(product, op.tokens, tile, record, arch, experts, blocks, constants)
        if independent is None or even is None:
            return []
        times.append((independent.total, even.total))
    return times


@functools.cache
def _expert_tile_configs(shape: MoeShape, arch: ArchTraits, sgl_kernel: bool = False) -> TileConfigs:
    weights = (
        ((1 + shape.gate) * shape.intermediate, shape.hidden, shape.bias),
        (shape.hidden, shape.intermediate, shape.bias),
    )
    numbers = (shape.num_experts, shape.top_k, 1)
    need = Need("fused_moe", quant=shape.scheme, shapes=weights, experts=numbers)
    return (mixed_tile_configs if sgl_kernel else triton_tile_configs)(need, arch).by_shape[None]


# --- attention --------------------------------------------------------------------------------------------------------


def _dtype(item: int) -> str:
    return "bfloat16" if item == 2 else "fp8_e4m3"


def _attention_tile(
    op: str, dims: tuple[int, int], item: int, arch: ArchTraits, group: int = 0, tile: Tile | None = None
) -> tuple[Mapping[str, int], TileRecord] | None:
    """Returns `tile`, or the tables' first that fits, with its record."""
    if tile is None:
        return _first_tile(op, dims, item, arch, group)
    record = Ledger.load().record(Need(op, dims[0], dims[1], "bfloat16", _dtype(item)), tile, arch)
    return None if record is None else (dict(tile), record)


@functools.cache
def _first_tile(
    op: str, dims: tuple[int, int], item: int, arch: ArchTraits, group: int
) -> tuple[Mapping[str, int], TileRecord] | None:
    need = Need(op, dims[0], dims[1], "bfloat16", _dtype(item))
    for tile in attention_tiles(op, dims[0], dims[1], _dtype(item), arch.features, group):
        record = Ledger.load().record(need, tile, arch)
        if record is not None and record.smem <= arch.smem_per_block:
            return {name: int(value) for name, value in tile.items()}, record
    return None


def decode_with(op: DecodeAttention, arch: ArchTraits, tile: Tile | None = None) -> Predicted | None:
    keys: Keys = op.keys
    dims = (keys.head_dim, keys.v_head_dim)
    choice = _attention_tile("decode_attention", dims, keys.item, arch, keys.group, tile)
    if choice is None:
        return None
    taken, record = choice
    occupancy = blocks_per_sm(record, taken["num_warps"], arch, rates_of(arch))
    pieces = planned_pieces(keys, taken, occupancy, arch.num_sms)
    if "wgmma" in arch.features:
        seconds = reading_seconds_of(keys, pieces, taken, arch, READING)
        return Predicted(seconds, 0.15, "attention model, fitted on an H200")
    times, shared = carried_step_times(keys, taken, arch), shared_times(arch)
    seconds = decode_seconds(keys, pieces, times, shared, cold=True, num_sms=arch.num_sms)
    return Predicted(seconds, 0.2, "attention model, steps carried over from SGLang's kernels")


def extend_with(op: ExtendAttention, arch: ArchTraits, tile: Tile | None = None) -> Predicted | None:
    prompt: Prompt = op.prompt
    if op.library:
        return _flashinfer(op, arch)
    latent = (prompt.head_dim, prompt.v_head_dim) == (192, 128) and prompt.heads == prompt.kv_heads
    name = "latent_prompt_attention" if latent else "extend_attention"
    choice = _attention_tile(name, (prompt.head_dim, prompt.v_head_dim), prompt.item, arch, tile=tile)
    if choice is None:
        return None
    seconds = served_prompt_seconds(prompt, *choice, arch)
    error = 0.15 if arch.product in CONFIRMED else 0.3
    return Predicted(seconds, error, "matrix products and counted instructions")


FLASHINFER = {128: 371.0 / 458.8, 256: 319.0 / 458.8}
"""By head dim: the share of the best product's rate that FlashInfer's FA2 reached in prompts on an RTX PRO 6000."""
FLASHINFER_LATENT_DIMS, FLASHINFER_LATENTS = (192, 128), 313.0 / 458.8
"""The same of keys and values that are made of latents: 8,192 tokens of 8 heads took 549 us."""


def _flashinfer(op: ExtendAttention, arch: ArchTraits) -> Predicted:
    """Returns SGLang's time with FlashInfer if there is no prefix; otherwise computes it from the rate reached
    there."""
    known = time_by_sglang(ExtendAttention(op.prompt), arch) if op.prompt.head_dim in FLASHINFER else None
    if known is not None and not op.prompt.window:
        return Predicted(known[0], 0.15, "FlashInfer as measured")
    latents = (op.prompt.head_dim, op.prompt.v_head_dim) == FLASHINFER_LATENT_DIMS
    share = FLASHINFER_LATENTS if latents else FLASHINFER.get(op.prompt.head_dim, FLASHINFER[256])
    computed = op.operations / (share * ceilings_of(arch).products["half"])
    return Predicted(LIBRARY + max(computed, reading_seconds(op.num_bytes, arch)), 0.3, "FlashInfer by its rate")


# --- the rest ---------------------------------------------------------------------------------------------------------


def _gated_delta(op: GatedDeltaRule, arch: ArchTraits) -> Predicted:
    if op.tokens == 1:
        return Predicted(LAUNCH + reading_seconds(op.num_bytes, arch), 0.3, "states read and written once")
    seconds = delta_rule_seconds(op.batch, op.tokens, op.heads, op.value_dim, arch)
    # The first launch hands scores, u and w to the second through memory.
    intermediate = 4.0 * op.batch * op.tokens * op.heads * (op.key_dim + op.value_dim + SCAN.chunk)
    return Predicted(
        max(seconds, reading_seconds(op.num_bytes + intermediate, arch)), 0.4, "chunks in turn, as on an H100"
    )


CALLED_BY_PYTORCH = 16 << 20
"""From so many bytes on the sums of SGLang and vLLM were NCCL's as PyTorch calls it, as this server's are: on four
cards 889 us for 16 MiB, where NCCL's own benchmark (2.29.2) took 1,008; on two and eight as long."""


def _all_reduce(op: AllReduce, arch: ArchTraits) -> Predicted:
    table = _collective(op, arch)
    if table is None and arch.gpus_per_machine != 1 and "mma_sync_block_scale" in arch.features:
        table = _collective(op, PCIE_CARD)  # also PCIe 5; few such machines have direct peer access
        assert table is not None
        return Predicted(table.seconds(op.ranks, max(512, op.size)), 1.0, "NCCL as measured on RTX PRO 6000 Server")
    if table is None:
        return Predicted(20e-6 + 2 * op.size / 200e9, 1.0, "a guess: nothing measured")
    cards = next((cards for cards in table.axes[0] if cards >= op.ranks), table.axes[0][-1])
    error = 0.1 if cards == op.ranks else 0.3 if cards > op.ranks else 1.0
    return Predicted(table.seconds(cards, max(512, op.size)), error, f"NCCL as measured with {cards:.0f} cards")


def _collective(op: AllReduce, arch: ArchTraits) -> Grid | None:
    """Returns the times of the collective on a GPU: those of frameworks if they use NCCL, else NCCL's own."""
    tables = tables_of(arch)
    called = tables.get("all_reduce/sglang") if op.kind == "all_reduce" and op.size >= CALLED_BY_PYTORCH else None
    return called or tables.get(f"{op.kind}/nccl")


def _quantized_sum(op: QuantizedSum, arch: ArchTraits) -> Predicted:
    """Returns NCCL's time for the bytes sent, plus local memory time for encoding and decoding. Not measured: pairs
    that all send at once may reach less than a ring; with eight cards in two nodes, a ring has one pair between the
    nodes, this has four."""
    sent = _all_reduce(AllReduce(op.sent, op.ranks), arch)
    converted = 3 * LAUNCH + reading_seconds(2.0 * op.size + 4.0 * op.sent, arch)
    error = max(sent.error, 1.0 if op.ranks > 4 else 0.5)
    return Predicted(sent.seconds + converted, error, f"{sent.how} for the bytes in e4m3, and conversions")


def _elementwise(op: Elementwise, arch: ArchTraits) -> Predicted:
    return Predicted(op.launches * LAUNCH + reading_seconds(op.size, arch), 0.3, "launches and bytes")


def _hyper(op: HyperConnection, arch: ArchTraits) -> Predicted:
    """Returns the time of both launches; the connection's fp32 matrix is read once, by the first one."""
    matrix = 4.0 * (2 + op.streams) * op.streams * op.streams * op.hidden
    return Predicted(
        2 * LAUNCH + NORMALIZATION + reading_seconds(op.num_bytes + matrix, arch), 0.5, "launches and bytes"
    )


def _sparse(op: SelectedAttention, arch: ArchTraits) -> Predicted | None:
    dims, dtype = (op.head_dim, op.v_head_dim), _dtype(op.item)
    need = Need("sparse_attention", *dims, "bfloat16", dtype)
    for tile in attention_tiles("sparse_attention", *dims, dtype, arch.features, op.heads):
        record = Ledger.load().record(need, tile, arch)
        if tile.get(MIN_TOKENS, 1) <= op.tokens and record is not None and record.smem <= arch.smem_per_block:
            occupancy = blocks_per_sm(record, tile["num_warps"], arch, rates_of(arch))
            return Predicted(attention_seconds(op, tile, occupancy, arch), 0.4, "steps of gathered rows, as on an H200")
    return None


def _choice(op: EntryChoice, arch: ArchTraits) -> Predicted:
    return Predicted(choice_seconds(op, arch), 0.5, "clocks a pair, as on an H200")


def _compressed(op: CompressedAttention, arch: ArchTraits) -> Predicted | None:
    """Returns the sum of its parts, each as if launched alone."""
    parts = [predicted(part, arch) for part in parts_of(op)]
    if any(part is None for part in parts):
        return None
    known = [part for part in parts if part is not None]
    seconds = sum(part.seconds for part in known)
    off = sum(part.seconds * part.error for part in known)
    return Predicted(seconds, off / seconds, "the sum of its parts")


_PREDICTORS: Mapping[str, Callable[[Any, ArchTraits], Predicted | None]] = {
    "linear": linear_with,
    "latent_absorb": _absorb,
    "fused_moe": experts_with,
    "decode_attention": decode_with,
    "extend_attention": extend_with,
    "gated_delta_rule": _gated_delta,
    "all_reduce": _all_reduce,
    "all_gather": _all_reduce,
    "quantized_sum": _quantized_sum,
    "hyper_connection": _hyper,
    "compressed_attention": _compressed,
    "sparse_attention": _sparse,
    "sparse_indexer": _choice,
    "elementwise": _elementwise,
}
