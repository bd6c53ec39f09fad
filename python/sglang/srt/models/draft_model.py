"""Draft models, which compute a chain of draft tokens after every step of their target.

A draft has layers of its own, whose caches use the target's pages. It shares the target's embedding and usually its
output head. Its rows are those of a step of the target, or one row per request:

    features = draft.features(hidden, captured)     what the first draft step reads of the target's rows
    state = draft(batch, features)                  [T, H'] the features of the next draft step
    draft.logits(state[rows])                       [R, V] of the target's vocabulary

A `shifted` draft computes row i from the token after row i and from row i's features, with keys and values at position
i; others compute row i from token i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from sglang.srt.distributed import parallel_state
from sglang.srt.layers.quantization.activations import values_of
from sglang.srt.layers.residual import FFN, SumStream
from sglang.srt.models.assistant_draft import AssistantDraft
from sglang.srt.models.block_draft import BlockDraft
from sglang.srt.models.causal_lm import CausalLM, build_block
from sglang.srt.models.draft_parts import DraftParts, Loadable
from sglang.srt.models.gated_stream_draft import GatedStreamDraft
from sglang.srt.models.mtp_by_layer import MTPByLayerDraft
from sglang.srt.plan.drafts.forms import Assistant, Block, ByStream, Concatenated, MTPByLayer, Projected, Streamed

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.mem_cache.memory_pool import CacheStore
    from sglang.srt.plan.plan import Plan


class DraftModel(Protocol):
    """A draft model as described in the module. The loader fills `params`, the runner's pools `caches`; everything may
    be captured in a CUDA graph."""

    shifted: bool
    aux_layers: tuple[int, ...]
    """Target layers whose outputs the draft reads."""
    caches: list[CacheStore]

    def loadables(self) -> list[tuple[Loadable, str]]:
        """Returns the parts that checkpoints fill, each with its directory."""

    def features(self, hidden: torch.Tensor, aux_hidden_states: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns features [T, H'] from the target's final hidden states [T, H] and the aux hidden states [T, H], or
        [T, N * H] of N streams, in the order of `aux_layers`; None if the draft reads only tokens."""

    def __call__(self, batch: ForwardBatch, features: torch.Tensor | None) -> torch.Tensor:
        """Returns the features [T, H'] of the next draft step. `batch.input_ids` [T] are the draft's. Overwrites
        `features`."""

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """Returns logits [R, V] fp32 of state [R, H'] on every rank; -inf for tokens that the draft does not know."""


class Eagle3Draft:
    """An EAGLE-3 draft (`plan.drafts.forms.Concatenated`)."""

    shifted = True

    def __init__(self, parts: DraftParts, form: Concatenated) -> None:
        self.parts, self.form = parts, form
        self.aux_layers, self.caches = parts.draft.aux_layers, parts.caches
        self.aux_norms = [
            parts.norm(f"fc_norm.{i}", form.aux_size) for i in range(form.num_aux_layers * form.aux_norms)
        ]
        self.input_norm = parts.norm("input_norm", form.total_aux_size) if form.norm_before_fc else None
        self.fc = parts.projection(form.total_aux_size) if form.num_aux_layers else None
        self.first = ConcatenatedLayer(parts, form.norm_before_residual)
        self.layers = [parts.layer(i) for i in range(1, len(parts.model.layers))]
        self.norm = parts.norm("norm")

    def loadables(self) -> list[tuple[Loadable, str]]:
        return self.parts.loadables()

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


class ProjectedDraft:
    """A draft of EAGLE-1 and 2, or of multi-token prediction (`plan.drafts.forms.Projected`)."""

    shifted = True

    def __init__(self, parts: DraftParts, form: Projected) -> None:
        self.parts, self.form = parts, form
        self.aux_layers, self.caches = parts.draft.aux_layers, parts.caches
        self.norms = (parts.norm("embedding_norm"), parts.norm("hidden_norm")) if form.norms else None
        self.fc = parts.projection(2 * parts.model.hidden_size, form.bias)
        self.layers = [parts.layer(i) for i in range(len(parts.model.layers))]
        self.norm = parts.norm("norm") if form.final_norm else None

    def loadables(self) -> list[tuple[Loadable, str]]:
        return self.parts.loadables()

    def features(self, hidden: torch.Tensor, aux_hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        return hidden

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

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        return self.parts.head(state)


class MultiStreamDraft:
    """A draft with several residual streams (`plan.drafts.forms.ByStream`). Features are a row's streams, [T, N *
    H]."""

    shifted = True

    def __init__(self, parts: DraftParts, form: ByStream) -> None:
        self.parts, self.streams = parts, form.streams
        self.aux_layers, self.caches = parts.draft.aux_layers, parts.caches
        hidden = parts.model.hidden_size
        self.norms = (parts.norm("embedding_norm"), parts.norm("hidden_norm"))
        self.embedding_projection, self.stream_projection = (
            parts.unpacked(hidden, "e_proj"),
            parts.unpacked(hidden, "h_proj"),
        )
        self.layers = [parts.layer(i) for i in range(len(parts.model.layers))]
        self.ending = parts.ending()

    def loadables(self) -> list[tuple[Loadable, str]]:
        return self.parts.loadables()

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


class StandaloneDraft:
    """A draft that is a complete model of its own."""

    shifted = False
    aux_layers: tuple[int, ...] = ()

    def __init__(self, plan: Plan, target: CausalLM) -> None:
        assert plan.draft is not None
        groups = parallel_state.groups().draft_groups
        self.model = CausalLM(plan.for_draft, target.device, plan.draft.description.first_layer, groups)
        self.caches, self.vocab_size = self.model.caches, plan.draft.description.vocab_size
        self.model_path = plan.draft.config.model_path
        self.last_token = self.model.description.vocab_size - 1

    def loadables(self) -> list[tuple[Loadable, str]]:
        return [(self.model, self.model_path)]

    def features(self, hidden: torch.Tensor, aux_hidden_states: Sequence[torch.Tensor]) -> None:
        return None

    def __call__(self, batch: ForwardBatch, features: torch.Tensor | None) -> torch.Tensor:
        # Token ids beyond the draft's vocabulary are special ones that do not occur in texts.
        known = replace(
            batch, input_ids=batch.input_ids.clamp(max=self.last_token), embedding_rows=None, mrope_positions=None
        )
        return self.model.compute(known, None)

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        logits = self.model.logits(state)[:, : self.vocab_size]
        missing = self.vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def build_draft(plan: Plan, target: CausalLM) -> DraftModel | MTPByLayerDraft:
    """Builds the planned draft as a part of the target's last stage; its weights are not loaded yet."""
    assert plan.draft is not None
    form = plan.draft.description.form
    if isinstance(form, Concatenated):
        return Eagle3Draft(DraftParts(plan, target), form)
    if isinstance(form, Projected):
        return ProjectedDraft(DraftParts(plan, target), form)
    if isinstance(form, ByStream):
        return MultiStreamDraft(DraftParts(plan, target), form)
    if isinstance(form, MTPByLayer):
        return MTPByLayerDraft(DraftParts(plan, target), form)
    if isinstance(form, Streamed):
        return GatedStreamDraft(DraftParts(plan, target), form)
    if isinstance(form, Block):
        return BlockDraft(DraftParts(plan, target), form)
    if isinstance(form, Assistant):
        return AssistantDraft(DraftParts(plan, target), form)
    return StandaloneDraft(plan, target)
