"""Draft tokens made one after the other by a draft model: EAGLE, EAGLE3, multi-token prediction (MTP), or a small
standalone model.

For a chain of n draft tokens the draft's layers run over the rows of the target's step, so that the draft has keys and
values of all the target's tokens, and then over one further token of each request at a time.

    target     row i   token i                        -> hidden state i
    shifted    row i   token i + 1, hidden state i    -> draft token i + 2      EAGLE, EAGLE3, MTP
    alone      row i   token i                        -> draft token i + 1      STANDALONE
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sglang.srt.drafts.drafter import DraftStep
from sglang.srt.drafts.model import DraftModel
from sglang.srt.layers.attention.shared_selection import SharedSelection
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.input_rows import MaskedRows
from sglang.srt.plan.plan import Plan


def following_rows(batch: ForwardBatch) -> MaskedRows | None:
    """Returns the image features for draft rows that read the token after their own, i.e. shifted by one within each
    prompt. The first token of a prompt follows no row; after the last row of a chunk only the token id is known."""
    rows, extend = batch.embedding_rows, batch.extend
    return None if rows is None or extend is None else rows.following(extend.start_loc[:-1], len(batch.input_ids))


def _keep_states(batch: ForwardBatch, last_rows: torch.Tensor) -> None:
    """Commits the recurrent states of the draft's layers up to `last_rows` [R], the last accepted row of each
    request."""
    if not batch.state_records:
        return
    assert batch.extend is not None and batch.extend.draft_tokens is not None
    counts = last_rows % batch.extend.draft_tokens.width + 1
    for record in batch.state_records:
        record.commit(counts)


class AutoregressiveDraft:
    """Makes a chain of draft tokens with a draft model. Implements Drafter. A request always brings the whole chain,
    however likely its first draft tokens are."""

    def __init__(self, model: DraftModel, plan: Plan) -> None:
        assert plan.draft is not None
        self.model, self.num_tokens = model, plan.verified_tokens
        self.shares_selection = plan.draft.description.shares_selection
        self.aux_layers, self.caches = model.aux_layers, tuple(model.caches)
        self.lookahead_slots = self.num_tokens - (2 if model.shifted else 1)  # the last draft token has no row
        self.next_tokens_read = int(model.shifted)

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        pass

    def propose(self, step: DraftStep, num_speculative_tokens: int) -> torch.Tensor:
        """Returns the draft tokens. The step's rows are computed even for num_speculative_tokens = 0, because later
        draft tokens read their keys and values."""
        shifted, model = self.model.shifted, self.model
        features = model.features(step.hidden, step.aux_hidden_states)
        ids = step.next_ids if shifted else step.batch.input_ids
        rows = following_rows(step.batch) if shifted else step.batch.embedding_rows
        shared = (
            SharedSelection(step.last_rows, step.slots, num_speculative_tokens - 1) if self.shares_selection else None
        )
        batch = replace(
            step.batch,
            input_ids=ids,
            embedding_rows=rows,
            aux_hidden_states=[],
            step_cache={},
            state_records=None if step.batch.state_records is None else [],
            shared_selection=shared if num_speculative_tokens > 1 else None,
        )
        state = model(batch, features)[step.last_rows]
        _keep_states(batch, step.last_rows)
        draft_tokens: list[torch.Tensor] = []
        last = step.tokens
        for i in range(num_speculative_tokens):
            position = step.lens + i
            if not shifted or i:
                row = position - 1 if shifted else position
                batch = step.build_batch(last, step.slots, row, step.ends)
                batch.shared_selection = shared
                state = model(batch, state if shifted else None)
            last = step.draw(model.logits(state), step.slots, position + 1)
            draft_tokens.append(last)
        return torch.stack(draft_tokens, 1) if draft_tokens else step.tokens.new_empty((len(step.tokens), 0))
