"""Draft models that attend to the target's keys and values and have no cache of their own: Gemma 4's assistants."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sglang.srt.drafts.kv_sharing.spec import Assistant
from sglang.srt.drafts.model import PartsDraft
from sglang.srt.drafts.parts import DraftParts, first_tokens
from sglang.srt.layers.parameter import TensorPart
from sglang.srt.layers.quantization.activations import values_of
from sglang.srt.plan.weight_names import PartKey

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.models.causal_lm import CausalLM
    from sglang.srt.plan.plan import Plan


class AssistantDraft(PartsDraft[Assistant]):
    """A draft of `drafts.kv_sharing.spec.Assistant`. Implements DraftModel: it has one row per request, at the
    position after the computed tokens; features are as wide as the target's hidden states."""

    def __init__(self, plan: Plan, target: CausalLM) -> None:
        super().__init__(plan, target)
        parts, form = self.parts, self.form
        self.fc = parts.projection(2 * form.feature_size)
        self.layers = parts.layers()
        self.norm = parts.norm("norm")
        self.back = parts.projection(parts.model.hidden_size, name="back", rows=form.feature_size)
        self.groups = TokenGroups(parts, form) if form.groups else None
        assert not self.caches, "its layers have no keys and values"

    def __call__(self, batch: ForwardBatch, features: torch.Tensor | None) -> torch.Tensor:
        assert features is not None
        pair = torch.cat((self.parts.embedding(batch.input_ids), features), dim=-1)
        stream = self.parts.residual.begin(self.fc(pair))
        for layer in self.layers:
            layer(stream, batch)
        return values_of(stream.normed(self.norm))

    def next_features(self, state: torch.Tensor) -> torch.Tensor:
        """Returns the features [R, H] for the next draft token from the state [R, H'] of this one."""
        return self.back(state)

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        logits = self.parts.head(state)
        return logits if self.groups is None else self.groups.kept(state, logits)


class TokenGroups:
    """Groups of tokens with a centroid each: only tokens of the groups with the largest centroid scores are drafted."""

    def __init__(self, parts: DraftParts, form: Assistant) -> None:
        self.form = form
        scope = replace(parts.scope, path="masked")
        self.tokens = scope.param(
            "token_ordering",
            (form.vocab_size,),
            {PartKey(): TensorPart((form.vocab_size,), dtypes=("I64", "I32"))},
            first_tokens,
            torch.int64,
        )
        self.centroids = parts.projection(parts.model.hidden_size, name="centroids", rows=form.groups)

    def kept(self, state: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Returns logits [R, V] with -inf for tokens of other groups, chosen by state [R, H]."""
        best = self.centroids(state).topk(self.form.kept, dim=-1).indices
        tokens = self.tokens.view(self.form.groups, -1)[best].flatten(1)
        known = torch.full_like(logits, -torch.inf)
        return known.scatter_(1, tokens, logits.gather(1, tokens))
