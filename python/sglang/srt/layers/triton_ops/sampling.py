"""Sampling kernels over [B, V] fp32 logits. Reference: the torch path of `layers/sampler.py`.

A row of the parameter table is ROW int32 words (`sampling_table.Column`); floats are stored as bit patterns.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from sglang.srt.sampling.noise import GOLDEN, KEY_STEP, MIX_MUL_1, MIX_MUL_2, UNIFORM_MAX
from sglang.srt.sampling.penalties import PROMPT_FLAG
from sglang.srt.sampling.sampling_params import NO_TOKEN, TOP_K_ALL
from sglang.srt.sampling.sampling_table import ROW_WIDTH, Column

TEMPERATURE = tl.constexpr(int(Column.TEMPERATURE))
TOP_P = tl.constexpr(int(Column.TOP_P))
MIN_P = tl.constexpr(int(Column.MIN_P))
REPETITION = tl.constexpr(int(Column.REPETITION))
FREQUENCY = tl.constexpr(int(Column.FREQUENCY))
PRESENCE = tl.constexpr(int(Column.PRESENCE))
TOP_K = tl.constexpr(int(Column.TOP_K))
SEED_LO = tl.constexpr(int(Column.SEED_LO))
SEED_HI = tl.constexpr(int(Column.SEED_HI))
PENALTY_ROW = tl.constexpr(int(Column.PENALTY_ROW))
ROW = tl.constexpr(ROW_WIDTH)
ALL = tl.constexpr(TOP_K_ALL)
PROMPT = tl.constexpr(PROMPT_FLAG)
MUL_1 = tl.constexpr(MIX_MUL_1)
MUL_2 = tl.constexpr(MIX_MUL_2)
GOLDEN_STEP = tl.constexpr(GOLDEN)
SECOND_KEY_STEP = tl.constexpr(KEY_STEP)
MAX_UNIFORM = tl.constexpr(UNIFORM_MAX)
NO_ID = tl.constexpr(2**31 - 1)
NONE = tl.constexpr(NO_TOKEN)

DRAW_BLOCK = 4096
DRAW_PROGRAMS = 512
"""Programs that a draw is split into at small batch sizes: about four on each SM of a large GPU."""
DRAW_ROWS = 1 << 16
"""Rows of a draw at most, of which a row that several programs share counts as often: those of 4,096 requests with 15
draft tokens each. 768 KiB of scratch."""
THRESHOLD_BLOCK = 2048
THRESHOLD_WARPS = 16
ADJUST_BLOCK = 4096


@triton.jit
def _float_param(table, slot, COLUMN: tl.constexpr):
    return tl.load(table + slot * ROW + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def _mix32(x):
    x = x ^ (x >> 16)
    x = x * tl.full((), MUL_1, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full((), MUL_2, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _gumbel(key_0, key_1, ids):
    bits = _mix32(_mix32(ids.to(tl.uint32) + key_0) ^ key_1)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * (2.0**-32), MAX_UNIFORM)
    # -log(1 - u): the series where 1 - u would lose the digits of a small u.
    series = uniform * (1.0 + uniform * (0.5 + uniform * (1.0 / 3.0 + uniform * (0.25 + uniform * 0.2))))
    exponential = tl.where(uniform < 0.015625, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit
def _first_largest(scores, ids):
    """NONE, the smallest id, comes before all others that are infinite."""
    top = tl.max(scores)
    return top, tl.min(tl.where(scores == top, ids, NO_ID))


@triton.jit(do_not_specialize=["num_splits"])
def draw_tokens_kernel(
    logits,  # [B, V] fp32 or bf16
    table,
    slots,  # [B] int64
    positions,  # [B] int32 or int64
    thresholds,  # [B] fp32
    scores_out,  # [B, num_splits] fp32 scratch
    ids_out,  # [B, num_splits] int32 scratch
    arrivals,  # [B] int32, zero before and after
    tokens,  # [B] int64
    next_token,  # [num_slots] int64
    vocab_size,
    stride,  # elements between rows of logits
    num_splits,
    NOISE: tl.constexpr,
    FILTER: tl.constexpr,
    WRITE_NEXT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Argmax (first of equals) of logits / temperature + noise, over the logits at or above the row's threshold; NONE
    for a row with a NaN or with -inf only.

    num_splits programs share a row; the last to finish combines their results, so a step needs a single launch."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    slot = tl.load(slots + row)
    temperature = 0.0
    if NOISE:
        temperature = _float_param(table, slot, TEMPERATURE)
        position = tl.load(positions + row).to(tl.uint32)
        seed_lo = tl.load(table + slot * ROW + SEED_LO).to(tl.uint32, bitcast=True)
        seed_hi = tl.load(table + slot * ROW + SEED_HI).to(tl.uint32, bitcast=True)
        key_0 = _mix32(seed_lo ^ _mix32(position + tl.full((), GOLDEN_STEP, tl.uint32)))
        key_1 = _mix32(
            _mix32(seed_hi + tl.full((), SECOND_KEY_STEP, tl.uint32)) ^ (key_0 + tl.full((), GOLDEN_STEP, tl.uint32))
        )
    threshold = -float("inf")
    if FILTER:
        threshold = tl.load(thresholds + row)

    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    best_id = tl.full((BLOCK,), NO_ID, tl.int32)
    for start in range(split * BLOCK, vocab_size, num_splits * BLOCK):
        ids = start + lanes
        x = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
        score = x
        if NOISE:
            if temperature > 0.0:
                score = x / temperature + _gumbel(key_0, key_1, ids)
        if FILTER:
            score = tl.where(x < threshold, -float("inf"), score)
        # Strictly greater keeps the lowest id of a lane; a NaN wins and is never beaten.
        wins = (score > best) | (score != score)
        best = tl.where(wins, score, best)
        best_id = tl.where(wins, ids, best_id)
    best_id = tl.where(best != best, NONE, best_id)
    top, top_id = _first_largest(tl.where(best != best, float("inf"), best), best_id)

    tl.store(scores_out + row * num_splits + split, top)
    tl.store(ids_out + row * num_splits + split, top_id)
    if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == num_splits - 1:
        parts = tl.arange(0, MAX_SPLITS)
        there = parts < num_splits
        scores = tl.load(scores_out + row * num_splits + parts, mask=there, other=-float("inf"), cache_modifier=".cg")
        winners = tl.load(ids_out + row * num_splits + parts, mask=there, other=NO_ID, cache_modifier=".cg")
        top, top_id = _first_largest(scores, winners)
        tl.store(arrivals + row, 0)
        top_id = tl.where(top_id == NO_ID, NONE, top_id)
        tl.store(tokens + row, top_id.to(tl.int64))
        if WRITE_NEXT:
            # Token 0 keeps the next step within bounds.
            tl.store(next_token + slot, tl.maximum(top_id, 0).to(tl.int64))


@triton.jit
def _count_and_mass(
    source, size, peak, inv_temperature, a, b, c, BLOCK: tl.constexpr, MASS: tl.constexpr, HELD: tl.constexpr
):
    """The number of logits >= each of the three pivots, and their softmax mass relative to `peak`. `source` is a
    pointer to `size` logits, or a block of them in registers if HELD."""
    if HELD:
        # Fewer than 2^20 logits are held, so that three counters share a sum.
        counts = (source >= a).to(tl.int64) + ((source >= b).to(tl.int64) << 20) + ((source >= c).to(tl.int64) << 40)
        packed = tl.sum(counts)
        num_a, num_b, num_c = packed & 0xFFFFF, (packed >> 20) & 0xFFFFF, packed >> 40
        mass_a, mass_b, mass_c = 0.0, 0.0, 0.0
        if MASS:
            weight = tl.exp((source - peak) * inv_temperature)
            mass_a = tl.sum(tl.where(source >= a, weight, 0.0))
            mass_b = tl.sum(tl.where(source >= b, weight, 0.0))
            mass_c = tl.sum(tl.where(source >= c, weight, 0.0))
        return num_a.to(tl.int32), num_b.to(tl.int32), num_c.to(tl.int32), mass_a, mass_b, mass_c
    else:
        lanes = tl.arange(0, BLOCK)
        # A lane counts fewer than 1024 logits, so that three counters share a register.
        counts = tl.zeros((BLOCK,), tl.int32)
        mass_a = tl.zeros((BLOCK,), tl.float32)
        mass_b = tl.zeros((BLOCK,), tl.float32)
        mass_c = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, size, BLOCK, num_stages=3):
            ids = start + lanes
            x = tl.load(source + ids, mask=ids < size, other=-float("inf"))
            counts += (x >= a).to(tl.int32) + ((x >= b).to(tl.int32) << 10) + ((x >= c).to(tl.int32) << 20)
            if MASS:
                weight = tl.exp((x - peak) * inv_temperature)
                mass_a += tl.where(x >= a, weight, 0.0)
                mass_b += tl.where(x >= b, weight, 0.0)
                mass_c += tl.where(x >= c, weight, 0.0)
        return (
            tl.sum(counts & 1023), tl.sum((counts >> 10) & 1023), tl.sum(counts >> 20),
            tl.sum(mass_a), tl.sum(mass_b), tl.sum(mass_c),
        )  # fmt: skip


@triton.jit
def _search(
    source, size, peak, inv_temperature, low, high, num_low, target,
    BLOCK: tl.constexpr, MASS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Largest threshold in [low, high) whose kept set (logits >= threshold) still reaches `target`: a count, or a
    softmax mass if MASS. `low` reaches it and keeps `num_low` logits; `high` keeps none. Four-way bisection over the
    values; it ends when a single logit, or only equal ones, separate the two bounds."""
    num_high = num_low * 0
    searching = num_low > 1
    while searching:
        step = (high - low) * 0.25
        a = low + step
        b = low + 2.0 * step
        c = low + 3.0 * step
        n_a, n_b, n_c, m_a, m_b, m_c = _count_and_mass(source, size, peak, inv_temperature, a, b, c, BLOCK, MASS, HELD)
        if MASS:
            ok_a = m_a >= target
            ok_b = m_b >= target
            ok_c = m_c >= target
        else:
            ok_a = n_a >= target
            ok_b = n_b >= target
            ok_c = n_c >= target
        # Between neighbouring floats the pivots collapse onto the bounds: then nothing is left to separate.
        searching = (low < b) & (b < high)
        new_low = tl.where(ok_c, c, tl.where(ok_b, b, tl.where(ok_a, a, low)))
        num_low = tl.where(ok_c, n_c, tl.where(ok_b, n_b, tl.where(ok_a, n_a, num_low)))
        new_high = tl.where(ok_c, high, tl.where(ok_b, c, tl.where(ok_a, b, a)))
        num_high = tl.where(ok_c, num_high, tl.where(ok_b, n_c, tl.where(ok_a, n_b, n_a)))
        low = new_low
        high = new_high
        searching = searching & (num_low - num_high > 1)
        if not MASS:
            searching = searching & (num_low > target)
    return low, num_low


