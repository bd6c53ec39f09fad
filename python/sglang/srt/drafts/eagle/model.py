"""Computes heads of EAGLE, and layers for multi-token prediction of the same form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.drafts.eagle.spec import Concatenated, Projected
from sglang.srt.drafts.model import PartsDraft
from sglang.srt.drafts.parts import DraftParts
from sglang.srt.layers.quantization.activations import values_of
from sglang.srt.layers.residual import FFN, SumStream
from sglang.srt.models.causal_lm import CausalLM, build_block

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.plan.plan import Plan


class Eagle3Draft(PartsDraft[Concatenated]):
    """An EAGLE-3 draft (`drafts.eagle.spec.Concatenated`)."""

    def __init__(self, plan: Plan, target: CausalLM) -> None:
        super().__init__(plan, target)
        parts, form = self.parts, self.form
        self.aux_norms = [
            parts.norm(f"fc_norm.{i}", form.aux_size) for i in range(form.num_aux_layers * form.aux_norms)
        ]
        self.input_norm = parts.norm("input_norm", form.total_aux_size) if form.norm_before_fc else None
        self.fc = parts.projection(form.total_aux_size) if form.num_aux_layers else None
        self.first = ConcatenatedLayer(parts, form.norm_before_residual)
        self.layers = parts.layers(1)
        self.norm = parts.norm("norm")

    def features(self, hidden: torch.Tensor, aux_hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.fc is None:
            return hidden.clone()  # the stream is written over
        rows = [
            norm(row, None)[0] for norm, row in zip(self.aux_norms, aux_hidden_states, strict=False)
        ] or aux_hidden_states
        joined = torch.cat(list(rows), dim=-1)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined, None)[0])

    def __call__(self, batch: ForwardBatch, features: torch.Tensor | None) -> torch.Tensor:
        assert features is not None
        stream = self.first(self.parts.embedded(batch), features, batch)
        for layer in self.layers:
            layer(stream, batch)
        return values_of(stream.normed(self.norm)) if self.form.norm_output else stream.summed()

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        return self.parts.head(state if self.form.norm_output else self.norm(state, None)[0])


class ConcatenatedLayer:
    """The first layer of EAGLE-3: attention over the concatenated norms of embedding and features."""

    def __init__(self, parts: DraftParts, norm_before_residual: bool) -> None:
        scope, spec = parts.scope.sub("layers").sub(0), parts.model.layers[0]
        self.norm_before_residual = norm_before_residual
        self.embedding_norm, self.features_norm = parts.norm("layers.0.input_norm"), parts.norm("layers.0.hidden_norm")
        self.attention = build_block(scope, spec.mixer, parts.site(0))
        self.group = self.attention.defer_all_reduce()
        self.residual = parts.residual
        self.join = parts.residual.join(scope, FFN)
        self.ffn = build_block(scope, spec.ffn, parts.site(0))
        self.join.attach(self.ffn)

    def __call__(self, embedded: torch.Tensor, features: torch.Tensor, batch: ForwardBatch) -> SumStream:
        """Returns the stream after the layer, from embedded and features [T, H]; `features` is overwritten."""
        normed = self.features_norm(features, None)[0]
        rows = torch.cat((self.embedding_norm(embedded, None)[0], normed), dim=-1)
        stream = self.residual.begin(self.attention(rows, batch))
        stream.total, stream.group = normed if self.norm_before_residual else features, self.group
        self.join.after(stream, self.ffn(self.join.before(stream), batch))
        return stream


class ProjectedDraft(PartsDraft[Projected]):
    """A draft of EAGLE-1 and 2, or of multi-token prediction (`drafts.eagle.spec.Projected`)."""

    def __init__(self, plan: Plan, target: CausalLM) -> None:
        super().__init__(plan, target)
        parts, form = self.parts, self.form
        self.norms = (parts.norm("embedding_norm"), parts.norm("hidden_norm")) if form.norms else None
        self.fc = parts.projection(2 * parts.model.hidden_size, form.bias)
        self.layers = parts.layers()
        self.norm = parts.norm("norm") if form.final_norm else None

    def __call__(self, batch: ForwardBatch, features: torch.Tensor | None) -> torch.Tensor:
        assert features is not None
        embedded = self.parts.embedded(batch)
        if self.form.zero_first:
            embedded = embedded * (batch.positions > 0).to(embedded.dtype)[:, None]
        if self.norms is not None:
            embedded, features = (
                norm(rows, None)[0] for norm, rows in zip(self.norms, (embedded, features), strict=True)
            )
        pair = (features, embedded) if self.form.hidden_first else (embedded, features)
        stream = self.parts.residual.begin(self.fc(torch.cat(pair, dim=-1)))
        for layer in self.layers:
            layer(stream, batch)
        return stream.summed() if self.norm is None else values_of(stream.normed(self.norm))
