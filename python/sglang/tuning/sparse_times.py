"""Times of sparse attention and its indexer, from their tiles and measurements on an H200. No torch; times in
microseconds inside, seconds from the public functions.

Attention: programs of BLOCK_H heads of one token walk over a share of its entries. A step waits for gathered rows like
a step of decode attention, so `carried_step_times` is used; with an H200's clock it gives 0.72 to 1.0 of the kernel's
measured time (benchmark/results/attention.md#shares-of-a-step-and-ceilings), also with shared memory so limited that an
SM ran one program. The indexer: scores at the share of the best products' rate that they reach there, and SM clocks of
the choice for each score.
"""

from __future__ import annotations

from collections.abc import Mapping

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.layers.attention.entry_shares import START_TILES, num_shares
from sglang.tuning.attention_model import SHARED, Keys, largest, waves_of
from sglang.tuning.ops import EntryChoice, SelectedAttention
from sglang.tuning.rates import ceilings_of, rates_of
from sglang.tuning.served_attention import carried_step_times
from sglang.tuning.streaming import LAUNCH

CARD_CLOCK = 2.43e9
"""Clocks a second of the card that the times of a step are from."""
SCORE_SHARE = 0.57
"""Share of the best measured e4m3 products that scores reach there: 0.57 to 0.6, with 32 heads as with 64."""
CHOICE_CLOCKS = 2.6
"""Clocks of an SM for each score in the choice: 2.4 to 2.8."""
LEVEL = 1.7e-5
"""Seconds of a level of the choice for few tokens, of up to LEVEL_ENTRIES each: 16 to 22 us there."""
LEVEL_ENTRIES = 16384


def attention_seconds(op: SelectedAttention, tile: Mapping[str, int], occupancy: int, arch: ArchTraits) -> float:
    """Returns the seconds of sparse attention with a tile. occupancy: its programs on an SM."""
    n = tile["BLOCK_N"]
    head_tiles, tiles = -(-op.heads // tile["BLOCK_H"]), -(-op.entries // n)
    shares = num_shares(op.tokens * head_tiles, tiles, arch.num_sms * tile["ctas_per_sm"])
    programs, steps = op.tokens * head_tiles * shares, -(-tiles // shares) + START_TILES
    loaded = float(op.tokens) * op.entries * op.row * head_tiles
    row = Keys(1, n, op.heads, 1, op.head_dim, op.v_head_dim, op.item, latent=True)
    times, slower = carried_step_times(row, tile), CARD_CLOCK / rates_of(arch).clock
    sharing = min(float(max(1, occupancy)), max(1.0, programs / arch.num_sms))
    step = largest((times.step + times.cold * op.read / loaded) * slower, sharing * times.busy)
    chain = waves_of(programs / (arch.num_sms * sharing)) * steps * step
    memory = op.read / ceilings_of(arch).read * 1e6
    merging = 0.0
    if shares > 1:
        merging = LAUNCH * 1e6 + 8.0 * op.tokens * op.heads * shares * op.v_head_dim / SHARED.l2 * 1e-6
    return LAUNCH + (largest(chain, loaded / SHARED.l2 * 1e-6, memory) + merging) * 1e-6


def choice_seconds(op: EntryChoice, arch: ArchTraits) -> float:
    """Returns the seconds for contexts longer than the number of chosen entries: shorter ones need no scores."""
    clocks, ceilings = arch.num_sms * rates_of(arch).clock, ceilings_of(arch)
    levels = 1 if op.entries <= LEVEL_ENTRIES else 2
    launched = LAUNCH + levels * LEVEL * min(1.0, 1.75e9 / rates_of(arch).clock)
    scores = ceilings.floor(op.num_bytes, op.operations / SCORE_SHARE, op.operand)
    return launched + scores + float(op.tokens) * op.entries * CHOICE_CLOCKS / clocks
