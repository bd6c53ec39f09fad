"""Estimates the time of this project's attention and recurrence kernels from their tiles, the ledger's records and
counted instructions. No torch; times in microseconds inside, seconds from the public functions.

Prompts: a step takes the time of the matrix unit and the counted instructions and, with a single buffer, the time until
its keys arrive. One number of it is fitted. For SGLang's kernels, which wait for both in turn, the same sum matches an
RTX PRO 6000 Server (benchmark/results/card.md#the-same-code-on-an-h200).

Decoding on SM120: the model of `attention_model` with steps taken from SGLang's kernels; not confirmed on a card. On
GPUs with wgmma: `READING`, fitted to an H200.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sglang.srt.hardware.arch import ArchTraits, arch_by_name
from sglang.srt.kernels.spec import TileRecord
from sglang.tuning.attention_model import (
    NUM_SMS,
    SHARED,
    DecodeShared,
    Keys,
    Pieces,
    Prompt,
    PromptTile,
    PromptTimes,
    StepTimes,
    largest,
    prompt_seconds,
    waves_of,
)
from sglang.tuning.cost_model import FULL_WARPS, LANES_PER_SM, SM120, blocks_per_sm, constants_of
from sglang.tuning.instructions import pair_instructions
from sglang.tuning.rates import ceilings_of, rates_of
from sglang.tuning.streaming import ISSUED

# --- decoding ---------------------------------------------------------------------------------------------------------

SHORT_PIECE = 512
"""Shortest piece in tokens, equal to that of decode_attention; a test holds the two together."""
SERVED_CONTEXT = 131_072
"""Tokens that a server lets a request have: decode attention launches programs for so many."""
MERGE = 1.2
"""Microseconds of one round of that, on an H200: two loads that wait for each other. The fit says 1.13 to 1.24,
whichever heads it leaves out."""


def merged_at_once(keys: Keys) -> int:
    """Returns the pieces that a merging round takes, as in `combine_constants`."""
    columns = 1 << (keys.v_head_dim - 1).bit_length()
    if keys.batch <= 8 and keys.heads * keys.batch * -(-keys.v_head_dim // 16) <= 4096:
        columns = 16
    return max(16, 4096 // columns)


def planned_pieces(keys: Keys, tile: Mapping[str, int], occupancy: int, num_sms: int = NUM_SMS) -> Pieces:
    """Returns the pieces into which `plan_kernel` cuts requests of equal length. `parts`: merging rounds of a request's
    pieces."""
    tiles = keys.kv_heads * -(-keys.group // tile["BLOCK_H"])
    slots = max(1, num_sms * tile["ctas_per_sm"] // tiles)
    n = tile["BLOCK_N"]
    of_request = -(-keys.context // n)
    total = keys.batch * of_request
    length = max(-(-total // (slots * tile["waves"])), min(-(-total // slots), SHORT_PIECE // n), 1)
    if tile["waves"] <= 2:
        longer = [length + i * -(-length // 8) for i in range(16)]
        length = min(longer, key=lambda n: (math.ceil(keys.batch * math.ceil(of_request / n) / slots) * n, -n))
    count = -(-of_request // length)
    programs = keys.batch * count * tiles
    short = keys.batch * -(-max(SERVED_CONTEXT, keys.context) // SHORT_PIECE)
    launched = (keys.batch + min(slots * tile["waves"], max(slots, short))) * tiles
    rounds = 0.0 if count == 1 else float(-(-count // merged_at_once(keys)))
    return Pieces(programs, -(-of_request // count), n, occupancy, launched, 1.0, rounds)


LONELY, PER_ELEMENTS, COLD = 0.6, 0.33, 0.95
"""Microseconds of a step of a lonely program, for each 4,096 cached elements of it, and when they come from memory:
what the fits on SGLang's kernels have in common (within a third)."""
ARITHMETIC = 1.5
"""A full SM's step over that of its matrix products, as in the fits."""
LAUNCHES = 5.0
"""The time of the two launches, in a graph with programmatic launches; SGLang's take 4.3 to 12."""
CARD = arch_by_name("rtx-pro-6000-server")


