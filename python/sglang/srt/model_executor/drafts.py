"""Steps that verify drafts: each request brings its last token and k - 1 guesses of what follows.

The step samples at every position with the noise of (seed, position), exactly as steps of one token would. A guess is
accepted if it is the token that was sampled before it, so the request gets what it would get without guesses, several
tokens at a time. Reference for keyed noise instead of rejection sampling: any draw from the same distribution is
right, and the one that the plain run makes is the only one that keeps outputs reproducible.

Only the device knows how many were accepted when the next step is launched. It keeps the lengths; the host plans with
upper bounds until the result arrives.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Drafter(Protocol):
    """Guesses the next tokens. A wrong guess costs time, never a token."""

    num_tokens: int
    """k, tokens that a request brings to a step, the last sampled one included."""

    def propose(self, slots: torch.Tensor, lens: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """slots [R] int64; lens [R] int32: the position of tokens [R] int64, sampled last -> [R, k - 1] int64, for the
        positions after it. Launched behind every step; never waits."""


def accept(tokens: torch.Tensor, drafts: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
    """How many of the sampled tokens [R, k] stand, [R] int32: the first, and each one whose predecessor was guessed.

    drafts [R, k - 1]; widths [R] int32: of a request's k rows, only the first `widths` are its own.

    >>> accept(torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9]]), torch.tensor([3]))
    tensor([2], dtype=torch.int32)
    """
    row = torch.arange(1, tokens.shape[1], device=tokens.device)
    right = (tokens[:, :-1] == drafts) & (row < widths[:, None])
    return right.cumprod(dim=1).sum(dim=1, dtype=torch.int32) + 1
