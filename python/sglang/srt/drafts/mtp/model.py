"""Drafts of multi-token prediction in models with several residual streams. Models with one stream have a draft of
EAGLE's form (`drafts.eagle.model.ProjectedDraft`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.gated_streams.layer import GatedJoin, GatedStream
from sglang.srt.blocks.gated_streams.spec import GatedStreams
from sglang.srt.drafts.model import PartsDraft
from sglang.srt.drafts.mtp.spec import ByStream, Streamed
from sglang.srt.layers.layernorm import norm_weight
from sglang.srt.layers.ops import RMSNORM

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.models.causal_lm import CausalLM
    from sglang.srt.plan.plan import Plan


class MultiStreamDraft(PartsDraft[ByStream]):
    """A draft with several residual streams (`drafts.mtp.spec.ByStream`). Features are a row's streams, [T, N *
    H]."""

    def __init__(self, plan: Plan, target: CausalLM) -> None:
        super().__init__(plan, target)
        parts, self.streams = self.parts, self.form.streams
        hidden = parts.model.hidden_size
        self.norms = (parts.norm("embedding_norm"), parts.norm("hidden_norm"))
        self.embedding_projection, self.stream_projection = (
            parts.unpacked(hidden, "e_proj"),
            parts.unpacked(hidden, "h_proj"),
        )
        self.layers = parts.layers()
        self.ending = parts.ending()

    def features(self, hidden: torch.Tensor, aux_hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        (streams,) = aux_hidden_states
        return streams

    def __call__(self, batch: ForwardBatch, features: torch.Tensor | None) -> torch.Tensor:
        assert features is not None
        embedding_norm, stream_norm = self.norms
        embedded = self.embedding_projection(embedding_norm(self.parts.embedding(batch.input_ids), None)[0])
        rows = features.view(len(embedded) * self.streams, -1)
        streams = self.stream_projection(stream_norm(rows, None)[0]).view(len(embedded), self.streams, -1)
        stream = self.parts.residual.resume((streams + embedded[:, None]).flatten(1))
        for layer in self.layers:
            layer(stream, batch)
        return self.parts.residual.to_intermediate(stream)

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        return self.parts.head(self.ending(self.parts.residual.resume(state.clone())))


class GatedStreamDraft(PartsDraft[Streamed]):
    """A draft with gated residual streams (`drafts.mtp.spec.Streamed`). Reference: the published description of
    Qwen3.8-Flash-Next's `mtp.` tensors. Features and states are residual streams [T, N * H]."""

    def __init__(self, plan: Plan, target: CausalLM) -> None:
        super().__init__(plan, target)
        parts, form = self.parts, self.form
        size = parts.model.hidden_size
        centred = parts.model.zero_centred_norms
        self.embedding_norm = norm_weight(parts.scope.sub("embedding_norm"), size, centred)
        self.hidden_norm = norm_weight(parts.scope.sub("hidden_norm"), form.streams * size, centred)
        self.norm = parts.scope.plan.entry(RMSNORM)
        self.eps = parts.model.norm_eps
        self.fc_embedding = parts.projection(size, name="fc_embedding")
        self.fc_hidden = parts.projection(size, name="fc_hidden")
        self.layers = parts.layers()
        scope, spec = parts.scope, GatedStreams(form.streams, form.rank)
        self.end = GatedJoin(scope.sub("head_mix"), scope.sub("norm"), parts.model, spec, inject=False)

    def features(self, hidden: torch.Tensor, aux_hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        return aux_hidden_states[0]

    def __call__(self, batch: ForwardBatch, features: torch.Tensor | None) -> torch.Tensor:
        assert features is not None
        embedded = self.norm(self.parts.embedding(batch.input_ids), self.embedding_norm, self.eps)
        streams = self._streams(self.norm(features, self.hidden_norm, self.eps))
        projected = self.fc_hidden(streams.flatten(0, 1)).view(streams.shape)
        stream = GatedStream(projected + self.fc_embedding(embedded)[:, None])
        for layer in self.layers:
            layer(stream, batch)
        return stream.summed().flatten(1)

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        return self.parts.head(self.end.before(GatedStream(self._streams(state))))

    def _streams(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(len(rows), self.form.streams, -1)