def shared_times(arch: ArchTraits) -> DecodeShared:
    """Returns the constants that decode kernels share on a card, scaled from the card on which they were fitted."""
    ceilings, theirs = ceilings_of(arch), ceilings_of(CARD)
    l2 = SHARED.l2 * arch.num_sms * rates_of(arch).clock / (CARD.num_sms * rates_of(CARD).clock)
    return replace(SHARED, part=MERGE, bandwidth=SHARED.bandwidth * ceilings.read / theirs.read, l2=l2)


def carried_step_times(keys: Keys, tile: Mapping[str, int], arch: ArchTraits = CARD) -> StepTimes:
    """Returns the times of a step over a tile of keys, carried over from the card that was measured."""
    elements = tile["BLOCK_N"] * keys.row
    on_their_way = max(1, tile["num_stages"] - 1)
    operations = 2.0 * max(16, tile["BLOCK_H"]) * tile["BLOCK_N"] * (keys.head_dim + keys.v_head_dim)
    of_sm = rates_of(arch).matrix["half"] * 1e-6 * SM120.matrix_share / arch.num_sms
    busy = operations / of_sm * ARITHMETIC
    step = LONELY + PER_ELEMENTS * elements / 4096 / on_their_way
    return StepTimes(step, COLD / on_their_way, busy, LAUNCHES)


@dataclass(frozen=True, slots=True)
class Reading:
    """Decoding on GPUs with wgmma, in microseconds: both launches; a step of a lone program, and for each 4,096 cached
    elements of it; a full SM's step over that of its products at `mma.sync`'s rate; a program besides its steps; the
    part of a program that nothing overlaps; one round of merging. `bandwidth` in TB/s."""

    base: float = 5.4
    step: float = 0.73
    per_elements: float = 0.087
    arithmetic: float = 0.81
    program: float = 0.5
    tail: float = 0.83
    merge: float = MERGE
    bandwidth: float = 4.3


READING = Reading()
"""Fitted on 37 times of an H200 (lab/kernels/card/fit_h200.py, which says how well): `base`, `merge` and
`bandwidth` are told by them, the other five only together."""


def reading_seconds_of(keys: Keys, pieces: Pieces, tile: Mapping[str, int], arch: ArchTraits, times: Reading) -> float:
    """Returns the seconds of decoding attention over the keys, in these pieces."""
    sharing = min(float(pieces.occupancy), max(1.0, pieces.programs / arch.num_sms))
    elements = tile["BLOCK_N"] * keys.row
    lonely = times.step + times.per_elements * elements / 4096 / max(1, tile["num_stages"] - 1)
    rates = rates_of(arch)
    rate = rates.matrix["half"] * rates.mma_sync_share * 1e-6 / arch.num_sms
    operations = 2.0 * max(16, tile["BLOCK_H"]) * tile["BLOCK_N"] * (keys.head_dim + keys.v_head_dim)
    step = largest(lonely, sharing * operations / rate * times.arithmetic)
    alone = pieces.steps * step + times.program
    chain = waves_of(pieces.programs / (arch.num_sms * sharing)) * alone
    reading = keys.cache_bytes / times.bandwidth * 1e-6 + times.tail * alone
    return (times.base + max(chain, reading) + pieces.parts * times.merge) * 1e-6


# --- prompts ----------------------------------------------------------------------------------------------------------


