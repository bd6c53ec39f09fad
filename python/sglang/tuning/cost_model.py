"""Estimates the time of a grouped product of tokens with their experts' weights for a tile, without a GPU.

A program computes BLOCK_M pairs x BLOCK_N columns in depth / BLOCK_K steps. Programs run in waves over the SMs,
`occupancy` of them on each. The estimate is a smooth maximum of three times:

- the chain: for each wave, a prologue, the steps, an epilogue. A step takes the time of the SM's shared units for all
  of its programs (matrix unit, dequantizing, shared memory, its part of the L2), and at least the load latency of a
  stage divided by the stages in flight: this is what a deep pipeline hides;
- all bytes over the memory's bandwidth: the weights of every chosen expert, activations, results; the bandwidth is
  lower with few loads in flight, and with short rows;
- all loads over the L2's bandwidth.

Tokens are assumed to choose experts evenly and independently. The constants are fitted to measurements; registers and
shared memory of a tile come from compiling it. Every time is in seconds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.spec import Tile, TileRecord
from sglang.tuning.instructions import DequantizeCost
from sglang.tuning.rates import CEILINGS, RATES, Rates, ceilings_of, rates_of

REGISTERS_PER_SM = 65536
REGISTER_UNIT = 256
"""Registers are given to a warp in units of this many."""
SHARED_RESERVED = 1024
"""Bytes of shared memory that every block takes for itself."""
LANES_PER_SM = 128
SHARED_BYTES_PER_CLOCK = 128.0
FULL_WARPS = 8
"""Number of warps that keep an SM's four matrix units busy."""


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants that no data sheet gives. The defaults are fitted on times measured on an H200, 2026-11-21, by
    lab/kernels/fused_moe_triton/fit_cost_model.py. How well the model chooses with them is in
    benchmark/results/experts.md#the-choice-of-tiles."""

    bandwidth_share: float = 1.0  # of the memory's bandwidth that streaming long rows reaches
    in_flight: float = 0.25  # how much slower it gets with no more bytes on their way than bandwidth x latency
    short_rows: float = 0.175  # and with rows of 128 bytes,
    row_power: float = 1.0  # times this power of 128 bytes over the row's
    matrix_share: float = 0.88  # of the matrix rate that a full SM reaches
    l2_share: float = 1.0  # of the L2's rate
    latency: float = 1.16e-6  # from memory to shared memory
    step_overhead: float = 135e-9  # barriers and addresses of one step of four warps
    prologue: float = 1.75e-6  # of a program: first indices, first loads
    epilogue: float = 0.45e-6  # of a program, besides the bytes that it writes
    issue_share: float = 0.66  # of the instructions that its lanes can issue, while weights are widened
    scale_ops: float = 1.0  # per scaled partial sum
    launch: float = 1.76e-6
    spill_penalty: float = 0.002  # per spilled byte, of the chain; not fitted: tiles that spill are not measured

    def replaced(self, values: Mapping[str, float]) -> Constants:
        """Returns the constants with some of them replaced, by name."""
        return Constants(**{field.name: values.get(field.name, getattr(self, field.name)) for field in fields(self)})


DEFAULT = Constants()
SM120 = Constants(
    bandwidth_share=0.965,  # 1.54 TB/s, the best read that was measured
    in_flight=0.15,
    short_rows=0.025,
    row_power=4.3,
    matrix_share=0.85,
    latency=0.6e-6,
    step_overhead=80e-9,
    prologue=1.95e-6,
)
"""Constants fitted to times of SGLang's Triton experts measured on an RTX PRO 6000 Server;
lab/kernels/card/fit_experts.py says how well. They tell the short rows, the matrix unit's share and the prologue;
latency, loads on their way and a step's overhead could be half or twice that. What they do not tell at all is as on the
H200."""


