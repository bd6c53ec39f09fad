"""Inputs of verify and draft steps in plain torch: the CPU kernels, and the reference for `triton_ops.draft_rows`.

R requests bring W rows each, T = R W. Rows without a token of their request are padding: request slot 0, position 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class VerifyInputs(NamedTuple):
    """Inputs of a verify step."""

    input_ids: torch.Tensor  # [T] int64
    rows: torch.Tensor  # [T] int64, the request slot of each row
    positions: torch.Tensor  # [T] int64
    locs: torch.Tensor  # [tables, T] int64, cache slots
    prefix_lens: torch.Tensor  # [R] int32, computed tokens
    seq_lens: torch.Tensor  # [R] int32, prefix_lens + W
    ends: torch.Tensor  # [R] int32 >= 1, prefix_lens + the request's own rows
    start_loc: torch.Tensor  # [R + 1] int32, 0, W, 2 W, ..


class DraftInputs(NamedTuple):
    """Inputs of a draft's pass over further positions of each request."""

    slots: torch.Tensor  # [R] int64, request slots, 0 for requests without a position left
    seq_lens: torch.Tensor  # [R] int32 >= 1, tokens attended to
    rows: torch.Tensor  # [T] int64, the request slot of each row
    positions: torch.Tensor  # [T] int64
    locs: torch.Tensor  # [tables, T] int64, cache slots


class AcceptedDrafts(NamedTuple):
    """The result of a verify step."""

    counts: torch.Tensor  # [R] int32 >= 1, accepted tokens
    next_ids: torch.Tensor  # [T] int64, the token sampled at each row, 0 where there is none
    last_rows: torch.Tensor  # [R] int64, of T: the last accepted row
    lens: torch.Tensor  # [R] int32, computed tokens after the step
    tokens: torch.Tensor  # [R] int64, the last accepted token


def verify_inputs(
    slots: torch.Tensor,
    widths: torch.Tensor,
    lens: torch.Tensor,
    next_tokens: torch.Tensor,
    req_to_token: torch.Tensor,
    width: int,
) -> VerifyInputs:
    """Builds the inputs of a step in which each request of `slots` [R] int64 brings its next `width` tokens, of which
    the first `widths` [R] int32 are its own. lens [requests] int32: computed tokens; next_tokens [requests, k] int64;
    req_to_token [tables, requests, context] int32."""
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
    """Builds the inputs of `width` rows for each request of `slots` [R] int64, at positions from `first` [R] int32 on.
    Rows at positions from `ends` [R] int32 on have no cache slot and become padding."""
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
    """Accepts sampled tokens [R, W] int64 of a step from `verify_inputs`: the first, and each one for which all sampled
    tokens before it equal the draft tokens. Increases `lens` by them, except for request slot 0. Rows without a token
    hold a negative one. forced [R] int32: counts that replace the decision, for benchmarks."""
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
    """Returns the number [R] int32 of accepted tokens of those sampled, [R, W]: the first, and each one for which all
    sampled tokens before it equal the draft tokens.

    draft_tokens [R, W - 1]; widths [R] int32: only the first `widths` of a request's W rows are its own.

    >>> accepted(torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9]]), torch.tensor([3]))
    tensor([2], dtype=torch.int32)
    """
    row = torch.arange(1, tokens.shape[1], device=tokens.device)
    right = (tokens[:, :-1] == draft_tokens) & (row < widths[:, None])
    return right.cumprod(dim=1).sum(dim=1, dtype=torch.int32) + 1