def served_prompt_seconds(prompt: Prompt, tile: Mapping[str, int], record: TileRecord, arch: ArchTraits) -> float:
    """Returns the seconds of prompt attention with a tile of this server."""
    m, n, rates = tile["BLOCK_M"], tile["BLOCK_N"], rates_of(arch)
    occupancy = max(1, blocks_per_sm(record, tile["num_warps"], arch, rates))
    programs = prompt.batch * prompt.heads * -(-prompt.new // m) / arch.num_sms
    step = counted_step(prompt, tile, max(1.0, min(float(occupancy), programs)), arch)
    times = PromptTimes(step=step, busy=0.0, program=1.0, masked=0.1, base=4.0, rows=2.0)
    return prompt_seconds(prompt, PromptTile(m, n, occupancy, skips=True), times, arch.num_sms)


FROM_L2 = {"wgmma": 0.25}
"""Microseconds until the first of a block of keys is there, which other programs have read before: by an H200's times
with the tiles of SM120. Without wgmma as long as from memory, which SGLang's kernels on an RTX PRO 6000 agree with."""


def counted_step(prompt: Prompt, tile: Mapping[str, int], sharing: float, arch: ArchTraits) -> float:
    """Returns the time of one step of every program on an SM with `sharing` programs. With two stages there is one
    buffer, which is refilled after its use; with more, keys arrive meanwhile. Programs on one SM fill each other's
    waits: all of them with wgmma, which is asynchronous."""
    m, n, rates = tile["BLOCK_M"], tile["BLOCK_N"], rates_of(arch)
    dims, by_itself = prompt.head_dim + prompt.v_head_dim, "wgmma" in arch.features
    multiplying = 2.0 * m * n * dims / (ceilings_of(arch).products["half"] * 1e-6 / arch.num_sms)
    lanes = LANES_PER_SM * rates.clock * 1e-6 * ISSUED
    issuing = m * n * pair_instructions((prompt.head_dim, prompt.v_head_dim), arch.name) / lanes
    fill = 1.0 if by_itself else min(1.0, tile["num_warps"] / FULL_WARPS)
    computing = multiplying / fill + issuing
    latency = FROM_L2["wgmma"] if by_itself else constants_of(arch).latency * 1e6
    arriving = n * dims * prompt.item / (rates.l2_bytes_per_clock * rates.clock) * 1e6
    if tile["num_stages"] <= 2:
        alone = computing + latency + arriving
    else:
        alone = max(computing, (latency + sharing * arriving) / (tile["num_stages"] - 1))
    if sharing <= 1.0:
        return alone
    together = sharing * (multiplying + issuing)
    return max(together, alone) if by_itself else math.hypot(together, alone)


# --- the gated delta rule ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scan:
    """The form of its prompts: `chunk` tokens at once, and a program takes some `columns` of a head's state through the
    chunks of a request, which wait for each other: the fewest with which each program has an SM, else the most. A test
    holds both to the kernels. A chunk takes `waits` microseconds besides `operations` a column on a whole SM. `local`:
    instructions of the lanes for what a chunk of a head needs besides, counted, which take `local_times` as long as the
    lanes need to issue them."""

    chunk: int
    columns: tuple[int, ...]
    operations: float
    waits: float
    local: float
    local_times: float


SCAN = Scan(32, (16, 32, 64), 112 * 2 * 8 * 16, 0.8, 4 * 32 * 2818.0, 1.9)
"""The products are counted: 112 of 16 x 8 x 16 for 16 columns. The waits are those of SGLang's kernels on an RTX PRO
6000 Server, which take two heads through 64 tokens in 1.26 us, 0.43 us of it products; an H100 has 0.7 to 1.0 us here.
An H100 takes 288 us for the first launch of 8,192 tokens of 32 heads, whose lanes would need 151."""


def delta_rule_seconds(batch: int, tokens: int, heads: int, value_dim: int, arch: ArchTraits) -> float:
    """Returns the seconds of the gated delta rule over prompts of `tokens` tokens."""
    chunks = -(-tokens // SCAN.chunk)
    lanes = arch.num_sms * LANES_PER_SM * rates_of(arch).clock * constants_of(arch).issue_share
    local = batch * chunks * heads * SCAN.local * SCAN.local_times / lanes
    programs = {columns: batch * heads * -(-value_dim // columns) for columns in SCAN.columns}
    columns = next((columns for columns, count in programs.items() if count <= arch.num_sms), SCAN.columns[-1])
    step = SCAN.operations * columns * arch.num_sms / ceilings_of(arch).products["half"] + SCAN.waits * 1e-6
    return 2 * 2.0e-6 + local + waves_of(programs[columns] / arch.num_sms) * chunks * step