@triton.jit
def _largest_of_lanes(logits, vocab_size, BLOCK: tl.constexpr):
    """The four largest logits of every lane, [BLOCK, 2, 2], their largest, and the largest fourth one: all logits above
    that are among them."""
    lanes = tl.arange(0, BLOCK)
    first = tl.full((BLOCK,), -float("inf"), tl.float32)
    second = tl.full((BLOCK,), -float("inf"), tl.float32)
    third = tl.full((BLOCK,), -float("inf"), tl.float32)
    fourth = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=3):
        ids = start + lanes
        x = tl.load(logits + ids, mask=ids < vocab_size, other=-float("inf"))
        after_first = tl.minimum(first, x)
        first = tl.maximum(first, x)
        after_second = tl.minimum(second, after_first)
        second = tl.maximum(second, after_first)
        after_third = tl.minimum(third, after_second)
        third = tl.maximum(third, after_second)
        fourth = tl.maximum(fourth, after_third)
    return tl.join(tl.join(first, second), tl.join(third, fourth)), tl.max(first), tl.max(fourth)


@triton.jit
def _filter_all(logits, vocab_size, peak, inv_temperature, high, top_k, top_p, BLOCK: tl.constexpr):
    """Threshold of top_k and top_p by passes over all logits."""
    lanes = tl.arange(0, BLOCK)
    smallest = tl.full((BLOCK,), float("inf"), tl.float32)
    finite = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + lanes
        x = tl.load(logits + ids, mask=ids < vocab_size, other=-float("inf"))
        real = x > -float("inf")
        finite += real.to(tl.int32)
        smallest = tl.minimum(smallest, tl.where(real, x, float("inf")))
    low = tl.min(smallest)
    num_low = tl.sum(finite)
    if top_k < num_low:
        low, num_low = _search(
            logits, vocab_size, peak, inv_temperature, low, high, num_low, top_k, BLOCK, False, False
        )
    if top_p < 1.0:
        n_a, n_b, n_c, mass, m_b, m_c = _count_and_mass(
            logits, vocab_size, peak, inv_temperature, low, low, low, BLOCK, True, False
        )
        low, num_low = _search(
            logits, vocab_size, peak, inv_temperature, low, high, num_low, top_p * mass, BLOCK, True, False
        )
    return low


