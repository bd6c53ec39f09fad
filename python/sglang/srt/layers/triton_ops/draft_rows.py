"""Rows of steps that verify draft tokens and of drafts, each in one launch. Reference: `native_draft_rows`.

Plain torch takes some fifty launches for a step with three draft tokens, each for a few numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.native_draft_rows import AcceptedDrafts, DraftInputs, VerifyInputs
from sglang.srt.layers.triton_ops import pdl

LAUNCH = {"BLOCK": 128, "num_warps": 4}
_SIZES = ["num_tokens", "width", "num_rows", "context_len", "num_next"]


@triton.jit
def _locate(
    req_to_token, rows, positions, locs, token, inside, row, position, num_rows, context_len, loc_stride,
    TABLES: tl.constexpr,
):  # fmt: skip
    """Store the request slot, the position and the cache slots of each token."""
    tl.store(rows + token, row, mask=inside)
    tl.store(positions + token, position, mask=inside)
    entry = row * context_len + position
    for _ in tl.static_range(TABLES):
        tl.store(locs + token, tl.load(req_to_token + entry, mask=inside, other=0).to(tl.int64), mask=inside)
        entry += num_rows.to(tl.int64) * context_len
        locs += loc_stride


@triton.jit(do_not_specialize=_SIZES)
def verify_inputs_kernel(
    slots, widths, lens, next_tokens, req_to_token, input_ids, rows, positions, locs, prefix_lens, seq_lens, ends,
    start_loc, num_tokens, width, num_rows, context_len, num_next, loc_stride,
    TABLES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens a program. lens [num_rows] int32, next_tokens [num_rows, num_next] int64, req_to_token [TABLES,
    num_rows, context_len] int32, locs [TABLES, loc_stride] int64, the rest as in `native_draft_rows`."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    request, place = token // width, token % width
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots + request, mask=inside, other=0)
    row_count = tl.load(widths + request, mask=inside, other=0)
    prefix = tl.load(lens + slot, mask=inside, other=0)
    tl.store(input_ids + token, tl.load(next_tokens + slot * num_next + place, mask=inside, other=0), mask=inside)
    is_own = place < row_count
    position = tl.where(is_own, prefix + place, 0).to(tl.int64)
    _locate(
        req_to_token, rows, positions, locs, token, inside, tl.where(is_own, slot, 0), position, num_rows, context_len,
        loc_stride, TABLES,
    )  # fmt: skip
    first = inside & (place == 0)
    tl.store(prefix_lens + request, prefix, mask=first)
    tl.store(seq_lens + request, prefix + width, mask=first)
    tl.store(ends + request, tl.maximum(prefix + row_count, 1), mask=first)
    tl.store(start_loc + request, token, mask=first)
    tl.store(start_loc + request + 1, num_tokens, mask=token == num_tokens - 1)


@triton.jit(do_not_specialize=_SIZES[:-1])
def draft_inputs_kernel(
    slots, first, ends, req_to_token, draft_slots, seq_lens, rows, positions, locs, num_tokens, width, num_rows,
    context_len, loc_stride, TABLES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens a program. req_to_token [TABLES, num_rows, context_len] int32, locs [TABLES, loc_stride] int64, the
    rest as in `native_draft_rows`."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    request, place = token // width, token % width
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots + request, mask=inside, other=0)
    begin = tl.load(first + request, mask=inside, other=0)
    end = tl.load(ends + request, mask=inside, other=0)
    has_slot = begin + place < end
    position = tl.where(has_slot, begin + place, 0).to(tl.int64)
    _locate(
        req_to_token, rows, positions, locs, token, inside, tl.where(has_slot, slot, 0), position, num_rows,
        context_len, loc_stride, TABLES,
    )  # fmt: skip
    of_request = inside & (place == 0)
    tl.store(draft_slots + request, tl.where(has_slot, slot, 0), mask=of_request)
    tl.store(seq_lens + request, tl.where(has_slot, tl.minimum(begin + width, end), 1), mask=of_request)


@triton.jit(do_not_specialize=["num_reqs", "width", "num_next"])
def accept_drafts_kernel(
    tokens, slots, widths, forced, next_tokens, lens, counts, next_ids, last_rows, new_lens, last, num_reqs, width,
    num_next, FORCED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK requests a program. FORCED: whether the counts are those of `forced`. The rest as in
    `native_draft_rows`."""
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < num_reqs
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots + request, mask=inside, other=0)
    row_count = tl.load(widths + request, mask=inside, other=0)
    first = request.to(tl.int64) * width
    count = tl.full((BLOCK,), 1, tl.int32)
    stands = inside
    for place in range(width):
        token = tl.load(tokens + first + place, mask=inside, other=0)
        tl.store(next_ids + first + place, tl.maximum(token, 0), mask=inside)
        more = stands & (place + 1 < row_count) & (place + 1 < width)
        draft_token = tl.load(next_tokens + slot * num_next + place + 1, mask=more, other=-1)
        stands = more & (token == draft_token)
        count += stands.to(tl.int32)
    if FORCED:
        count = tl.load(forced + request, mask=inside, other=1)
    length = tl.load(lens + slot, mask=inside, other=0) + count
    tl.store(lens + slot, length, mask=inside & (slot > 0))
    tl.store(new_lens + request, length, mask=inside)
    tl.store(counts + request, count, mask=inside)
    row = first + count - 1
    tl.store(last_rows + request, row, mask=inside)
    tl.store(last + request, tl.maximum(tl.load(tokens + row, mask=inside, other=0), 0), mask=inside)


