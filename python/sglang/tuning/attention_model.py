"""Estimates the time of attention kernels on an SM120 card, without a GPU. Times in microseconds inside, seconds from
the public functions.

Decoding: programs walk over the keys of their piece in dependent steps. A step of a program that is alone on its SM
takes `step`, and `cold` more when keys come from memory instead of the L2; on a full SM it takes `busy` for each
program. Before and after its steps a program takes `program`. The card's dispatcher takes time for each launched
program, also those without a piece. The bandwidths of memory and L2 are lower bounds. Prompts: programs of BLOCK_M
queries walk over the keys before them, and the longest one decides.

The constants of SGLang's Triton kernels are fitted to times measured on an RTX PRO 6000 Server
(lab/kernels/card/fit_attention.py). This project's kernels: `served_attention`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

NUM_SMS = 188
_SHARPNESS = 4.0


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one step of a layer: `batch` requests with `context` keys each, `heads` query heads and `kv_heads` on
    a rank. `latent`: values are the first columns of the keys (MLA)."""

    batch: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    item: int = 2  # bytes of a cached element
    latent: bool = False

    @property
    def row(self) -> int:
        """Returns the cached elements of a token and KV head."""
        return self.head_dim if self.latent else self.head_dim + self.v_head_dim

    @property
    def cache_bytes(self) -> int:
        """Returns the bytes that are read from the cache."""
        return self.batch * self.kv_heads * self.context * self.row * self.item

    @property
    def group(self) -> int:
        """Returns the query heads of a KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Pieces:
    """A launch of a decode kernel: `programs` with `steps` of `block_n` keys each, `occupancy` of them on an SM;
    `launched` also counts those without work, `combined` the pieces of a request that a second kernel merges."""

    programs: float
    steps: float
    block_n: int
    occupancy: int
    launched: float
    combined: float
    parts: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of one compiled decode kernel in microseconds; `base`: both launches without work; `program`: time of a
    program besides its steps."""

    step: float
    cold: float
    busy: float
    base: float
    program: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeShared:
    """Constants of all decode kernels. `dispatch`: nanoseconds of a launched program; rates in TB/s; keys of up to
    `warm_mb` are in the L2 when a graph is replayed, and hardly any beyond exp(`warm_width`) times that."""

    dispatch: float = 0.975
    l2: float = 7.1
    bandwidth: float = 1.44
    warm_mb: float = 102.0
    warm_width: float = 0.4
    reread: float = 0.476  # share of repeated reads by tiles of latent heads that miss the L2
    combine: float = 0.0616  # nanoseconds of the second kernel for a head and piece
    part: float = 0.241  # the same, for each further piece


SHARED = DecodeShared()


def decode_seconds(
    keys: Keys,
    pieces: Pieces,
    times: StepTimes,
    shared: DecodeShared = SHARED,
    cold: bool = False,
    num_sms: int = NUM_SMS,
) -> float:
    """Returns the seconds of a decode step. `cold`: nothing is in the L2, as in a model whose other layers have
    replaced its content."""
    size = keys.cache_bytes
    missed = 1.0 if cold else from_memory_share(size, shared)
    sharing = min(float(pieces.occupancy), max(1.0, pieces.programs / num_sms))
    step = largest(times.step + times.cold * missed, sharing * times.busy)
    chain = waves_of(pieces.programs / (num_sms * sharing)) * (pieces.steps * step + times.program)
    loaded = pieces.programs * pieces.steps * pieces.block_n * keys.row * keys.item
    again = max(0.0, loaded / size - 1.0) * shared.reread * missed if keys.latent else 0.0
    memory = size * (1.0 + again) * missed / shared.bandwidth * 1e-6
    work = largest(chain, loaded / shared.l2 * 1e-6, memory)
    combining = keys.batch * keys.heads * pieces.combined * shared.combine * 1e-3 + pieces.parts * shared.part
    return (times.base + work + pieces.launched * shared.dispatch * 1e-3 + combining) * 1e-6


def from_memory_share(num_bytes: float, shared: DecodeShared = SHARED) -> float:
    """Returns the share of reused operands that a replay reads from memory instead of the L2."""
    return min(1.0, max(0.0, math.log(max(1.0, num_bytes) / (shared.warm_mb * 1e6)) / shared.warm_width))


def waves_of(waves: float) -> float:
    """Returns the effective number of waves. Programs of different waves overlap: the more waves, the less of the last
    one is idle."""
    return 1.0 if waves <= 1.0 else waves + 0.5 * (math.ceil(waves) - waves) / (1.0 + math.floor(waves))


def largest(*times: float) -> float:
    """Returns a smooth maximum, which is larger where two times are close."""
    maximum = max(times)
    return maximum * math.pow(math.fsum(math.pow(time / maximum, _SHARPNESS) for time in times), 1.0 / _SHARPNESS)


# --- prompts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    """`batch` requests with `new` tokens each after `prefix` cached ones. `window` 0: all earlier keys."""

    batch: int
    new: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    prefix: int = 0
    window: int = 0
    item: int = 2

    @property
    def pairs(self) -> float:
        """Returns the pairs of a query and a key, over all heads."""
        if self.window and self.window < self.prefix + self.new:
            return float(self.batch * self.heads * self.new * min(self.window, self.prefix + self.new))
        return self.batch * self.heads * self.new * (self.prefix + (self.new + 1) / 2)

    @property
    def operations(self) -> float:
        """Returns the floating-point operations of a head."""
        return 2.0 * self.pairs * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True)
class PromptTimes:
    """Times of one compiled kernel in microseconds: a step of a program alone on its SM, a step of each program where
    all SMs compute, a program besides its steps, a step masked by the window, the launch, and the extra time of a
    program with all of its rows."""

    step: float
    busy: float
    program: float
    masked: float
    base: float
    rows: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptTile:
    """Tile of a prompt kernel."""

    block_m: int
    block_n: int
    occupancy: int
    skips: bool = False  # skips keys before the window


def prompt_seconds(prompt: Prompt, tile: PromptTile, times: PromptTimes, num_sms: int = NUM_SMS) -> float:
    """Returns the seconds of attention in a prompt."""
    blocks, steps, masked, longest, longest_masked = _walk(prompt.new, prompt.prefix, prompt.window, tile)
    streams = prompt.batch * prompt.heads
    on_sm = min(float(tile.occupancy), streams * blocks / num_sms)
    step = largest(times.step, on_sm * times.busy)
    program = times.program + times.rows * min(1.0, prompt.new / tile.block_m)
    work = streams * (steps * step + masked * times.masked + blocks * program) / (num_sms * max(1.0, on_sm))
    alone = longest * step + longest_masked * times.masked + program
    return (times.base + math.hypot(work, alone)) * 1e-6


@functools.lru_cache(maxsize=65536)
def _walk(new: int, prefix: int, window: int, tile: PromptTile) -> tuple[int, float, float, float, float]:
    """Returns the blocks of queries of one head; the steps of all of them, with and without unmasked keys; and those of
    the last block."""
    m, n = tile.block_m, tile.block_n
    blocks = -(-new // m)
    steps = masked = last = last_masked = 0.0
    for i in range(blocks):
        end = prefix + min((i + 1) * m, new)
        before = max(0, prefix + i * m - window + 1) // n if window else 0
        last, last_masked = float(-(-end // n) - before), float(0 if tile.skips else before)
        steps, masked = steps + last, masked + last_masked
    return blocks, steps, masked, last, last_masked
