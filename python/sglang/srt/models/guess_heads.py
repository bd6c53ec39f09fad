"""Heads that correct the guesses of a block from left to right, each by the tokens that were guessed before it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from sglang.srt.layers.ops import LinearOp
from sglang.srt.plan.drafts.description import Block, Markov

if TYPE_CHECKING:
    from sglang.srt.models.draft_parts import DraftParts


class GuessHead(Protocol):
    """Corrects logits. R requests, V tokens of the target; `state` is what a head keeps from guess to guess."""

    def begin(self, count: int) -> torch.Tensor | None:
        """Returns the state before the first guess of `count` requests; None where a head keeps nothing."""

    def __call__(
        self,
        place: int,
        logits: torch.Tensor,
        rows: torch.Tensor,
        previous: torch.Tensor,
        state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Corrects the logits [R, V] fp32 of the guess at a place, 0 for the first, and returns them with the state
        behind it. rows [R, H]: what the logits were made of; previous [R] int64: the token before the guess."""


class MarkovHead:
    """A head of DSpark; see `plan.drafts.description.Markov`. Implements GuessHead. Its tables are whole on every rank:
    a guess needs no collective."""

    def __init__(self, parts: DraftParts, spec: Markov, vocab_size: int) -> None:
        scope, rank = parts.scope, spec.rank
        self.spec = spec
        self.w1 = replace(scope, path="markov_w1").param("weight", (vocab_size, rank))
        self.w2 = replace(scope, path="markov_w2").param("weight", (vocab_size, rank))
        rows, cols = spec.projection(parts.model.hidden_size)
        self.gate = parts.projection(cols, True, "markov_gate", rows, optional_bias=False) if rows else None
        self.linear: LinearOp = scope.plan.entry("linear")

    def begin(self, count: int) -> torch.Tensor | None:
        return self.w1.new_zeros((count, self.spec.rank)) if self.spec.kind == "rnn" else None

    def __call__(
        self,
        place: int,
        logits: torch.Tensor,
        rows: torch.Tensor,
        previous: torch.Tensor,
        state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        latent = F.embedding(previous, self.w1)
        if state is not None:
            assert self.gate is not None
            kept, candidate, out = self.gate(torch.cat((state, latent, rows), dim=-1)).chunk(3, dim=-1)
            kept = torch.sigmoid(kept)
            state = kept * state + (1 - kept) * torch.tanh(candidate)
            latent = torch.tanh(out)
        elif self.gate is not None:
            latent = torch.sigmoid(self.gate(torch.cat((rows, latent), dim=-1))) * latent
        return logits + self.linear(latent, self.w2, None, torch.float32), state


def build_guess_head(parts: DraftParts, form: Block) -> GuessHead | None:
    """Builds the head of a block draft; None: guesses stand for themselves."""
    return None if form.head is None else MarkovHead(parts, form.head, form.vocab_size)