def verify_inputs(
    slots: torch.Tensor,
    widths: torch.Tensor,
    lens: torch.Tensor,
    next_tokens: torch.Tensor,
    req_to_token: torch.Tensor,
    width: int,
) -> VerifyInputs:
    """Does as `native_draft_rows.verify_inputs`, for contiguous tensors."""
    num_reqs, num_tokens = len(slots), len(slots) * width
    num_tables, num_rows, context_len = req_to_token.shape
    device = slots.device
    locs = _locs(num_tables, num_tokens, device)
    input_ids, rows, positions = (_indices(num_tokens, device) for _ in range(3))
    prefix_lens, seq_lens, ends = (_lengths(num_reqs, device) for _ in range(3))
    start_loc = _lengths(num_reqs + 1, device)
    out = VerifyInputs(input_ids, rows, positions, locs[:, :num_tokens], prefix_lens, seq_lens, ends, start_loc)
    if not num_tokens:
        out.start_loc.zero_()
        return out
    verify_inputs_kernel[(triton.cdiv(num_tokens, LAUNCH["BLOCK"]),)](
        slots, widths, lens, next_tokens, req_to_token, *out[:3], locs, *out[4:], num_tokens, width, num_rows,
        context_len, next_tokens.shape[1], locs.shape[1], TABLES=num_tables, **LAUNCH, **pdl.options(),
    )  # fmt: skip
    return out


def draft_inputs(
    slots: torch.Tensor, first: torch.Tensor, ends: torch.Tensor, req_to_token: torch.Tensor, width: int
) -> DraftInputs:
    """Does as `native_draft_rows.draft_inputs`, for contiguous tensors."""
    num_reqs, num_tokens = len(slots), len(slots) * width
    num_tables, num_rows, context_len = req_to_token.shape
    locs = _locs(num_tables, num_tokens, slots.device)
    draft_slots, seq_lens = _indices(num_reqs, slots.device), _lengths(num_reqs, slots.device)
    rows, positions = _indices(num_tokens, slots.device), _indices(num_tokens, slots.device)
    if num_tokens:
        draft_inputs_kernel[(triton.cdiv(num_tokens, LAUNCH["BLOCK"]),)](
            slots, first, ends, req_to_token, draft_slots, seq_lens, rows, positions, locs, num_tokens, width, num_rows,
            context_len, locs.shape[1], TABLES=num_tables, **LAUNCH, **pdl.options(),
        )  # fmt: skip
    return DraftInputs(draft_slots, seq_lens, rows, positions, locs[:, :num_tokens])


def accept_drafts(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    widths: torch.Tensor,
    next_tokens: torch.Tensor,
    lens: torch.Tensor,
    forced: torch.Tensor | None = None,
) -> AcceptedDrafts:
    """Does as `native_draft_rows.accept_drafts`, for contiguous tensors."""
    num_reqs, width = tokens.shape
    device = slots.device
    counts, new_lens = _lengths(num_reqs, device), _lengths(num_reqs, device)
    next_ids, last_rows, last = _indices(tokens.numel(), device), _indices(num_reqs, device), _indices(num_reqs, device)
    if num_reqs:
        accept_drafts_kernel[(triton.cdiv(num_reqs, LAUNCH["BLOCK"]),)](
            tokens, slots, widths, counts if forced is None else forced, next_tokens, lens, counts, next_ids, last_rows,
            new_lens, last, num_reqs, width, next_tokens.shape[1], FORCED=forced is not None, **LAUNCH, **pdl.options(),
        )  # fmt: skip
    return AcceptedDrafts(counts, next_ids, last_rows, new_lens, last)


def _locs(num_tables: int, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Returns [tables, >= tokens] int64 whose rows begin at multiples of 16 bytes, as kernels expect of indices."""
    return torch.empty((num_tables, triton.cdiv(num_tokens, 16) * 16), dtype=torch.int64, device=device)


def _indices(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int64, device=device)


def _lengths(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int32, device=device)
