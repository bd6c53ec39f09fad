"""The exact top-k of each row of logits, without sort or atomics, so the result is deterministic.

A program holds up to TILE entries of a row in registers, as 32-bit integers in the order of their logits. It finds the
k-th largest by bisection: each round counts the entries that are at least a number between two bounds, which then
replaces one bound, until the count is k. Longer rows are reduced first: level 0 keeps the k largest of each TILE
entries, level 1 selects among those kept, and so on; a row ends at the first level where one program sees all its
remaining entries. So logits are read once, and the kept ones of long rows once more per level.

Rows of no more than k entries keep all of them, without reading logits. Reference: `native_sparse_ops.top_entries`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.selection import EntryRows
from sglang.srt.layers.triton_ops import pdl

LAUNCHES = (
    {"TILE": 4096, "num_warps": 4},
    {"TILE": 8192, "num_warps": 8},
    {"TILE": 16384, "num_warps": 16},
)
"""Launch configurations, ascending, with 32 entries per thread."""
LEVELS = 4
"""Maximum number of launches, enough to select 2,048 of eight million entries."""


@triton.jit
def _keys(logits):
    """Integers in the order of the numbers, above the smallest; -0 is 0."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return tl.maximum(tl.where(bits < 0, bits ^ 2147483647, bits), -2147483647)


@triton.jit
def _number(key):
    return tl.where(key < 0, key ^ 2147483647, key).to(tl.float32, bitcast=True)


@triton.jit
def _threshold(keys, valid, wanted):
    """The largest key that at least `wanted` of the keys are not smaller than; those that are not valid have the
    smallest integer. The first four rounds halve the range of the numbers; of the others every second one assumes that
    the numbers in what is left are spread evenly, and every second one halves the range of the keys, so that no row
    takes long. Of sums of products this is 11 rounds instead of 19 with halves of keys alone."""
    at_low = tl.sum(valid.to(tl.int32), 0)
    above_high = 0
    low = tl.min(tl.where(valid, keys, 2147483647), 0)
    high = tl.where(at_low > wanted, tl.max(keys, 0), low)
    number = 0
    while low < high:
        even = (at_low - wanted).to(tl.float32) / (at_low - above_high).to(tl.float32)
        even = (low.to(tl.float32) + even * (high.to(tl.float32) - low.to(tl.float32))).to(tl.int32)
        halves = (low | high) - ((low ^ high) >> 1)  # rounded up, without a sum that overflows
        middle = tl.where(number % 2 == 0, even, halves)
        middle = tl.where(number < 4, _keys(0.5 * _number(low) + 0.5 * _number(high)), middle)
        middle = tl.minimum(tl.maximum(middle, low + 1), high)
        count = tl.sum((keys >= middle).to(tl.int32), 0)
        above_high = tl.where(count < wanted, count, above_high)
        at_low = tl.where(count >= wanted, count, at_low)
        high = tl.where(count == wanted, middle, tl.where(count > wanted, high, middle - 1))
        low = tl.where(count >= wanted, middle, low)
        number += 1
    return low


