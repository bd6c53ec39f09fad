"""Heads that correct the logits of a block's draft tokens from left to right, each given the draft tokens before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F

from sglang.srt.drafts.block.spec import Block, Confidence, Domino, Markov, Selector
from sglang.srt.layers.ops import LINEAR
from sglang.srt.layers.parameter import Init, TensorPart
from sglang.srt.plan.weight_names import PartKey

if TYPE_CHECKING:
    from sglang.srt.drafts.parts import DraftParts


class BlockHead(Protocol):
    """Corrects logits: R requests, n draft tokens each, V tokens of the target; `state` carries data from one draft
    token to the next."""

    def begin(self, logits: torch.Tensor, rows: torch.Tensor) -> Any:
        """Returns the state before the first draft token. logits [R, n, V] fp32; rows [R, n, H]: the hidden states
        behind them."""

    def __call__(
        self,
        place: int,
        logits: torch.Tensor,
        rows: torch.Tensor,
        previous: torch.Tensor,
        state: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Returns the corrected logits [R, V] fp32 of the draft token at `place` (0: the first), and the next state.
        rows [R, H]: the hidden states behind the logits; previous [R] int64: the preceding token."""


class MarkovHead:
    """A head of DSpark (`drafts.block.spec.Markov`). Implements BlockHead. Its tables are complete on every rank, so a
    draft token needs no collective."""

    def __init__(self, parts: DraftParts, spec: Markov, vocab_size: int) -> None:
        scope, rank = parts.scope, spec.rank
        self.spec = spec
        self.w1 = replace(scope, path="markov_w1").param("weight", (vocab_size, rank))
        self.w2 = replace(scope, path="markov_w2").param("weight", (spec.rows or vocab_size, rank))
        self.tokens = parts.reduced_tokens if spec.rows else None
        rows, cols = spec.projection(parts.model.hidden_size)
        self.gate = parts.projection(cols, True, "markov_gate", rows, optional_bias=False) if rows else None
        self.linear = scope.plan.entry(LINEAR)

    def begin(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        return self.w1.new_zeros((len(rows), self.spec.rank)) if self.spec.kind == "rnn" else None

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
        bias = self.linear(latent, self.w2, None, torch.float32)
        if self.tokens is not None:  # other tokens are not drafted
            return logits.index_add(1, self.tokens, bias), state
        return logits + bias, state


class ConfidenceHead:
    """Estimates the probability that draft tokens are accepted (`drafts.block.spec.Confidence`). Complete on every
    rank, but all use the first rank's numbers, because they decide about depths."""

    def __init__(self, parts: DraftParts, spec: Confidence, markov: MarkovHead | None) -> None:
        scope, size = replace(parts.scope, path="confidence"), spec.size(parts.model.hidden_size)
        assert not spec.rank or markov is not None
        self.table = markov.w1 if spec.rank and markov is not None else None
        self.weight = scope.param("weight", (1, size))
        self.bias = scope.param("bias", (1,), {PartKey(): TensorPart((1,), optional=True)}, Init.ZEROS)
        self.group = scope.groups.tp

    def __call__(self, rows: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Returns confidences [R, n] fp32, from 0 to 1. rows [R, n, H], previous [R, n]: the token before each draft
        token."""
        if self.table is not None:
            rows = torch.cat((rows, F.embedding(previous, self.table)), dim=-1)
        likely = torch.sigmoid((rows.float() * self.weight[0].float()).sum(-1) + self.bias.float())
        return self.group.all_gather(likely, dim=0)[: len(likely)]


class DominoHead:
    """A head of Domino (`drafts.block.spec.Domino`). Implements BlockHead. Its weights are complete on every rank; it
    reads the target's embedding."""

    def __init__(self, parts: DraftParts, spec: Domino, vocab_size: int) -> None:
        self.spec, self.embedding = spec, parts.embedding
        hidden, state = parts.model.hidden_size, spec.state_size
        gru = replace(parts.scope, path="prefix_gru")
        self.token_weight = gru.param("weight_ih_l0", (3 * state, hidden))
        self.state_weight = gru.param("weight_hh_l0", (3 * state, state))
        self.inner = replace(parts.scope, path="embed_proj.0").param("weight", (spec.inner_size, hidden + state))
        self.outer = replace(parts.scope, path="embed_proj.2").param("weight", (vocab_size, spec.inner_size))
        self.linear = parts.scope.plan.entry(LINEAR)

    def begin(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return rows.new_zeros((len(rows), self.spec.state_size))

    def __call__(
        self, place: int, logits: torch.Tensor, rows: torch.Tensor, previous: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state = self._advanced(previous, state)
        if place < self.spec.first_place:
            return logits, state
        inner = F.silu(self.linear(torch.cat((rows, state), dim=-1), self.inner, None))
        return logits + self.linear(inner, self.outer, None, torch.float32), state

    def _advanced(self, token: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Returns the GRU's state after a token; the gates are in the order reset, update, new."""
        reset, update, new = self.linear(self.embedding(token), self.token_weight, None).chunk(3, dim=-1)
        old_reset, old_update, old_new = self.linear(state, self.state_weight, None).chunk(3, dim=-1)
        update = torch.sigmoid(update + old_update)
        new = torch.tanh(new + torch.sigmoid(reset + old_reset) * old_new)
        return (1 - update) * new + update * state


class SelectorHead:
    """A head of DFlash 2 (`drafts.block.spec.Selector`). Implements BlockHead: tokens that are not candidates get -inf.
    Its tables are complete on every rank."""

    def __init__(self, parts: DraftParts, spec: Selector, vocab_size: int) -> None:
        self.spec = spec
        tables = replace(parts.scope, path="selector")
        self.before = tables.param("predecessor_codebook", (vocab_size, spec.rank))
        self.behind = tables.param("successor_codebook", (vocab_size, spec.rank))
        self.projection = parts.projection(parts.model.hidden_size, name="hidden_projection", rows=spec.rank)

    def begin(self, logits: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the logits [R, n, K] and ids of the candidates at all places, and the projected rows [R, n, rank]."""
        values, ids = logits.topk(self.spec.top_k, dim=-1)
        return values, ids, self.projection(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])

    def __call__(
        self,
        place: int,
        logits: torch.Tensor,
        rows: torch.Tensor,
        previous: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        values, ids, projected = (part[:, place] for part in state)
        context = F.embedding(previous, self.before) * projected
        scores = (F.embedding(ids, self.behind).float() * context[:, None].float()).sum(-1)
        return torch.full_like(logits, -torch.inf).scatter_(-1, ids, values + scores), state


_HEADS: dict[type, Callable[[DraftParts, Any, int], BlockHead]] = {
    Markov: MarkovHead,
    Domino: DominoHead,
    Selector: SelectorHead,
}


def build_confidence(parts: DraftParts, form: Block, head: BlockHead | None) -> ConfidenceHead | None:
    """Builds the confidence head; None if the draft has none."""
    if form.confidence is None:
        return None
    return ConfidenceHead(parts, form.confidence, head if isinstance(head, MarkovHead) else None)


def build_block_head(parts: DraftParts, form: Block) -> BlockHead | None:
    """Builds the correction head of a block draft; None if the draft has none."""
    return None if form.head is None else _HEADS[type(form.head)](parts, form.head, form.vocab_size)
