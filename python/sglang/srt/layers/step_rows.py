"""The requests of a step and the cache slots of its tokens; see `forward_batch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """Slots of a batch's tokens in the caches of one row table.

    A compressed cache with one entry per r tokens stores that of tokens p - r + 1 .. p, where r divides p + 1, at the
    slot of token p divided by r; pages hold whole entries.
    """

    req_to_token: torch.Tensor  # [max_reqs + 1, context_len] int32, cache slot of each position
    out_cache_loc: torch.Tensor  # [T] int64, cache slot of each new token


@dataclass(slots=True)
class DecodeRows:
    """D decoding requests with one token each: the first D tokens of a step.

    In CUDA graphs D is the padded size. Padding rows have request slot 0, cache slot 0 and length 1. In a graph with
    prompts they overlap the prompts' first tokens, whose results are written after those of decoding rows.
    """

    req_pool_indices: torch.Tensor  # [D] int64, request slot: the row of req_to_token and of states
    seq_lens: torch.Tensor  # [D] int32, length including the new token
    token_slots: tuple[TokenSlots, ...]  # of the D tokens, one for each row table
    seq_lens_cpu: list[int] | None = None
    """None while a CUDA graph is captured; the longest length is then bounded by the context length only."""

    def __len__(self) -> int:
        return len(self.req_pool_indices)


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """Requests that bring the same number of tokens each to verify. Rows beyond a request's own number are padding."""

    width: int
    ends: torch.Tensor  # [P] int32 >= 1, length of each request without padding rows


@dataclass(slots=True)
class ExtendRows:
    """P requests with a run of new tokens each, over a cached prefix."""

    req_pool_indices: torch.Tensor  # [P] int64
    seq_lens: torch.Tensor  # [P] int32, length including the new tokens
    prefix_lens: torch.Tensor  # [P] int32, cached tokens before them
    start_loc: torch.Tensor  # [P + 1] int32, each request's first token (of T), and the end
    token_slots: tuple[TokenSlots, ...]  # of all T tokens of the step
    new_lens_cpu: list[int]
    prefix_lens_cpu: list[int]
    seq_lens_cpu: list[int] | None = None
    """None during capture and when only the device knows the lengths; the other host lengths are then upper bounds."""
    images: ImageRuns | None = None
    """None: attention is causal for all tokens."""
    draft_tokens: VerifyRows | None = None

    def __len__(self) -> int:
        return len(self.req_pool_indices)


@dataclass(frozen=True, slots=True)
class ImageRuns:
    """Image tokens that attend to one another in both directions in layers with a sliding window: `tokens` [M] int64 of
    T. Each run is one row of `rows`, whose start_loc counts in M."""

    tokens: torch.Tensor
    rows: ExtendRows


def requests_of_tokens(
    start_loc: torch.Tensor, slots: torch.Tensor, decodes: DecodeRows | None, num_tokens: int
) -> torch.Tensor:
    """Returns [num_tokens] int64, the request slot of each token of a step with prompts, which begin at start_loc [P +
    1] and belong to the requests `slots` [P]. Tokens before the first prompt belong to decoding requests."""
    token = torch.arange(num_tokens, dtype=torch.int32, device=slots.device)
    prompt = torch.searchsorted(start_loc, token, right=True) - 1
    rows = slots[prompt.clamp(min=0, max=len(slots) - 1)]
    if decodes is not None:
        count = len(decodes)
        rows[:count] = torch.where(prompt[:count] < 0, decodes.req_pool_indices, rows[:count])
    return rows


class StateRecord(Protocol):
    """The inputs of one layer with recurrent states, kept from a verify step that left the states unchanged."""

    def commit(self, counts: torch.Tensor) -> None:
        """Advances the states of the step's first B = len(counts) requests by their first `counts` [B] int32 tokens."""

    def copy(self) -> StateRecord:
        """Returns a copy that later steps do not change; a graph overwrites its records in each replay."""
