"""The tiles that tuning chooses from, and those that are excluded before anything is compiled or timed. No torch.

Both products share BLOCK_M, because they share the grouping of tokens by expert; otherwise they are tuned separately.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.spec import TileRecord
from sglang.srt.layers.moe.fused_moe_triton.capacity import CostOf, ProductTile
from sglang.srt.layers.moe.fused_moe_triton.tiles import GroupedTile, tile
from sglang.tuning.cost_model import GroupedProduct
from sglang.tuning.instructions import DequantizeCost, dequantize_cost

KINDS = ("gate_up", "down")
BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 8192)
"""Upstream's, and one more: a step may have 16,384 tokens."""

BLOCK_M = (16, 32, 64, 128)
BLOCK_N = {"gate_up": (16, 32, 64, 128), "down": (16, 32, 64, 128, 256)}
BLOCK_K = (64, 128, 256)
NUM_WARPS = (4, 8)
STRIP, FEW_ROWS = 128, 32
"""Columns of a strip of widened four-bit weights. A step takes one, with up to so many rows also two, which are on
their way together: 128 bytes of a row."""
NUM_STAGES = (2, 3, 4, 5)
MAX_ACCUMULATORS = 128
"""fp32 sums a thread may hold: with twice as many, nothing is left of its 255 registers for operands."""
MIN_ACCUMULATORS = 4
GROUP_M = {16: 1, 32: 1, 64: 8, 128: 8}
"""GROUP_M by BLOCK_M: small blocks are for few tokens, of which an expert has one block; large ones come in groups that
share its weights while they are cached."""
TUNED_GROUP_M = (1, 8, 16, 32, 64)
"""The values that tuning tries on the fastest tile of each BLOCK_M: the order of programs changes neither registers
nor memory."""


@dataclass(frozen=True, slots=True)
class MoeShape:
    """The experts of one rank. `scheme`: a name of SCHEMES, None for 16-bit weights."""

    num_experts: int
    intermediate: int
    hidden: int
    top_k: int
    scheme: str | None
    bias: bool = False  # GPT-OSS
    gate: bool = True  # False: the first product is up alone (Nemotron 3)

    def width(self, kind: str) -> int:
        """Returns the rows of weights for one column."""
        return 2 if kind == "gate_up" and self.gate else 1

    def depth(self, kind: str) -> int:
        """Returns the dims that a product sums over. kind: "gate_up" or "down"."""
        return self.hidden if kind == "gate_up" else self.intermediate

    def columns(self, kind: str) -> int:
        """Returns the outputs of a product. kind: "gate_up" or "down"."""
        return self.intermediate if kind == "gate_up" else self.hidden

    def product_tile(self, kind: str, choice: GroupedTile) -> ProductTile:
        """Returns a product of this shape with the tile."""
        return ProductTile(kind, self.scheme, self.hidden, self.intermediate, choice, self.bias)

    def __str__(self) -> str:
        scheme = self.scheme or "bf16"
        return f"E={self.num_experts} N={self.intermediate} H={self.hidden} top-{self.top_k} {scheme}"


@dataclass(slots=True)
class Candidates:
    """Candidates for one product: the remaining tiles with their records, and the number of excluded ones by reason."""

    kept: list[tuple[GroupedTile, TileRecord]] = field(default_factory=list)
    unknown: list[GroupedTile] = field(default_factory=list)  # not judged, as they have no record
    pruned: list[tuple[GroupedTile, str]] = field(default_factory=list)

    def reasons(self) -> Counter[str]:
        """Returns counts by the part of the reason before the colon."""
        return Counter(reason.split(":")[0] for _, reason in self.pruned)


def space(kind: str) -> Iterator[GroupedTile]:
    """Yields every tile of a product."""
    for m, n, k, warps, stages in itertools.product(BLOCK_M, BLOCK_N[kind], BLOCK_K, NUM_WARPS, NUM_STAGES):
        yield tile(m, n, k, GROUP_M[m], warps, stages)


def why_not(shape: MoeShape, kind: str, choice: GroupedTile, arch: ArchTraits) -> str | None:
    """Returns a reason against a tile that needs no compiler, as "kind: details"; None if there is none."""
    m, n, k, warps = choice["BLOCK_M"], choice["BLOCK_N"], choice["BLOCK_K"], choice["num_warps"]
    width = 2 if kind == "gate_up" else 1
    accumulators = m * n * width / (32 * warps)
    if accumulators > MAX_ACCUMULATORS:
        return f"too many registers: {accumulators:.0f} sums a thread, at most {MAX_ACCUMULATORS}"
    if accumulators < MIN_ACCUMULATORS:
        return f"idle threads: {accumulators:.0f} sums a thread, at least {MIN_ACCUMULATORS}"
    if k >= 2 * shape.depth(kind):
        return f"larger than the weights: BLOCK_K {k} for {shape.depth(kind)} columns"
    if n >= 2 * shape.columns(kind):
        return f"larger than the weights: BLOCK_N {n} for {shape.columns(kind)} rows"
    if shape.scheme == "fp8_block" and k > 128:
        return f"scales: BLOCK_K {k} spans several blocks of 128"
    if widens(shape.scheme, arch) and k != STRIP and (k != 2 * STRIP or m > FEW_ROWS):
        return f"no effect: widened weights are read in strips of {STRIP} columns, not BLOCK_K {k}"
    minimum = min_shared_bytes(shape.scheme, kind, choice)
    if minimum > arch.smem_per_block:
        return f"too much shared memory: at least {minimum:,} B, {arch.name} has {arch.smem_per_block:,} B"
    return None


