"""The exact top-k of each row of logits, by digits: no sort, no atomics, the same answer every time.

Numbers are taken as 32-bit keys of the same order, and the k-th largest is searched for one digit of eight bits after
another. `count_digits_kernel` counts, in the part of a row that a program has, the digits of the keys that begin as the
k-th largest does; the next launch adds the parts up and knows one digit more. After four rounds the k-th largest key is
known, and how many of its equals are taken: the first ones. `gather_entries_kernel` then writes slots in ascending
order of entries; where a part begins to write follows from what earlier parts counted. So rows are read five times
whatever their numbers are, and shared memory holds 256 counters.

Rows of no more than k entries take all of them, without a look at the logits. Reference:
`native_sparse_ops.top_entries`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.selection import EntryRows
from sglang.srt.layers.triton_ops import pdl

ROUNDS = 4
DIGITS = 256
PART_ENTRIES = 4096
"""Entries of a row that are worth a program of their own."""
MOST_PARTS = 64
LAUNCH = {"TILE": 2048, "PARTS_TILE": 16, "num_warps": 4, "num_stages": 2}


@triton.jit
def _keys(logits_ptr, pos, end):
    """Unsigned keys in the order of the numbers; -0 is 0. Up to 15 from `end` on are read and mean nothing: so the
    compiler knows that 16 columns are read or none."""
    readable = tl.multiple_of(tl.cdiv(end, 16) * 16, 16)
    logits = tl.load(logits_ptr + pos, mask=pos < readable, other=0.0)
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return flipped.to(tl.uint32, bitcast=True)


@triton.jit
def _digit_of(counts, wanted):
    """counts [256] of each digit -> the digit of the wanted-th largest, and how many have a larger one."""
    digits = tl.arange(0, 256)
    larger = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    here = (larger < wanted) & (larger + counts >= wanted)
    return tl.sum(tl.where(here, digits, 0), 0), tl.sum(tl.where(here, larger, 0), 0)


@triton.jit
def _sum_of_parts(hist_ptr, num_parts, PARTS_TILE: tl.constexpr):
    """[parts, 256] -> [256]."""
    digits = tl.arange(0, 256)
    total = tl.zeros([256], dtype=tl.int32)
    for first in range(0, num_parts, PARTS_TILE):
        part = first + tl.arange(0, PARTS_TILE)
        rows = hist_ptr + part[:, None] * 256 + digits[None, :]
        total += tl.sum(tl.load(rows, mask=(part < num_parts)[:, None], other=0), 0)
    return total


@triton.jit
def _piece(count, part, num_parts, TILE: tl.constexpr):
    """Begin and end of a part of a row."""
    size = tl.cdiv(tl.cdiv(count, TILE), num_parts) * TILE
    begin = tl.minimum(part * size, count)
    return begin, tl.minimum(begin + size, count)


@triton.jit(do_not_specialize=["num_parts", "top_k"], do_not_specialize_on_alignment=["counts_ptr"])
def count_digits_kernel(
    logits_ptr, counts_ptr, hist_ptr, larger_ptr, state_ptr, num_parts, top_k, stride_logits, stride_round,
    ROUND: tl.constexpr, TILE: tl.constexpr, PARTS_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Round ROUND of logits [T, N] fp32 with counts [T]: the digits' counts hist [2, T, parts, 256] of even and odd
    rounds; larger [T, parts], how many keys of a part are known to be larger than the k-th; state [4, T, 2], the digits
    that are known before each round and how many of the keys that begin so are wanted. Grid: (T * parts,)."""
    pid = tl.program_id(0)
    part = pid % num_parts
    row = (pid // num_parts).to(tl.int64)
    num_rows = tl.num_programs(0) // num_parts
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.load(counts_ptr + row)
    if count <= top_k:
        return
    digits = tl.arange(0, 256)
    known = 0
    wanted = top_k
    if ROUND > 0:
        hist = hist_ptr + (ROUND - 1) % 2 * stride_round + row * num_parts * 256
        larger_keys = 0
        if ROUND > 1:
            before = state_ptr + ((ROUND - 1) * num_rows + row) * 2
            known = tl.load(before)
            wanted = tl.load(before + 1)
            larger_keys = tl.load(larger_ptr + row * num_parts + part)
        digit, above = _digit_of(_sum_of_parts(hist, num_parts, PARTS_TILE), wanted)
        known = known * 256 + digit
        wanted -= above
        own = tl.load(hist + part * 256 + digits)
        larger_keys += tl.sum(tl.where(digits > digit, own, 0), 0)
        tl.store(larger_ptr + row * num_parts + part, larger_keys)
        if part == 0:
            now = state_ptr + (ROUND * num_rows + row) * 2
            tl.store(now, known)
            tl.store(now + 1, wanted)

    begin, end = _piece(count, part, num_parts, TILE)
    logits_ptr += row * stride_logits
    own_counts = tl.zeros([256], dtype=tl.int32)
    for first in tl.range(begin, end, TILE, num_stages=3):
        pos = first + tl.arange(0, TILE)
        keys = _keys(logits_ptr, pos, end)
        alike = pos < end
        if ROUND > 0:
            alike = alike & ((keys >> (32 - 8 * ROUND)).to(tl.int32) == known)
        digit_of_key = ((keys >> (24 - 8 * ROUND)) & 255).to(tl.int32)
        own_counts += tl.histogram(digit_of_key, 256, mask=alike)
    tl.store(hist_ptr + ROUND % 2 * stride_round + (row * num_parts + part) * 256 + digits, own_counts)


@triton.jit
def _store_slots(slots_ptr, table_ptr, rate, at, pos, take):
    slot = tl.load(table_ptr + pos * rate, mask=take, other=0) // rate
    tl.store(slots_ptr + at, slot, mask=take)


@triton.jit(
    do_not_specialize=["num_parts", "top_k", "rate", "stride_rt"],
    do_not_specialize_on_alignment=["counts_ptr", "req_pool_indices_ptr", "chosen_ptr"],
)
def gather_entries_kernel(
    logits_ptr, counts_ptr, hist_ptr, larger_ptr, state_ptr, req_to_token_ptr, req_pool_indices_ptr, slots_ptr,
    chosen_ptr, num_parts, top_k, rate, stride_logits, stride_rt, TILE: tl.constexpr, PARTS_TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """After four rounds (`hist` is that of the last) -> slots [T, top_k] int32 in ascending order of entries, -1 behind
    the last, and chosen [T] int32, how many there are. Grid: (T * parts,)."""
    pid = tl.program_id(0)
    part = pid % num_parts
    row = (pid // num_parts).to(tl.int64)
    num_rows = tl.num_programs(0) // num_parts
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.load(counts_ptr + row)
    if part == 0:
        tl.store(chosen_ptr + row, tl.minimum(count, top_k))
    table_ptr = req_to_token_ptr + tl.load(req_pool_indices_ptr + row).to(tl.int64) * stride_rt
    slots_ptr += row * top_k
    if count <= top_k:
        for first in range(part * TILE, top_k, num_parts * TILE):
            pos = first + tl.arange(0, TILE)
            slot = tl.load(table_ptr + pos * rate, mask=pos < count, other=-1)
            tl.store(slots_ptr + pos, tl.where(pos < count, slot // rate, -1), mask=pos < top_k)
        return

    hist_ptr += row * num_parts * 256
    state = state_ptr + (3 * num_rows + row) * 2
    known = tl.load(state)
    wanted = tl.load(state + 1)
    digit, above = _digit_of(_sum_of_parts(hist_ptr, num_parts, PARTS_TILE), wanted)
    threshold = known.to(tl.uint32, bitcast=True) * 256 + digit.to(tl.uint32)
    equals = wanted - above
    written = 0
    equals_before = 0
    digits = tl.arange(0, 256)
    for first in range(0, part, PARTS_TILE):
        earlier = first + tl.arange(0, PARTS_TILE)
        is_earlier = earlier < part
        written += tl.sum(tl.load(larger_ptr + row * num_parts + earlier, mask=is_earlier, other=0), 0)
        hist = tl.load(hist_ptr + earlier[:, None] * 256 + digits[None, :], mask=is_earlier[:, None], other=0)
        written += tl.sum(tl.sum(tl.where(digits[None, :] > digit, hist, 0), 1), 0)
        equals_before += tl.sum(tl.sum(tl.where(digits[None, :] == digit, hist, 0), 1), 0)
    written += tl.minimum(equals_before, equals)

    begin, end = _piece(count, part, num_parts, TILE)
    logits_ptr += row * stride_logits
    for first in tl.range(begin, end, TILE, num_stages=3):
        pos = first + tl.arange(0, TILE)
        keys = _keys(logits_ptr, pos, end)
        equal = ((keys == threshold) & (pos < end)).to(tl.int32)
        place = equals_before + tl.cumsum(equal, 0)
        take = ((keys > threshold) & (pos < end)) | ((equal > 0) & (place <= equals))
        taken = take.to(tl.int32)
        _store_slots(slots_ptr, table_ptr, rate, written + tl.cumsum(taken, 0) - 1, pos, take)
        written += tl.sum(taken, 0)
        equals_before += tl.sum(equal, 0)


def num_parts(num_rows: int, entries: int, num_sms: int) -> int:
    """Programs that share a row of up to `entries` logits."""
    return max(1, min(triton.cdiv(entries, PART_ENTRIES), 4 * num_sms // max(1, num_rows), MOST_PARTS))


def select_entries(
    logits: torch.Tensor,
    rows: EntryRows,
    top_k: int,
    slots: torch.Tensor,
    chosen: torch.Tensor,
    *,
    num_sms: int,
    launch: Mapping[str, int] = LAUNCH,
) -> None:
    """Fill slots [T, top_k] int32 (contiguous; -1 behind the last) and chosen [T] int32 with the entries of the largest
    logits [T, rows.max_count or more] fp32 among the first rows.counts, of equal ones the first, in ascending order.
    Rows of logits lie a multiple of 16 apart. `num_sms`: of the GPU."""
    num_rows = len(rows)
    if num_rows == 0:
        return
    if logits.stride(0) % 16:
        raise ValueError(f"rows of logits lie {logits.stride(0)} apart, which 16 does not divide")
    parts = num_parts(num_rows, rows.max_count, num_sms)
    hist = torch.empty((2, num_rows, parts, DIGITS), dtype=torch.int32, device=logits.device)
    larger = torch.empty((num_rows, parts), dtype=torch.int32, device=logits.device)
    state = torch.empty((ROUNDS, num_rows, 2), dtype=torch.int32, device=logits.device)
    grid = (num_rows * parts,)
    if rows.max_count > top_k:
        for number in range(ROUNDS):
            count_digits_kernel[grid](
                logits, rows.counts, hist, larger, state, parts, top_k, logits.stride(0), hist.stride(0), ROUND=number,
                **launch, **pdl.options(),
            )  # fmt: skip
    gather_entries_kernel[grid](
        logits, rows.counts, hist[1], larger, state, rows.req_to_token, rows.req_pool_indices, slots, chosen, parts,
        top_k, rows.rate, logits.stride(0), rows.req_to_token.stride(0), **launch, **pdl.options(),
    )  # fmt: skip
