"""Rows of steps that verify draft tokens and of drafts, in plain torch: the CPU's way, and the reference of
`triton_ops.draft_rows`.

R requests bring W rows each, T = R W. Rows that are no token of a request are padding: they are of request slot 0, at
position 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class VerifyInputs(NamedTuple):
    """Inputs of a step that verifies draft tokens."""

    input_ids: torch.Tensor  # [T] int64
    rows: torch.Tensor  # [T] int64, the request slot of each row
    positions: torch.Tensor  # [T] int64
    locs: torch.Tensor  # [tables, T] int64, cache slots
    prefix_lens: torch.Tensor  # [R] int32, computed tokens
    seq_lens: torch.Tensor  # [R] int32, prefix_lens + W
    ends: torch.Tensor  # [R] int32 >= 1, prefix_lens and the request's own rows
    start_loc: torch.Tensor  # [R + 1] int32, 0, W, 2 W, ..


class DraftInputs(NamedTuple):
    """Inputs of a draft's pass over further positions of each request."""

    slots: torch.Tensor  # [R] int64, request slots, 0 for requests without a position left
    seq_lens: torch.Tensor  # [R] int32 >= 1, tokens attended to
    rows: torch.Tensor  # [T] int64, the request slot of each row
    positions: torch.Tensor  # [T] int64
    locs: torch.Tensor  # [tables, T] int64, cache slots


class AcceptedDrafts(NamedTuple):
    """What stands of a step that verified draft tokens."""

    counts: torch.Tensor  # [R] int32 >= 1, tokens that stand
    next_ids: torch.Tensor  # [T] int64, the token sampled at each row, 0 where there is none
    last_rows: torch.Tensor  # [R] int64, of T: the last row that stands
    lens: torch.Tensor  # [R] int32, computed tokens behind the step
    tokens: torch.Tensor  # [R] int64, the last token that stands


def verify_inputs(
    slots: torch.Tensor,
    widths: torch.Tensor,
    lens: torch.Tensor,
    next_tokens: torch.Tensor,
    req_to_token: torch.Tensor,
    width: int,
) -> VerifyInputs:
    """Builds the inputs of a step in which each of the requests `slots` [R] int64 brings its next `width` tokens, of
    which the first `widths` [R] int32 are its own. lens [requests] int32: computed tokens; next_tokens [requests, k]
    int64; req_to_token [tables, requests, context] int32."""
    prefix_lens = lens[slots]
    row = torch.arange(width, device=slots.device)
    rows, positions, locs = _locate(slots, prefix_lens, row, row < widths[:, None], req_to_token)
    starts = torch.arange(len(slots) + 1, device=slots.device, dtype=torch.int32) * width
    ends = (prefix_lens + widths).clamp(min=1)
    input_ids = next_tokens[slots, :width].flatten()
    return VerifyInputs(input_ids, rows, positions, locs, prefix_lens, prefix_lens + width, ends, starts)


def draft_inputs(
    slots: torch.Tensor, first: torch.Tensor, ends: torch.Tensor, req_to_token: torch.Tensor, width: int
) -> DraftInputs:
    """Builds the inputs of `width` rows of each of the requests `slots` [R] int64 at positions from `first` [R] int32
    on. Positions from `ends` [R] int32 on have no cache slot: their rows are padding."""
    row = torch.arange(width, device=slots.device)
    inside = first[:, None] + row < ends[:, None]
    rows, positions, locs = _locate(slots, first, row, inside, req_to_token)
    left = first < ends
    seq_lens = torch.where(left, torch.minimum(first + width, ends), 1)
    return DraftInputs(torch.where(left, slots, 0), seq_lens.to(torch.int32), rows, positions, locs)


def _locate(
    slots: torch.Tensor, first: torch.Tensor, row: torch.Tensor, inside: torch.Tensor, req_to_token: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the request slots and positions [T], and the cache slots [tables, T], of rows [R, W]."""
    rows = torch.where(inside, slots[:, None], 0).flatten()
    positions = torch.where(inside, first[:, None].to(torch.int64) + row, 0).flatten()
    return rows, positions, req_to_token[:, rows, positions].to(torch.int64)


def accept_drafts(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    widths: torch.Tensor,
    next_tokens: torch.Tensor,
    lens: torch.Tensor,
    forced: torch.Tensor | None = None,
) -> AcceptedDrafts:
    """Decides which of the tokens [R, W] int64 that a step of `verify_inputs` sampled stand: the first, and each one
    whose predecessor was drafted. Moves `lens` on by them; request slot 0 stays as it is. Rows without a token have a
    negative one. forced [R] int32: counts that replace the decision, for measurements."""
    count, width = tokens.shape
    counts = accepted(tokens, next_tokens[slots, 1:width], widths) if forced is None else forced
    row = torch.arange(count, device=tokens.device)
    sampled = tokens.clamp(min=0)
    new_lens = lens[slots] + counts
    lens[slots] = new_lens
    lens[:1].zero_()
    last = sampled[row, counts.long() - 1]
    return AcceptedDrafts(counts, sampled.flatten(), row * width + counts - 1, new_lens, last)


def accepted(tokens: torch.Tensor, draft_tokens: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
    """Returns how many of the sampled tokens [R, W] stand, [R] int32: the first, and each one whose predecessor was
    drafted.

    draft tokens [R, W - 1]; widths [R] int32: of a request's W rows, only the first `widths` are its own.

    >>> accepted(torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9]]), torch.tensor([3]))
    tensor([2], dtype=torch.int32)
    """
    row = torch.arange(1, tokens.shape[1], device=tokens.device)
    right = (tokens[:, :-1] == draft_tokens) & (row < widths[:, None])
    return right.cumprod(dim=1).sum(dim=1, dtype=torch.int32) + 1
