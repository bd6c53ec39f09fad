"""The interface of drafters, which propose the tokens that a step verifies, and of the step that they read.

A verify step brings the last sampled token of each request and up to k - 1 draft tokens. It samples at every position
with the noise of (seed, position), exactly as steps of one token would. A draft token is accepted if it equals the
token sampled at the position before it, so a request gets the same tokens as without speculative decoding, several at a
time. Keyed noise replaces rejection sampling, because only the draw of the plain run keeps outputs reproducible.

Only the device knows how many draft tokens were accepted when the next step is launched. It keeps the lengths; the host
plans with upper bounds until the result arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.mem_cache.memory_pool import CacheStore

Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Draws tokens: (logits [R, V] fp32, request slots [R] int64, positions [R] integers of the tokens that are drawn) ->
[R] int64."""


class BuildBatch(Protocol):
    """Builds the batch of a further draft step of R requests with one token each."""

    def __call__(
        self, ids: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, ends: torch.Tensor
    ) -> ForwardBatch:
        """Returns the batch. ids, slots [R] int64; positions, ends [R] int32. Rows at positions without a cache slot
        (from `ends` on) become padding."""


class BuildBlock(Protocol):
    """Builds the batch of one pass over blocks of R requests, for a block draft."""

    def __call__(self, ids: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor, ends: torch.Tensor) -> ForwardBatch:
        """Returns the batch. ids [R, B], slots [R] int64; lens [R] int32, position of each block's first row; ends [R]
        int32. Rows at positions without a cache slot (from `ends` on) become padding. One decode row stands for a
        request's whole block."""


class BuildLagging(Protocol):
    """Builds the batch of a step again, for layers that compute each request's rows at earlier positions."""

    def __call__(self, ids: torch.Tensor, row_slots: torch.Tensor, lag: torch.Tensor) -> ForwardBatch:
        """Returns a batch of the same rows. ids, row_slots [T] int64, the request slot of each row; lag [request slots
        + 1] int32, by how many positions the rows of each request lie further back."""


class BuildQueries(Protocol):
    """Builds a batch of one row for each of R requests, which reads the caches and writes nothing."""

    def __call__(self, ids: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor) -> ForwardBatch:
        """Returns the batch. ids, slots [R] int64; lens [R] int32, tokens attended to, also the row's position."""


@dataclass(slots=True)
class DraftStep:
    """A computed and sampled step of T rows, of which R requests were sampled. All tensors are on the device."""

    batch: ForwardBatch
    """Batch of the target's step. Its metadata holds the attention sites of draft layers, too."""
    next_ids: torch.Tensor  # [T] int64, the token behind each row: of the prompt, or as it was sampled
    hidden: torch.Tensor  # [T, H] final hidden states of the target, behind its final norm
    aux_hidden_states: Sequence[torch.Tensor]  # residual streams [T, H] behind the layers `Drafter.aux_layers`
    last_rows: torch.Tensor  # [R] int64, of T: the last accepted row of each sampled request
    slots: torch.Tensor  # [R] int64, request slots
    lens: torch.Tensor  # [R] int32, computed tokens: the position of
    tokens: torch.Tensor  # [R] int64, sampled last
    ends: torch.Tensor  # [R] int32, positions from here on have no cache slot
    draw: Draw
    """Function that draws tokens as the target samples: greedily, or with its keyed noise, temperature and filters. A
    draft that draws with the same noise agrees with the target far more often than one that draws alone (Gumbel
    coupling, arXiv 2408.07978)."""
    build_batch: BuildBatch
    build_block: BuildBlock
    build_queries: BuildQueries
    build_lagging: BuildLagging
    confidence: torch.Tensor | None = None
    """[R, n] fp32, set by drafters that know it: P(draft token is accepted | those before it are)."""


class Drafter(Protocol):
    """Proposes the next tokens of requests. A wrong draft token costs time only, never a wrong output."""

    num_tokens: int
    """k, the maximum number of tokens that a request brings to a step, the last sampled one included."""
    aux_layers: tuple[int, ...]
    """Target layers whose outputs the drafter reads."""
    lookahead_slots: int
    """Number of positions, from the last sampled token on, that need cache slots for the drafter's own keys and values;
    0: none."""
    next_tokens_read: int
    """Number of tokens after a position on which the drafter's keys and values at it also depend."""

    caches: tuple[CacheStore, ...]
    """Caches of the drafter's layers, whose memory the pools provide."""

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """Prepares a request slot for a request with these tokens; some of them may come from the prefix cache."""

    def propose(self, step: DraftStep, num_speculative_tokens: int) -> torch.Tensor:
        """Returns draft tokens [R, num_speculative_tokens] int64 for the positions after `lens`, 0 to k - 1 of them; a
        drafter may return more, up to k - 1, if they cost little. Called after every step; must not wait for the
        device, and may be captured in a CUDA graph."""


@dataclass(slots=True)
class RemoteDrafter:
    """The drafter's constants for pipeline stages before the last, which has the real drafter. Implements Drafter."""

    num_tokens: int
    lookahead_slots: int
    next_tokens_read: int
    aux_layers: tuple[int, ...] = ()
    caches: tuple[CacheStore, ...] = ()

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        raise AssertionError("the last stage drafts")

    def propose(self, step: DraftStep, num_speculative_tokens: int) -> torch.Tensor:
        raise AssertionError("the last stage drafts")


def simulated_counts(length: float, lens: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
    """Returns counts [R] int32 for benchmarks instead of those of `accept_drafts`: `length` tokens on average, limited
    by `widths`. Each request gets the integer below or above, depending on lens [R] int32.

    >>> simulated_counts(2.0, torch.tensor([7, 8]), torch.tensor([4, 1]))
    tensor([2, 1], dtype=torch.int32)
    """
    below = int(length)
    phase = (lens.to(torch.int64) * 40503 % 1024).to(torch.float32) / 1024
    return torch.minimum(below + (phase < length - below).to(torch.int32), widths.to(torch.int32)).clamp(min=1)
