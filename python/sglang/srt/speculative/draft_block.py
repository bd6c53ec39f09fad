"""Guesses of a block draft (DFLASH): all of a step in one pass of the draft.

    position    0 .. n - 1                                n           n + 1 .. n + B - 1
    row         of the target's steps: the draft keeps    last token  mask tokens, each of which becomes
                keys and values made of their streams     sampled     the guess at its position

A block is always as long as the draft was trained for, also where fewer guesses are asked for: its rows see each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sglang.srt.models.block_draft import DFlashDraft
from sglang.srt.speculative.drafter import DraftStep


class DraftBlock:
    """Guesses a block of tokens with a draft model. Implements Drafter."""

    reads_next_token = False

    def __init__(self, model: DFlashDraft, num_tokens: int, max_requests: int) -> None:
        """max_requests: of a step, as the memory of logits is planned."""
        self.model, self.num_tokens, self.form = model, num_tokens, model.form
        self.captures, self.caches = model.captures, tuple(model.caches)
        self.tokens_ahead = self.form.size
        self.rows_at_once = max(max_requests, self.form.size)

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        pass

    def propose(self, step: DraftStep, num_guesses: int) -> torch.Tensor:
        """Computes the guesses. The rows of the step are kept whatever num_guesses is: later blocks read them."""
        model, count = self.model, len(step.tokens)
        rows = replace(step.batch, captured=[], handed_on={}, state_records=None, turned_by=None)
        model.keep(rows, model.features(step.hidden, step.captured))
        if not num_guesses or not count:
            return step.tokens.new_empty((count, num_guesses))
        masks = step.tokens.new_full((count, self.form.size - 1), self.form.mask_token)
        batch = step.build_block(torch.cat((step.tokens[:, None], masks), dim=1), step.slots, step.lens, step.ends)
        state = model(batch, None).unflatten(0, (count, self.form.size))[:, 1 : num_guesses + 1].flatten(0, 1)
        slots = step.slots.repeat_interleave(num_guesses)
        ahead = torch.arange(1, num_guesses + 1, device=slots.device)
        positions = (step.lens.to(torch.int64)[:, None] + ahead).flatten()
        parts = zip(*(rows.split(self.rows_at_once) for rows in (state, slots, positions)), strict=True)
        guesses = torch.cat([step.draw(model.logits(part), slot, at) for part, slot, at in parts])
        # What a request has no token for is no number in a row of padding: token 0 instead.
        return guesses.clamp(min=0).view(count, num_guesses)
