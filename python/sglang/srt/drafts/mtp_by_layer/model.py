"""A draft of multi-token prediction with one layer per depth (`drafts.mtp_by_layer.spec.MTPByLayer`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.drafts.model import PartsDraft
from sglang.srt.drafts.mtp_by_layer.spec import MTPByLayer
from sglang.srt.drafts.parts import DraftParts
from sglang.srt.plan.layer_spec import DRAFT_ROWS

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.models.causal_lm import CausalLM
    from sglang.srt.plan.plan import Plan


class MTPByLayerDraft(PartsDraft[MTPByLayer]):
    """The layers of all depths. Features and states are residual streams [T, H] before any final norm, except that the
    first depth's features may be the target's final hidden states.

    `tails` are the caches DRAFT_ROWS of all layers but the first, where a request has states.
    """

    def __init__(self, plan: Plan, target: CausalLM) -> None:
        super().__init__(plan, target)
        parts, form = self.parts, self.form
        self.hidden_size, self.dtype = parts.model.hidden_size, parts.scope.dtype
        self.depths = [MTPLayer(parts, form, i) for i in range(form.depths)]
        layers = range(1, form.depths if form.keeps_states else 1)
        self.tails = [parts.scope.cache(i, DRAFT_ROWS) for i in layers]

    def features(self, hidden: torch.Tensor, aux_hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the features [T, H] of the first depth, from the target's step."""
        if self.form.final_features:
            return hidden
        (stream,) = aux_hidden_states
        return stream

    def compute(self, depth: int, batch: ForwardBatch, features: torch.Tensor) -> torch.Tensor:
        """Returns the stream [T, H] after the layer of a depth; features [T, H] are not changed."""
        return self.depths[depth](batch, features)

    def logits_at(self, depth: int, state: torch.Tensor) -> torch.Tensor:
        """Returns logits [R, V] fp32 of state [R, H] on every rank."""
        norm = self.depths[depth].norm
        return self.parts.head(state if norm is None else norm(state, None)[0])


class MTPLayer:
    """The layer of one depth, with the norms and projection before it and the norm after it."""

    def __init__(self, parts: DraftParts, form: MTPByLayer, i: int) -> None:
        self.parts, self.hidden_first = parts, form.hidden_first
        self.norms = (parts.norm(f"embedding_norm.{i}"), parts.norm(f"hidden_norm.{i}"))
        self.fc = parts.projection(2 * parts.model.hidden_size, name=f"fc.{i}")
        self.layer = parts.layer(i)
        self.norm = parts.norm(f"norm.{i}") if form.depth_norms else None

    def __call__(self, batch: ForwardBatch, features: torch.Tensor) -> torch.Tensor:
        embedding_norm, hidden_norm = self.norms
        pair = (embedding_norm(self.parts.embedded(batch), None)[0], hidden_norm(features, None)[0])
        joined = torch.cat(pair[::-1] if self.hidden_first else pair, dim=-1)
        stream = self.parts.residual.begin(self.fc(joined))
        self.layer(stream, batch)
        return stream.summed()
