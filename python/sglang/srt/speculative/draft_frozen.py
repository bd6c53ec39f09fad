"""Guesses of a draft that reads the target's keys and values and keeps none (FROZEN_KV_MTP: Gemma 4's assistants).

position    0 .. n - 1                         n
row         of the target's steps: keys and    every guess: the token before it, and what the guess before left,
            values are in the target's cache   attends to them from here
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.mem_cache.memory_pool import CacheStore
from sglang.srt.models.frozen_draft import FrozenDraft
from sglang.srt.speculative.drafter import DraftStep


class DraftFrozen:
    """Guesses a chain of tokens over a cache that stays as it is. Implements Drafter.

    Stages of a pipeline that do not draft know only the flag, which is that of MTP. So slots are planned as for MTP,
    though this draft needs none ahead and reads no token behind a row."""

    aux_layers: tuple[int, ...] = ()
    caches: tuple[CacheStore, ...] = ()
    next_tokens_read = 1

    def __init__(self, model: FrozenDraft, num_tokens: int) -> None:
        self.model, self.num_tokens = model, num_tokens
        self.tokens_ahead = num_tokens - 2

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        pass

    def propose(self, step: DraftStep, num_guesses: int) -> torch.Tensor:
        if not num_guesses or not len(step.tokens):
            return step.tokens.new_empty((len(step.tokens), num_guesses))
        model, last = self.model, step.tokens
        batch = step.build_queries(last, step.slots, step.lens)
        features = step.hidden[step.last_rows]
        guesses: list[torch.Tensor] = []
        for i in range(num_guesses):
            batch.input_ids = last
            state = model(batch, features)
            # What a request has no token for is no number in a row of padding: token 0 instead.
            last = step.draw(model.logits(state), step.slots, step.lens + i + 1).clamp(min=0)
            guesses.append(last)
            features = model.next_features(state)
        return torch.stack(guesses, 1)
