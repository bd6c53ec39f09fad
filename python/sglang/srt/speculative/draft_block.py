"""Guesses of a block draft (DFLASH, DSPARK): all of a step in one pass of the draft.

    position    0 .. n - 1                                n           n + 1 .. n + B - 1
    row         of the target's steps: the draft keeps    last token  mask tokens
                keys and values made of their streams     sampled
    guess       DFLASH                                                of the token at its position
                DSPARK                                    of the token behind its position, by the guess before it

A block is always as long as the draft was trained for, also where fewer guesses are asked for: its rows see each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from sglang.srt.models.block_draft import BlockDraft
from sglang.srt.models.guess_heads import GuessHead
from sglang.srt.speculative.drafter import DraftStep


class DraftBlock:
    """Guesses a block of tokens with a draft model. Implements Drafter."""

    next_tokens_read = 0

    def __init__(self, model: BlockDraft, num_tokens: int, max_requests: int) -> None:
        """max_requests: of a step, as the memory of logits is planned."""
        self.model, self.num_tokens, self.form = model, num_tokens, model.form
        self.aux_layers, self.caches = model.aux_layers, tuple(model.caches)
        self.tokens_ahead = self.form.size
        self.rows_at_once = max(max_requests, self.form.size)

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        pass

    def propose(self, step: DraftStep, num_guesses: int) -> torch.Tensor:
        """Computes the guesses. The rows of the step are kept whatever num_guesses is: later blocks read them."""
        model, count, form = self.model, len(step.tokens), self.form
        rows = replace(step.batch, aux_hidden_states=[], step_cache={}, state_records=None, mrope_positions=None)
        model.keep(rows, model.features(step.hidden, step.aux_hidden_states))
        if not num_guesses or not count:
            return step.tokens.new_empty((count, num_guesses))
        if model.confidence is not None:
            num_guesses = self.num_tokens - 1  # by how likely they stand, the next step takes as many as pay
        masks = step.tokens.new_full((count, form.size - 1), form.mask_token)
        batch = step.build_block(torch.cat((step.tokens[:, None], masks), dim=1), step.slots, step.lens, step.ends)
        state = model(batch, None).unflatten(0, (count, form.size))
        state = state[:, form.first_row : form.first_row + num_guesses]
        guesses = torch.cat([self._guess(step, state, requests) for requests in self._parts(count, num_guesses)])
        # What a request has no token for is no number in a row of padding: token 0 instead.
        guesses = guesses.clamp(min=0)
        if model.confidence is not None:
            step.confidence = model.confidence(state, torch.cat((step.tokens[:, None], guesses[:, :-1]), dim=1))
        return guesses

    def _parts(self, count: int, num_guesses: int) -> Iterator[slice]:
        """Yields runs of `count` requests whose logits are computed at once."""
        at_once = max(1, self.rows_at_once // num_guesses)
        return (slice(first, first + at_once) for first in range(0, count, at_once))

    def _guess(self, step: DraftStep, state: torch.Tensor, requests: slice) -> torch.Tensor:
        """Draws the guesses of some requests from the rows [R, num_guesses, H] of all."""
        rows, slots, lens = state[requests], step.slots[requests], step.lens[requests].to(torch.int64)
        count, num_guesses = rows.shape[:2]
        logits = self.model.logits(rows.flatten(0, 1))
        if self.model.head is not None:
            tokens = step.tokens[requests]
            return _in_turn(self.model.head, step, logits.unflatten(0, (count, -1)), rows, slots, lens, tokens)
        positions = lens[:, None] + torch.arange(1, num_guesses + 1, device=slots.device)
        drawn = step.draw(logits, slots.repeat_interleave(num_guesses), positions.flatten())
        return drawn.view(count, num_guesses)


def _in_turn(
    head: GuessHead,
    step: DraftStep,
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    previous: torch.Tensor,
) -> torch.Tensor:
    """Draws one guess after the other, each by the one before it: logits [R, n, V], rows [R, n, H] -> [R, n]."""
    state, guesses = head.begin(logits, rows), []
    for place in range(logits.shape[1]):
        corrected, state = head(place, logits[:, place], rows[:, place], previous, state)
        previous = step.draw(corrected, slots, lens + place + 1).clamp(min=0)
        guesses.append(previous)
    return torch.stack(guesses, dim=1)