@triton.jit
def threshold_kernel(
    logits,  # [B, V] fp32
    table,
    slots,  # [B] int64
    thresholds,  # [B] fp32
    vocab_size,
    stride,
    BLOCK: tl.constexpr,
):
    """Smallest logit that top_k, top_p and min_p let through, one program a row, without sorting.

    Few logits decide, and one pass finds them: the largest ones of each lane. Only where more pass, or too many of them
    meet in a lane, all logits are read again and again."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    logits += row * stride
    temperature = _float_param(table, slot, TEMPERATURE)
    top_p = _float_param(table, slot, TOP_P)
    min_p = _float_param(table, slot, MIN_P)
    top_k = tl.load(table + slot * ROW + TOP_K)
    threshold = -float("inf")
    if temperature > 0.0:
        if (top_k < ALL) | (top_p < 1.0) | (min_p > 0.0):
            held, peak, horizon = _largest_of_lanes(logits, vocab_size, BLOCK)
            if peak > -float("inf"):
                inv_temperature = 1.0 / temperature
                high = peak + tl.maximum(tl.abs(peak) * 1e-6, 1e-6)
                above = held > horizon
                low = tl.min(tl.where(above, held, high))
                num_low = tl.sum(above.to(tl.int32))
                holds_all = horizon == -float("inf")
                found = (top_k == ALL) | (top_k <= num_low) | holds_all
                if found & (top_k < num_low):
                    low, num_low = _search(
                        held, 0, peak, inv_temperature, low, high, num_low, top_k, BLOCK, False, True
                    )
                if found & (top_p < 1.0):
                    n_a, n_b, n_c, mass, m_b, m_c = _count_and_mass(
                        held, 0, peak, inv_temperature, low, low, low, BLOCK, True, True
                    )
                    total = mass
                    if (top_k == ALL) & (not holds_all):
                        nothing = -float("inf")
                        n_a, n_b, n_c, total, m_b, m_c = _count_and_mass(
                            logits, vocab_size, peak, inv_temperature, nothing, nothing, nothing, BLOCK, True, False
                        )
                    found = mass >= top_p * total
                    if found:
                        low, num_low = _search(
                            held, 0, peak, inv_temperature, low, high, num_low, top_p * total, BLOCK, True, True
                        )
                if not found:
                    low = _filter_all(logits, vocab_size, peak, inv_temperature, high, top_k, top_p, 2 * BLOCK)
                if (top_k < ALL) | (top_p < 1.0):
                    threshold = low
                if min_p > 0.0:
                    threshold = tl.maximum(threshold, tl.log(min_p) * temperature + peak)
    tl.store(thresholds + row, threshold)


@triton.jit
def adjust_logits_kernel(
    logits,  # [B, V] fp32, in place
    table,
    slots,  # [B] int64
    state,  # [rows, V] int32
    vocab_mask,  # [B, ceil(V / 32)] int32
    vocab_size,
    stride,
    mask_stride,
    PENALTIES: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    slot = tl.load(slots + row)
    x = tl.load(logits + row * stride + ids, mask=inside)
    if PENALTIES:
        penalty_row = tl.load(table + slot * ROW + PENALTY_ROW).to(tl.int64)
        if penalty_row > 0:
            repetition = _float_param(table, slot, REPETITION)
            frequency = _float_param(table, slot, FREQUENCY)
            presence = _float_param(table, slot, PRESENCE)
            seen = tl.load(state + penalty_row * vocab_size + ids, mask=inside, other=0)
            x = tl.where(seen != 0, tl.where(x > 0, x / repetition, x * repetition), x)
            count = seen & (PROMPT - 1)
            x = x - count.to(tl.float32) * frequency - tl.where(count > 0, presence, 0.0)
    if MASK:
        word = tl.load(vocab_mask + row * mask_stride + ids // 32, mask=inside, other=0)
        x = tl.where(((word >> (ids % 32)) & 1) != 0, x, -float("inf"))
    tl.store(logits + row * stride + ids, x, mask=inside)


@functools.cache
def _draw_scratch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the scores, ids and arrival counters, [DRAW_ROWS] each, that all draws on a device share: they are
    ordered on one stream. Captured graphs hold the addresses, so the size never changes."""
    return (
        torch.empty(DRAW_ROWS, dtype=torch.float32, device=device),
        torch.empty(DRAW_ROWS, dtype=torch.int32, device=device),
        torch.zeros(DRAW_ROWS, dtype=torch.int32, device=device),
    )