@triton.jit
def _ranks(flags, TILE: tl.constexpr):
    """Flags [TILE] int32 of 0 and 1 -> [TILE / 4, 4], how many are set up to each one, itself included. Four neighbours
    are one thread's: between threads only their sums are added up."""
    fours = tl.reshape(flags, [TILE // 4, 4])
    sums = tl.sum(fours, 1)
    return tl.cumsum(fours, 1) + (tl.cumsum(sums, 0) - sums)[:, None]


@triton.jit(
    do_not_specialize=["num_parts", "top_k", "rate", "stride_rt", "stride_kept", "stride_out"],
    do_not_specialize_on_alignment=["counts_ptr", "req_pool_indices_ptr", "chosen_ptr"],
)
def select_entries_kernel(
    logits_ptr, kept_ptr, counts_ptr, req_to_token_ptr, req_pool_indices_ptr, out_ptr, slots_ptr, chosen_ptr,
    num_parts, top_k, rate, stride_logits, stride_rt, stride_kept, stride_out,
    LEVEL: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Level LEVEL of logits [T, N] fp32 with counts [T]. Rows that end here -> slots [T, top_k] int32 in ascending
    order of entries, -1 behind the last, and chosen [T] int32, how many there are. Of others the entries that are kept
    -> out [T, parts, top_k] int32, which is kept [T, cells] of the next level; -1: none. Grid: (T * parts,)."""
    pid = tl.program_id(0)
    part = pid % num_parts
    row = (pid // num_parts).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.load(counts_ptr + row)
    cells = count
    if LEVEL > 0:
        for _ in tl.static_range(LEVEL - 1):
            cells = tl.cdiv(cells, TILE) * top_k
        if cells <= TILE:
            return  # an earlier level has ended it
        cells = tl.cdiv(cells, TILE) * top_k
    table_ptr = req_to_token_ptr + tl.load(req_pool_indices_ptr + row).to(tl.int64) * stride_rt
    slots_ptr += row * top_k
    CHUNK: tl.constexpr = TILE // 8
    if LEVEL == 0:
        if part == 0:
            tl.store(chosen_ptr + row, tl.minimum(count, top_k))
        if count <= top_k:
            for first in range(part * CHUNK, top_k, num_parts * CHUNK):
                pos = first + tl.arange(0, CHUNK)
                slot = tl.load(table_ptr + pos * rate, mask=pos < count, other=-1)
                tl.store(slots_ptr + pos, tl.where(pos < count, slot // rate, -1), mask=pos < top_k)
            return
    if part * TILE >= cells:
        return

    offsets = tl.arange(0, TILE)
    places = part * TILE + offsets
    logits_ptr += row * stride_logits
    if LEVEL == 0:
        entries = places
        valid = entries < cells
        # Columns are padded to a multiple of 16: so the compiler knows that 16 are read or none.
        readable = tl.multiple_of(tl.cdiv(cells, 16) * 16, 16)
        logits = tl.load(logits_ptr + entries, mask=entries < readable, other=0.0)
    else:
        entries = tl.load(kept_ptr + row * stride_kept + places, mask=places < cells, other=-1)
        valid = entries >= 0
        logits = tl.load(logits_ptr + entries, mask=valid, other=0.0)
    keys = tl.where(valid, _keys(logits), -2147483648)
    wanted = tl.minimum(top_k, tl.sum(valid.to(tl.int32), 0))
    threshold = _threshold(keys, valid, wanted)
    take = keys >= threshold
    if tl.sum(take.to(tl.int32), 0) > wanted:
        # More are equal to the k-th than are wanted: the first ones.
        missing = wanted - tl.sum((keys > threshold).to(tl.int32), 0)
        ranks = tl.reshape(_ranks((keys == threshold).to(tl.int32), TILE), [TILE])
        take = take & ((keys > threshold) | (ranks <= missing))
    at = _ranks(take.to(tl.int32), TILE) - 1
    take = tl.reshape(take, [TILE // 4, 4])
    entries = tl.reshape(places, [TILE // 4, 4])
    ends = cells <= TILE
    if not ends:
        slots_ptr = out_ptr + row * stride_out + part * top_k
    if LEVEL > 0:
        # Once more, so that they need no registers meanwhile.
        entries = tl.load(kept_ptr + row * stride_kept + entries, mask=take, other=0)
    tl.store(slots_ptr + at, entries, mask=take)
    if ends:
        tl.debug_barrier()
    # Slots are looked up for what was taken, not for all that was looked at.
    for first in range(0, top_k, CHUNK):
        place = first + tl.arange(0, CHUNK)
        if not ends:
            tl.store(slots_ptr + place, -1, mask=(place >= wanted) & (place < top_k))
        else:
            entry = tl.load(slots_ptr + place, mask=place < top_k, other=0)
            slot = tl.load(table_ptr + entry * rate, mask=place < top_k, other=0) // rate
            tl.store(slots_ptr + place, slot, mask=place < top_k)


def launch_for(max_count: int, top_k: int, launches: Sequence[Mapping[str, int]] = LAUNCHES) -> Mapping[str, int]:
    """Returns the smallest launch whose programs hold a whole row, or eight times top_k, and that finishes every row
    within LEVELS. Raises ValueError if there is none."""
    for launch in launches:
        tile = launch["TILE"]
        if tile >= min(max(max_count, 2 * top_k), 8 * top_k) and tile * (tile // top_k) ** (LEVELS - 1) >= max_count:
            return launch
    raise ValueError(f"no launch chooses {top_k} of {max_count} entries")


def select_entries(
    logits: torch.Tensor,
    rows: EntryRows,
    top_k: int,
    slots: torch.Tensor,
    chosen: torch.Tensor,
    *,
    launches: Sequence[Mapping[str, int]] = LAUNCHES,
) -> None:
    """Fills slots [T, top_k] int32 (contiguous; -1 after the last) and chosen [T] int32 with the entries of the largest
    logits [T, rows.max_count or more] fp32 among the first rows.counts, in ascending order; of equal ones the first
    win. Raises ValueError if the stride of logits is no multiple of 16."""
    num_rows = len(rows)
    if num_rows == 0:
        return
    if logits.stride(0) % 16:
        raise ValueError(f"rows of logits lie {logits.stride(0)} apart, which 16 does not divide")
    cells = rows.max_count if rows.max_count > top_k else top_k
    launch = launch_for(cells, top_k, launches)
    kept = slots
    for level in range(LEVELS):
        parts = triton.cdiv(cells, launch["TILE"])
        out = slots.new_empty((num_rows, parts * top_k)) if parts > 1 else slots
        select_entries_kernel[(num_rows * parts,)](
            logits, kept, rows.counts, rows.req_to_token, rows.req_pool_indices, out, slots, chosen, parts, top_k,
            rows.rate, logits.stride(0), rows.req_to_token.stride(0), kept.stride(0), out.stride(0), LEVEL=level,
            **launch, **pdl.options(),
        )  # fmt: skip
        kept, cells = out, parts * top_k
        if parts == 1:
            break
