"""Draft tokens of a block draft (DFLASH, DSPARK), which makes all draft tokens of a step in one pass.

    position    0 .. n - 1                                n           n + 1 .. n + B - 1
    row         of the target's steps: the draft keeps    last token  mask tokens
                keys and values made of their streams     sampled
    proposes    DFLASH                                                the token at its position
                DSPARK                                    the token behind its position, by the draft token before it

A block always has the length that the draft was trained for, even if fewer draft tokens are asked for, because its rows
attend to each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from sglang.srt.drafts.block.heads import BlockHead
from sglang.srt.drafts.block.model import BlockDraft
from sglang.srt.drafts.drafter import DraftStep
from sglang.srt.plan.plan import Plan


class DraftBlock:
    """Makes a block of draft tokens with a draft model. Implements Drafter."""

    next_tokens_read = 0

    def __init__(self, model: BlockDraft, plan: Plan) -> None:
        self.model, self.num_tokens, self.form = model, plan.verified_tokens, model.form
        self.aux_layers, self.caches = model.aux_layers, tuple(model.caches)
        self.lookahead_slots = self.form.size
        self.rows_at_once = max(plan.max_running_requests, self.form.size)
        """Rows of logits that are computed at once, which bounds their memory."""

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        pass

    def propose(self, step: DraftStep, num_speculative_tokens: int) -> torch.Tensor:
        """Returns the draft tokens. The step's rows are kept even for num_speculative_tokens = 0, because later blocks
        read them."""
        model, count, form = self.model, len(step.tokens), self.form
        rows = replace(step.batch, aux_hidden_states=[], step_cache={}, state_records=None, mrope_positions=None)
        model.keep(rows, model.features(step.hidden, step.aux_hidden_states))
        if not num_speculative_tokens or not count:
            return step.tokens.new_empty((count, num_speculative_tokens))
        if model.confidence is not None:
            num_speculative_tokens = self.num_tokens - 1  # by how likely they stand, the next step takes as many as pay
        masks = step.tokens.new_full((count, form.size - 1), form.mask_token)
        batch = step.build_block(torch.cat((step.tokens[:, None], masks), dim=1), step.slots, step.lens, step.ends)
        state = model(batch, None).unflatten(0, (count, form.size))
        state = state[:, form.first_row : form.first_row + num_speculative_tokens]
        draft_tokens = torch.cat(
            [self._draft_block(step, state, requests) for requests in self._parts(count, num_speculative_tokens)]
        )
        if model.confidence is not None:
            step.confidence = model.confidence(state, torch.cat((step.tokens[:, None], draft_tokens[:, :-1]), dim=1))
        return draft_tokens

    def _parts(self, count: int, num_speculative_tokens: int) -> Iterator[slice]:
        """Yields slices of the `count` requests whose logits are computed at once."""
        at_once = max(1, self.rows_at_once // num_speculative_tokens)
        return (slice(first, first + at_once) for first in range(0, count, at_once))

    def _draft_block(self, step: DraftStep, state: torch.Tensor, requests: slice) -> torch.Tensor:
        """Returns draft tokens of the requests in the slice, drawn from `state` [R, num_speculative_tokens, H]."""
        rows, slots, lens = state[requests], step.slots[requests], step.lens[requests].to(torch.int64)
        count, num_speculative_tokens = rows.shape[:2]
        logits = self.model.logits(rows.flatten(0, 1))
        if self.model.head is not None:
            tokens = step.tokens[requests]
            return _in_turn(self.model.head, step, logits.unflatten(0, (count, -1)), rows, slots, lens, tokens)
        positions = lens[:, None] + torch.arange(1, num_speculative_tokens + 1, device=slots.device)
        drawn = step.draw(logits, slots.repeat_interleave(num_speculative_tokens), positions.flatten())
        return drawn.view(count, num_speculative_tokens)


def _in_turn(
    head: BlockHead,
    step: DraftStep,
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    previous: torch.Tensor,
) -> torch.Tensor:
    """Returns draft tokens [R, n], each drawn given the one before it. logits [R, n, V], rows [R, n, H]."""
    state, draft_tokens = head.begin(logits, rows), []
    for place in range(logits.shape[1]):
        corrected, state = head(place, logits[:, place], rows[:, place], previous, state)
        previous = step.draw(corrected, slots, lens + place + 1)
        draft_tokens.append(previous)
    return torch.stack(draft_tokens, dim=1)