def widens(scheme: str | None, arch: ArchTraits) -> bool:
    """Returns whether that GPU dequantizes four-bit weights to 16 bits (like `scaled_dot.product_of`, without importing
    it)."""
    if scheme is None or SCHEMES[scheme].bits != 4:
        return False
    return SCHEMES[scheme].activation is None or "block_scaled_mma" not in arch.features


def min_shared_bytes(scheme: str | None, kind: str, choice: GroupedTile) -> int:
    """Returns a lower bound: the pipeline holds the weights of all stages but the one being multiplied."""
    width = 2 if kind == "gate_up" else 1
    bits = SCHEMES[scheme].bits if scheme else 16
    stages = max(1, choice["num_stages"] - 1)
    return stages * choice["BLOCK_N"] * width * choice["BLOCK_K"] * bits // 8


def deepest_stages(scheme: str | None, kind: str, choice: GroupedTile, arch: ArchTraits) -> set[int]:
    """Returns the numbers of stages, up to 4, that fill an SM's shared memory with one and with two programs (with two
    strips in a step also with four): a smaller space, as each tile costs a compilation. x counts with its largest
    possible width."""
    scheme_of = SCHEMES[scheme] if scheme else None
    x_bits = 16 if scheme_of is None or scheme_of.activation is None else 8
    one = (
        min_shared_bytes(scheme, kind, choice | {"num_stages": 2}) + choice["BLOCK_M"] * choice["BLOCK_K"] * x_bits // 8
    )
    shared_by = (1, 2, 4) if widens(scheme, arch) and choice["BLOCK_K"] > STRIP else (1, 2)
    return {min(4, 1 + max(1, arch.smem_per_block // programs // one)) for programs in shared_by}


def candidates(shape: MoeShape, kind: str, arch: ArchTraits, cost: CostOf) -> Candidates:
    """Returns the tiles that compile, fit `arch` and spill nothing; `cost` returns their records, if known."""
    result = Candidates()
    for choice in space(kind):
        reason = why_not(shape, kind, choice, arch)
        record = cost(shape.product_tile(kind, choice), arch) if reason is None else None
        if reason is None and record is not None:
            reason = unfit(record, arch)
        if reason is not None:
            result.pruned.append((choice, reason))
        elif isinstance(record, TileRecord):
            result.kept.append((choice, record))
        else:
            result.unknown.append(choice)
    return result


def unfit(record: TileRecord | str, arch: ArchTraits) -> str | None:
    """Returns a reason against a tile that was compiled, or that could not be."""
    if isinstance(record, str):
        return f"does not compile: {record.removeprefix('does not compile: ')}"
    if record.smem > arch.smem_per_block:
        return f"too much shared memory: {record.smem:,} B, {arch.name} has {arch.smem_per_block:,} B"
    if record.spills:
        return f"spills: {record.spills} B, {record.registers} registers"
    return None


def dequantize_cost_of(scheme: str | None, record: TileRecord) -> DequantizeCost | None:
    """Returns how a product dequantizes its weights, judged by the instructions of the compiled tile; None if it
    multiplies them as they are."""
    if scheme is None:
        return None
    dequantized = multiplies_in_16_bits(record)
    if not dequantized and (SCHEMES[scheme].element != "e2m1" or not any("mxf8f6f4" in name for name in record.mma)):
        return None
    return dequantize_cost(
        scheme, "wgmma" if any(name.startswith("wgmma") for name in record.mma) else "mma", dequantized
    )


def multiplies_in_16_bits(record: TileRecord) -> bool:
    """Returns whether a tile multiplies in 16 bits."""
    return all(name.split()[-1] in ("bf16", "f16") for name in record.mma)


def grouped_product(shape: MoeShape, kind: str, record: TileRecord) -> GroupedProduct:
    """Returns the shape of a product for the cost model."""
    scheme = SCHEMES[shape.scheme] if shape.scheme else None
    dequantized = scheme is not None and multiplies_in_16_bits(record)
    if scheme is None or dequantized:
        x_bytes = 2.0
    else:
        x_bytes = 0.5625 if scheme.activation == "nvfp4" else 1.0
    return GroupedProduct(
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        columns=shape.columns(kind),
        depth=shape.depth(kind),
        width=shape.width(kind),
        x_bytes=x_bytes,
        w_bytes=scheme.bytes_per_weight() if scheme else 2.0,
        out_bytes=2.0,
        dequantize_cost=dequantize_cost_of(shape.scheme, record),
        scaled_every=128 if shape.scheme == "fp8_block" else 0,
        gathers_tokens=kind == "gate_up",
    )
