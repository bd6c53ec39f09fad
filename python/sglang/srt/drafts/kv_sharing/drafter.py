"""Draft tokens of a draft that reads the target's keys and values and keeps none (FROZEN_KV_MTP: Gemma 4's assistants).

position    0 .. n - 1                         n
row         of the target's steps: keys and    every draft token: the token before it and what its predecessor left,
            values are in the target's cache   attends to them from here
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.drafts.drafter import DraftStep
from sglang.srt.drafts.kv_sharing.model import AssistantDraft
from sglang.srt.mem_cache.memory_pool import CacheStore
from sglang.srt.plan.plan import Plan


class KVSharingAssistant:
    """Makes a chain of draft tokens over a cache that it only reads. Implements Drafter.

    Pipeline stages that do not draft only know the flag, which is that of MTP. So slots are planned as for MTP, though
    this draft needs no lookahead slots and reads no token after a row.
    """

    aux_layers: tuple[int, ...] = ()
    caches: tuple[CacheStore, ...] = ()
    next_tokens_read = 1

    def __init__(self, model: AssistantDraft, plan: Plan) -> None:
        self.model, self.num_tokens = model, plan.verified_tokens
        self.lookahead_slots = self.num_tokens - 2

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        pass

    def propose(self, step: DraftStep, num_speculative_tokens: int) -> torch.Tensor:
        """Returns the draft tokens, all computed from the query row at position `lens`."""
        if not num_speculative_tokens or not len(step.tokens):
            return step.tokens.new_empty((len(step.tokens), num_speculative_tokens))
        model, last = self.model, step.tokens
        batch = step.build_queries(last, step.slots, step.lens)
        features = step.hidden[step.last_rows]
        draft_tokens: list[torch.Tensor] = []
        for i in range(num_speculative_tokens):
            batch.input_ids = last
            state = model(batch, features)
            last = step.draw(model.logits(state), step.slots, step.lens + i + 1)
            draft_tokens.append(last)
            features = model.next_features(state)
        return torch.stack(draft_tokens, 1)