def draw_tokens(
    logits: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    thresholds: torch.Tensor | None,
    all_greedy: bool,
    next_token: torch.Tensor | None,
    on_host: bool = False,
) -> torch.Tensor:
    """logits [B, V] fp32 or bf16 (rows contiguous) -> [B] int64; with `next_token` also scattered to the slots.
    on_host: the result lies in pinned memory of the host, into which the kernel writes; keep it until it has. B is
    DRAW_ROWS at most."""
    batch_size, vocab_size = logits.shape
    assert batch_size <= DRAW_ROWS, f"{batch_size} rows are drawn at once; the scratch is for {DRAW_ROWS}"
    if on_host and logits.is_cuda:
        tokens = torch.empty(batch_size, dtype=torch.int64, pin_memory=True)
    else:
        tokens = torch.empty(batch_size, dtype=torch.int64, device=logits.device)
    if batch_size == 0:
        return tokens
    blocks = triton.cdiv(vocab_size, DRAW_BLOCK)
    splits = max(1, min(DRAW_PROGRAMS // batch_size, blocks))
    # Whole rounds only: 38 blocks over 32 programs would take as long as over 19.
    splits = triton.cdiv(blocks, triton.cdiv(blocks, splits))
    scores, ids, arrivals = _draw_scratch(logits.device)
    draw_tokens_kernel[(batch_size, splits)](
        logits,
        table,
        slots,
        positions,
        scores if thresholds is None else thresholds,
        scores,
        ids,
        arrivals,
        tokens,
        tokens if next_token is None else next_token,
        vocab_size,
        logits.stride(0),
        splits,
        NOISE=not all_greedy,
        FILTER=thresholds is not None,
        WRITE_NEXT=next_token is not None,
        MAX_SPLITS=triton.next_power_of_2(blocks),
        BLOCK=DRAW_BLOCK,
        num_warps=8,
    )
    return tokens


def filter_thresholds(logits: torch.Tensor, table: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Returns the smallest kept logit [B] fp32 of each row of logits [B, V] fp32."""
    batch_size, vocab_size = logits.shape
    assert vocab_size < 1023 * THRESHOLD_BLOCK, "the kernel's counters would overflow"
    thresholds = torch.empty(batch_size, dtype=torch.float32, device=logits.device)
    threshold_kernel[(batch_size,)](
        logits, table, slots, thresholds, vocab_size, logits.stride(0), BLOCK=THRESHOLD_BLOCK, num_warps=THRESHOLD_WARPS
    )
    return thresholds


def adjust_logits(
    logits: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    state: torch.Tensor | None,
    vocab_mask: torch.Tensor | None,
) -> None:
    """Applies penalties and grammar mask in place. state [rows, V] int32; vocab_mask [B, ceil(V / 32)] int32."""
    batch_size, vocab_size = logits.shape
    adjust_logits_kernel[(batch_size, triton.cdiv(vocab_size, ADJUST_BLOCK))](
        logits,
        table,
        slots,
        table if state is None else state,
        table if vocab_mask is None else vocab_mask,
        vocab_size,
        logits.stride(0),
        0 if vocab_mask is None else vocab_mask.stride(0),
        PENALTIES=state is not None,
        MASK=vocab_mask is not None,
        BLOCK=ADJUST_BLOCK,
        num_warps=8,
    )
