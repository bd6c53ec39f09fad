"""A draft of multi-token prediction for models with gated residual streams (`plan.drafts.forms.Streamed`).
Reference: the published description of Qwen3.8-Flash-Next's `mtp.` tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.gated_streams.layer import GatedJoin, GatedStream
from sglang.srt.blocks.gated_streams.spec import GatedStreams
from sglang.srt.layers.layernorm import norm_weight
from sglang.srt.layers.ops import RMSNormOp
from sglang.srt.models.draft_parts import DraftParts, Loadable
from sglang.srt.plan.drafts.forms import Streamed

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch


class GatedStreamDraft:
    """Implements DraftModel; features and states are residual streams [T, N * H]."""

    shifted = True

    def __init__(self, parts: DraftParts, form: Streamed) -> None:
        self.parts, self.form = parts, form
        self.aux_layers, self.caches = parts.draft.aux_layers, parts.caches
        size = parts.model.hidden_size
        centred = parts.model.zero_centred_norms
        self.embedding_norm = norm_weight(parts.scope.sub("embedding_norm"), size, centred)
        self.hidden_norm = norm_weight(parts.scope.sub("hidden_norm"), form.streams * size, centred)
        self.norm: RMSNormOp = parts.scope.plan.entry("rmsnorm")
        self.eps = parts.model.norm_eps
        self.fc_embedding = parts.projection(size, name="fc_embedding")
        self.fc_hidden = parts.projection(size, name="fc_hidden")
        self.layers = [parts.layer(i) for i in range(len(parts.model.layers))]
        scope, spec = parts.scope, GatedStreams(form.streams, form.rank)
        self.end = GatedJoin(scope.sub("head_mix"), scope.sub("norm"), parts.model, spec, inject=False)

    def loadables(self) -> list[tuple[Loadable, str]]:
        return self.parts.loadables()

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