def constants_of(arch: ArchTraits) -> Constants:
    """Returns the constants of a card. One that nobody measured gets the bandwidth share that `ceilings_of` assumes."""
    if "block_scaled_mma" not in arch.features or "tcgen05" in arch.features:
        return DEFAULT
    if arch.product is None or arch.product in CEILINGS or arch.product not in RATES:
        return SM120
    return replace(SM120, bandwidth_share=ceilings_of(arch).read / arch.bandwidth)


_SHARPNESS = 4.0
"""Exponent of the norm that stands for "the largest of"."""


@dataclass(frozen=True, slots=True)
class GroupedProduct:
    """One of the two products: `columns` of the result, `depth` summed over; bytes are those of one element.

    `width`: rows of weights for one column (2: gate and up). `dequantize_cost`: weights are dequantized in registers.
    `scaled_every`: columns of depth that share a scale, which is applied to partial sums; 0 for none.
    """

    num_experts: int
    top_k: int
    columns: int
    depth: int
    width: int
    x_bytes: float
    w_bytes: float
    out_bytes: float
    dequantize_cost: DequantizeCost | None = None
    scaled_every: int = 0
    gathers_tokens: bool = True  # reads x by token; otherwise by pair


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds, and their parts."""

    total: float
    chain: float
    memory: float
    l2: float
    programs: float
    occupancy: int


def estimate(
    product: GroupedProduct,
    num_tokens: int,
    tile: Tile,
    record: TileRecord,
    arch: ArchTraits,
    constants: Constants | None = None,
) -> Estimate | None:
    """Estimates a product; None if no program of the tile fits an SM. Raises UserError for a GPU without known
    rates."""
    experts, blocks = used_blocks(num_tokens, product.num_experts, product.top_k, tile["BLOCK_M"])
    return estimate_blocks(product, num_tokens, tile, record, arch, experts, blocks, constants)


def estimate_blocks(
    product: GroupedProduct,
    num_tokens: int,
    tile: Tile,
    record: TileRecord,
    arch: ArchTraits,
    experts: float,
    blocks: float,
    constants: Constants | None = None,
) -> Estimate | None:
    """Estimates a product like `estimate`, for a routing with tokens for `experts` experts in `blocks` blocks of
    BLOCK_M rows."""
    rates, constants = rates_of(arch), constants or constants_of(arch)
    occupancy = blocks_per_sm(record, tile["num_warps"], arch, rates)
    if occupancy == 0:
        return None
    launch = _Launch(product, num_tokens, tile, record, arch, rates, constants, occupancy, experts, blocks)
    chain, memory, l2 = launch.chain(), launch.memory(), launch.l2()
    total = constants.launch + _largest(chain, memory, l2)
    return Estimate(total, chain, memory, l2, launch.programs, occupancy)


def blocks_per_sm(record: TileRecord, num_warps: int, arch: ArchTraits, rates: Rates) -> int:
    """Returns the number of programs that share an SM."""
    if record.smem > arch.smem_per_block:
        return 0
    per_warp = -(-max(record.registers, 1) * 32 // REGISTER_UNIT) * REGISTER_UNIT
    return min(
        arch.smem_per_sm // (record.smem + SHARED_RESERVED),
        REGISTERS_PER_SM // (per_warp * num_warps),
        rates.max_threads_per_sm // (32 * num_warps),
        rates.max_blocks_per_sm,
    )


@functools.lru_cache(maxsize=4096)
def used_blocks(num_tokens: int, num_experts: int, top_k: int, block_m: int) -> tuple[float, float]:
    """Returns the expected numbers of experts with at least one token, and of blocks of BLOCK_M rows, when each token
    chooses `top_k`.

    An expert's tokens are binomial; n tokens take ceil(n / BLOCK_M) blocks.
    """
    share = min(1.0, top_k / num_experts)
    if share == 1.0:
        return float(num_experts), float(num_experts * -(-num_tokens // block_m))
    mean, deviation = num_tokens * share, math.sqrt(num_tokens * share * (1 - share))
    low, high = max(0, int(mean - 10 * deviation)), min(num_tokens, int(mean + 10 * deviation) + 10)
    log_share, log_rest, top = math.log(share), math.log1p(-share), math.lgamma(num_tokens + 1)
    blocks = 0.0
    for n in range(max(1, low), high + 1):
        log_p = top - math.lgamma(n + 1) - math.lgamma(num_tokens - n + 1) + n * log_share + (num_tokens - n) * log_rest
        blocks += math.exp(log_p) * -(-n // block_m)
    used = num_experts * -math.expm1(num_tokens * log_rest)
    return used, num_experts * blocks


def even_blocks(num_pairs: int, num_experts: int, block_m: int) -> tuple[float, float]:
    """Returns the numbers of experts with a pair, and of blocks of BLOCK_M rows, when pairs are distributed evenly, as
    for published times."""
    few, more = divmod(num_pairs, num_experts)
    blocks = (num_experts - more) * math.ceil(few / block_m) + more * math.ceil((few + 1) / block_m)
    return float(min(num_experts, num_pairs)), float(blocks)


@dataclass(frozen=True)
class _Launch:
    """One launch of a product with a tile: `blocks` row blocks of `experts` experts, `occupancy` programs on an SM."""

    product: GroupedProduct
    num_tokens: int
    tile: Tile
    record: TileRecord
    arch: ArchTraits
    rates: Rates
    constants: Constants
    occupancy: int
    experts: float
    blocks: float

    @property
    def programs(self) -> float:
        return self.blocks * -(-self.product.columns // self.tile["BLOCK_N"])

    @property
    def steps(self) -> int:
        return -(-self.product.depth // self.tile["BLOCK_K"])

    @functools.cached_property
    def weights(self) -> float:
        """Returns the bytes of weights that a program loads in a step."""
        return self.tile["BLOCK_N"] * self.product.width * self.tile["BLOCK_K"] * self.product.w_bytes

    @functools.cached_property
    def loaded(self) -> float:
        """Returns the bytes that a program loads in a step. Rows without a pair are not loaded."""
        rows = self.num_tokens * self.product.top_k / self.blocks
        return rows * self.tile["BLOCK_K"] * self.product.x_bytes + self.weights

    def chain(self) -> float:
        """Returns the time of all waves of programs; the last wave is less crowded."""
        slots = self.arch.num_sms * self.occupancy
        full, rest = divmod(self.programs, slots)
        crowded = self._program(self.occupancy)
        last = self._program(max(1.0, rest / self.arch.num_sms)) if rest else 0.0
        # Programs of different waves overlap: the more waves, the less of the last one is idle.
        alone = 1.0 / (1.0 + full)
        time = full * crowded + last * alone + crowded * (rest / slots) * (1 - alone)
        return time * (1.0 + self.constants.spill_penalty * self.record.spills)

    def _program(self, sharing: float) -> float:
        """Returns the time of a program that shares its SM with `sharing` - 1 others."""
        constants, tile = self.constants, self.tile
        shared = 2.0 * self.loaded / (SHARED_BYTES_PER_CLOCK * self.rates.clock)
        l2_rate = self._l2_rate()
        fetched = sharing * self.loaded / l2_rate
        # Barriers keep units from working ahead in a step, and the more warps, the later the last one arrives.
        overhead = constants.step_overhead * tile["num_warps"] / 4
        busy = max(sharing * max(self._arithmetic(sharing), shared), fetched) + overhead
        # With s stages, s - 1 are in flight at any time; a single one makes every load wait.
        waited = (constants.latency + fetched) / max(1, tile["num_stages"] - 1)
        stored = tile["BLOCK_M"] * tile["BLOCK_N"] * self.product.out_bytes * sharing / l2_rate
        return constants.prologue + self.steps * max(busy, waited) + constants.epilogue + stored

    def _arithmetic(self, sharing: float) -> float:
        """Returns the times of one step's arithmetic in the matrix unit and in the lanes, if the SM did nothing
        else."""
        product, constants = self.product, self.constants
        m, n, k = self.tile["BLOCK_M"], self.tile["BLOCK_N"] * product.width, self.tile["BLOCK_K"]
        fill = min(1.0, self.tile["num_warps"] * sharing / FULL_WARPS)
        matrix_rate = self.rates.slowest_rate(self.record.mma) / self.arch.num_sms * constants.matrix_share * fill
        dequantized = n * k * self._widening_instructions() / constants.issue_share
        every = product.scaled_every
        scaled = m * n * max(1, k // every) * constants.scale_ops if every else 0.0
        return 2.0 * m * n * k / matrix_rate + (dequantized + scaled) / (LANES_PER_SM * self.rates.clock)

    def _widening_instructions(self) -> float:
        """Returns the number of instructions that dequantize a weight, over all warps that do it."""
        dequantize_cost, tile = self.product.dequantize_cost, self.tile
        if dequantize_cost is None:
            return 0.0
        sizes = (self.product.width, tile["BLOCK_M"], tile["BLOCK_N"], tile["num_warps"])
        counted = dequantize_cost.counted.get(sizes)
        return self._copies() * dequantize_cost.each if counted is None else counted

    def _copies(self) -> int:
        """Returns the number of warps that hold and dequantize the same weights.

        `wgmma` with 64 or more rows of weights takes them from registers, with one warp for each 16 rows; fewer rows
        come from shared memory. Otherwise Triton arranges all warps along the longer side of the block, because the
        strips of a step add to the same sums: along the weights a warp takes at least 8 rows; along the tokens every
        warp holds all weights.
        """
        m, n, warps = self.tile["BLOCK_M"], self.tile["BLOCK_N"], self.tile["num_warps"]
        if any(name.startswith("wgmma") for name in self.record.mma):
            return max(1, warps * 16 // n) if n >= 64 else 1
        return max(1, warps * 8 // n) if n > m else warps

    def _l2_rate(self) -> float:
        """Returns the bytes a second of one SM's part of the L2."""
        return self.rates.l2_bytes_per_clock * self.rates.clock * self.constants.l2_share

    def memory(self) -> float:
        """Returns the time of all bytes from and to memory. Row blocks of an expert find its weights in the L2 if they
        take less than half of it; otherwise each group of GROUP_M row blocks reads them again."""
        product = self.product
        per_expert = product.columns * product.width * product.depth * product.w_bytes
        fits = per_expert <= self.rates.l2_bytes / 2
        reads = 1.0 if fits else max(1.0, self.blocks / self.experts / self.tile["GROUP_M"])
        pairs = self.num_tokens * product.top_k
        activations = (self.num_tokens if product.gathers_tokens else pairs) * product.depth * product.x_bytes
        total = self.experts * per_expert * reads + activations + pairs * product.columns * product.out_bytes
        return total / self._bandwidth()

    def _bandwidth(self) -> float:
        """Returns the memory's bandwidth in bytes a second. Loads in flight hide the latency; whole lines and pages are
        read."""
        arch, constants = self.arch, self.constants
        sharing = min(float(self.occupancy), self.programs / arch.num_sms)
        on_their_way = sharing * max(1, self.tile["num_stages"] - 1) * self.weights
        needed = arch.bandwidth * constants.latency / arch.num_sms
        row_bytes = self.tile["BLOCK_K"] * self.product.w_bytes
        short_rows = constants.short_rows * math.pow(128.0 / row_bytes, constants.row_power)
        slowdown = (1.0 + constants.in_flight * needed / on_their_way) * (1.0 + short_rows)
        return arch.bandwidth * constants.bandwidth_share / slowdown

    def l2(self) -> float:
        """Returns the time of all programs' loads from the L2."""
        return self.programs * self.steps * self.loaded / (self._l2_rate() * self.arch.num_sms)


def _largest(*times: float) -> float:
    maximum = max(times)
    return maximum * math.pow(math.fsum(math.pow(time / maximum, _SHARPNESS) for time in times), 1 / _SHARPNESS)
