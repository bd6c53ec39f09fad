"""Interface of drafters, which propose the tokens that a step verifies, and of what they may read for it.

A step that verifies brings the last sampled token of each request and up to k - 1 draft tokens of what follows. It
samples at every position with the noise of (seed, position), exactly as steps of one token would. A draft token is
accepted if it is the token that was sampled before it, so the request gets the tokens that it would get without draft
tokens, several at a time. Reference for keyed noise instead of rejection sampling: any draw from the same distribution
is right, and the one that the plain run makes is the only one that keeps outputs reproducible.

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
    """Makes the batch of a further step of R requests with one token each, for the layers of a draft."""

    def __call__(
        self, ids: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, ends: torch.Tensor
    ) -> ForwardBatch:
        """Makes the batch. ids, slots [R] int64; positions, ends [R] int32. Rows at positions that have no cache slot
        (`ends` and behind) become padding."""


class BuildBlock(Protocol):
    """Makes the batch of one pass over blocks of R requests, for the layers of a block draft."""

    def __call__(self, ids: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor, ends: torch.Tensor) -> ForwardBatch:
        """Makes the batch. ids [R, B], slots [R] int64; lens [R] int32: the position of the first row of each block;
        ends [R] int32. Rows at positions that have no cache slot (`ends` and behind) become padding, and a decoding row
        of the batch stands for the whole block of a request."""


class BuildLagging(Protocol):
    """Makes the batch of a step once more, for layers that compute each request's rows at earlier positions."""

    def __call__(self, ids: torch.Tensor, row_slots: torch.Tensor, lag: torch.Tensor) -> ForwardBatch:
        """Makes the batch of as many rows. ids [T] int64; row_slots [T] int64: the request slot of each row; lag
        [request slots + 1] int32: how many positions further back the rows of each request lie."""


class BuildQueries(Protocol):
    """Makes the batch of a row of each of R requests that only reads the caches."""

    def __call__(self, ids: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor) -> ForwardBatch:
        """Makes the batch. ids, slots [R] int64; lens [R] int32: the tokens that are attended to, and the position of
        the row."""


@dataclass(slots=True)
class DraftStep:
    """A step that is computed and sampled: T rows, of which R requests were sampled. All are device tensors."""

    batch: ForwardBatch
    """Batch of the target's step. Its metadata holds the attention sites of draft layers, too."""
    next_ids: torch.Tensor  # [T] int64, the token behind each row: of the prompt, or as it was sampled
    hidden: torch.Tensor  # [T, H] final hidden states of the target, behind its final norm
    aux_hidden_states: Sequence[torch.Tensor]  # residual streams [T, H] behind the layers `Drafter.aux_layers`
    last_rows: torch.Tensor  # [R] int64, of T: the last row of each sampled request that stands
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
    """[R, n] fp32, left by a drafter that knows it: how likely each draft token stands if those before it do."""


class Drafter(Protocol):
    """Proposes the next tokens. A wrong draft token costs time, never a token."""

    num_tokens: int
    """k, the most tokens that a request brings to a step, the last sampled one included."""
    aux_layers: tuple[int, ...]
    """Target layers whose outputs the drafter reads."""
    lookahead_slots: int
    """Number of positions from the last sampled token on in which the drafter keeps keys and values of its own; 0:
    none."""
    next_tokens_read: int
    """Number of tokens behind a position on which the drafter's keys and values of it depend, too."""

    caches: tuple[CacheStore, ...]
    """Caches of the drafter's layers, which the pools fill in."""

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """Takes the request slot for a request with these tokens; some of them may come from the cache."""

    def propose(self, step: DraftStep, num_speculative_tokens: int) -> torch.Tensor:
        """Returns draft tokens [R, num_speculative_tokens] int64 for the positions behind `lens`, 0 to k - 1 of them;
        or more, up to k - 1, where they cost little. Launched behind every step; never waits for the device; may be
        captured in a CUDA graph."""


@dataclass(slots=True)
class DrafterElsewhere:
    """The drafter of a pipeline's stages before the last one, which has the real one. Implements Drafter."""

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
    """Returns counts [R] int32 for measurements in place of those of `accept_drafts`: `length` tokens on average as
    far as `widths` allow. Requests at other positions (lens [R] int32) get the whole number below or above.

    >>> simulated_counts(2.0, torch.tensor([7, 8]), torch.tensor([4, 1]))
    tensor([2, 1], dtype=torch.int32)
    """
    below = int(length)
    phase = (lens.to(torch.int64) * 40503 % 1024).to(torch.float32) / 1024
    return torch.minimum(below + (phase < length - below).to(torch.int32), widths.to(torch.int32)).clamp(min=1)
