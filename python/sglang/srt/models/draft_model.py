"""Draft models: they compute a chain of guesses behind every step of their target.

A draft has layers of its own, whose caches lie in the target's pages. What it shares with the target (the embedding,
mostly the output head) it takes from there. Its rows are those of a step of the target, or one row a request:

    features = draft.features(hidden, captured)     what the first draft step reads of the target's rows
    state = draft(batch, features)                  [T, H'] the features of the next draft step
    draft.logits(state[rows])                       [R, V] of the target's vocabulary

A `shifted` draft computes row i of the token that follows row i and of row i's features, and its keys and values lie at
position i; the others compute row i of token i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from sglang.srt.distributed import parallel_state
from sglang.srt.layers.block import Site
from sglang.srt.layers.embedding import LMHead, VocabParallelEmbedding
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import Unquantized
from sglang.srt.layers.parameter import Init, Param, Part, Scope, Shard
from sglang.srt.layers.quantization.dense import QuantizedMethod
from sglang.srt.layers.quantization.layout import is_redundant
from sglang.srt.layers.quantization.quantized_rows import values_of
from sglang.srt.layers.residual import FFN, SumResidual, SumStream
from sglang.srt.layers.rotary_embedding import RotaryTables
from sglang.srt.models.block_draft import DFlashDraft
from sglang.srt.models.causal_lm import CausalLM, DecoderLayer, build_block
from sglang.srt.plan.drafts.description import Block, Concatenated, DraftDescription, Projected
from sglang.srt.plan.layer_spec import Sum
from sglang.srt.plan.ranks import whole
from sglang.srt.plan.weight_names import PartKey, WeightMap

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.mem_cache.memory_pool import CacheStore
    from sglang.srt.plan.plan import Plan


class DraftModel(Protocol):
    """A draft model as the module describes it. The loader fills `params`, the runner's pools `caches`; everything may
    run in a CUDA graph."""

    shifted: bool
    captures: tuple[int, ...]
    """Target layers whose outputs the draft reads."""
    caches: list[CacheStore]

    def loadables(self) -> list[tuple[Loadable, str]]:
        """Returns the parts that checkpoints fill, with the directory of each."""

    def features(self, hidden: torch.Tensor, captured: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns features [T, H'] made of the target's final hidden states [T, H] and the captured residual streams
        [T, H], in the order of `captures`; None where the draft reads nothing but tokens."""

    def __call__(self, batch: ForwardBatch, features: torch.Tensor | None) -> torch.Tensor:
        """Computes the features [T, H'] of the next draft step. `batch.input_ids` [T] are the draft's. Writes over
        `features`."""

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """Returns logits, [R, H'] -> [R, V] fp32 on every rank; -inf for tokens that the draft does not know."""


class Loadable(Protocol):
    """Parameters and where a checkpoint has them; see `model_loader.loader`."""

    weights: WeightMap
    params: dict[str, Param]
    finish: list[Callable[[], None]]
    base_prefix: str
    """Prefix that names may lack in checkpoints which were saved without a head."""

    def ignored_weight(self, name: str) -> bool:
        """Returns whether a tensor of the checkpoint holds nothing that this rank needs."""


class DraftParts:
    """The parts of all drafts with layers of their own: scope, layers, embedding, head. Implements Loadable."""

    base_prefix = ""

    def __init__(self, plan: Plan, target: CausalLM) -> None:
        assert plan.draft is not None
        self.draft = plan.draft.description
        self.paths = (plan.draft.config.model_path, plan.model.model_path)
        self.model = model = self.draft.model
        quantization = model.quantization
        self.scope = scope = Scope(
            plan=plan.of_draft,
            device=target.device,
            dtype=getattr(torch, plan.dtype),
            groups=parallel_state.groups(),
            quant=Unquantized() if quantization is None else QuantizedMethod(quantization),
            weights=model.names,
            first_layer=self.draft.first_layer,
        )
        self.weights, self.params, self.finish, self.caches = scope.weights, scope.params, scope.finish, scope.caches
        self.copied: CopiedEmbedding | None = None
        """Copy of the target's embedding, in a last stage that has no embedding of its own: filled from the target's
        checkpoint."""
        self.rotary = RotaryTables(plan.context_len, scope.device)
        residual = model.layers[0].residual
        assert isinstance(residual, Sum)
        self.residual = SumResidual(scope, model, residual)
        self.embedding = self._embedding(target)
        self.head = self._head(target)

    def _embedding(self, target: CausalLM) -> VocabParallelEmbedding:
        if self.draft.own_embedding:
            return VocabParallelEmbedding(self.scope.sub("embed"), self.draft.vocab_size, self.model.hidden_size)
        if target.embed is not None:
            return target.embed
        self.copied = CopiedEmbedding(self.scope, target)
        return self.copied.embedding

    def _head(self, target: CausalLM) -> Callable[[torch.Tensor], torch.Tensor]:
        if not self.draft.head_size:
            assert target.head is not None, "the last stage has it"
            return target.head
        head = LMHead(self.scope.sub("lm_head"), self.draft.head_size)
        return ReducedHead(self.scope, head, self.draft) if self.draft.reduced else head

    def layer(self, i: int) -> DecoderLayer:
        return DecoderLayer(self.scope.sub("layers").sub(i), self.model.layers[i], self.site(i), self.residual)

    def site(self, i: int) -> Site:
        return Site(i, self.model, self.rotary)

    def norm(self, name: str, size: int = 0) -> RMSNorm:
        model = self.model
        return RMSNorm(self.scope.sub(name), size or model.hidden_size, model.norm_eps, model.zero_centred_norms)

    def loadables(self) -> list[tuple[Loadable, str]]:
        """Returns the parts that checkpoints fill, with the directory of each."""
        draft_path, target_path = self.paths
        return [(self, draft_path)] if self.copied is None else [(self, draft_path), (self.copied, target_path)]

    def ignored_weight(self, name: str) -> bool:
        if not name.startswith(self.draft.at) or name in self.scope.elsewhere:
            return True
        if name.startswith(self.weights.unread) or name.endswith(self.weights.ignore):
            return True
        return is_redundant(self.model.quantization, name)

    def projection(self, in_features: int, bias: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns the projection fc: [T, in_features] -> [T, H] on every rank, in 16 bits."""
        scope, rows = self.scope.sub("fc"), self.model.hidden_size
        added = None
        if bias:  # some heads were trained without
            added = scope.param("bias", (rows,), {PartKey(): Part((rows,), optional=True)}, Init.ZEROS)
        return Unquantized().create_weights(scope, [Shard("", whole(rows), whole(in_features))], added)


class ReducedHead:
    """An output head for some of the target's tokens, which its rows stand for: [R, H] -> [R, V] fp32."""

    def __init__(self, scope: Scope, head: LMHead, draft: DraftDescription) -> None:
        self.head, self.vocab_size, rows = head, draft.vocab_size, draft.head_size
        offsets = Part((rows,), dtypes=("I64", "I32"), convert=_token_ids)
        self.tokens = replace(scope, path="").param("d2t", (rows,), {PartKey(): offsets}, _first_tokens, torch.int64)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden)
        known = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return known.index_copy_(1, self.tokens, logits)


def _token_ids(offsets: torch.Tensor) -> torch.Tensor:
    """Returns the token of each row of the head: row i is the token i + offsets[i]."""
    return offsets.to(torch.int64) + torch.arange(len(offsets))


def _first_tokens(tokens: torch.Tensor, generator: torch.Generator) -> None:
    torch.arange(len(tokens), out=tokens)


class CopiedEmbedding:
    """A copy of the target's embedding, where only another stage has it. Implements Loadable, of the target's
    checkpoint."""

    base_prefix = "model."

    def __init__(self, scope: Scope, target: CausalLM) -> None:
        self.weights = target.weights
        self.params: dict[str, Param] = {}
        self.finish: list[Callable[[], None]] = []
        model, scope = target.description, replace(scope, weights=target.weights, params=self.params)
        self.embedding = VocabParallelEmbedding(
            scope.sub("embed"), model.vocab_size, model.hidden_size, model.embedding_scale
        )

    def ignored_weight(self, name: str) -> bool:
        return True


class Eagle3Draft:
    """An EAGLE-3 draft; see `plan.drafts.description.Concatenated`."""

    shifted = True

    def __init__(self, parts: DraftParts, form: Concatenated) -> None:
        self.parts, self.form = parts, form
        self.captures, self.caches = parts.draft.captures, parts.caches
        self.capture_norms = [
            parts.norm(f"fc_norm.{i}", form.capture_size) for i in range(form.num_captures * form.capture_norms)
        ]
        self.input_norm = parts.norm("input_norm", form.captured_size) if form.norm_before_fc else None
        self.fc = parts.projection(form.captured_size) if form.num_captures else None
        self.first = ConcatenatedLayer(parts, form.norm_before_residual)
        self.layers = [parts.layer(i) for i in range(1, len(parts.model.layers))]
        self.norm = parts.norm("norm")

    def loadables(self) -> list[tuple[Loadable, str]]:
        return self.parts.loadables()

    def features(self, hidden: torch.Tensor, captured: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.fc is None:
            return hidden.clone()  # the stream is written over
        rows = [norm(row, None)[0] for norm, row in zip(self.capture_norms, captured, strict=False)] or captured
        joined = torch.cat(list(rows), dim=-1)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined, None)[0])

    def __call__(self, batch: ForwardBatch, features: torch.Tensor | None) -> torch.Tensor:
        assert features is not None
        stream = self.first(self.parts.embedding(batch.input_ids), features, batch)
        for layer in self.layers:
            layer(stream, batch)
        return values_of(stream.normed(self.norm)) if self.form.norm_output else stream.summed()

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        return self.parts.head(state if self.form.norm_output else self.norm(state, None)[0])


class ConcatenatedLayer:
    """The first layer of EAGLE-3: attention over the normed embedding beside the normed features."""

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
        """Computes the layer: [T, H] each -> the stream behind the layer; `features` is written over."""
        normed = self.features_norm(features, None)[0]
        rows = torch.cat((self.embedding_norm(embedded, None)[0], normed), dim=-1)
        stream = self.residual.begin(self.attention(rows, batch))
        stream.total, stream.group = normed if self.norm_before_residual else features, self.group
        self.join.after(stream, self.ffn(self.join.before(stream), batch))
        return stream


class ProjectedDraft:
    """A draft of EAGLE-1 and 2, or of layers for multi-token prediction; see `plan.drafts.description.Projected`."""

    shifted = True

    def __init__(self, parts: DraftParts, form: Projected) -> None:
        self.parts, self.form = parts, form
        self.captures, self.caches = parts.draft.captures, parts.caches
        self.norms = (parts.norm("embedding_norm"), parts.norm("hidden_norm")) if form.norms else None
        self.fc = parts.projection(2 * parts.model.hidden_size, form.bias)
        self.layers = [parts.layer(i) for i in range(len(parts.model.layers))]
        self.norm = parts.norm("norm") if form.final_norm else None

    def loadables(self) -> list[tuple[Loadable, str]]:
        return self.parts.loadables()

    def features(self, hidden: torch.Tensor, captured: Sequence[torch.Tensor]) -> torch.Tensor:
        return hidden

    def __call__(self, batch: ForwardBatch, features: torch.Tensor | None) -> torch.Tensor:
        assert features is not None
        embedded = self.parts.embedding(batch.input_ids)
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


class StandaloneDraft:
    """A draft that is a model of its own."""

    shifted = False
    captures: tuple[int, ...] = ()

    def __init__(self, plan: Plan, target: CausalLM) -> None:
        assert plan.draft is not None
        self.model = CausalLM(plan.of_draft, target.device, plan.draft.description.first_layer)
        self.caches, self.vocab_size = self.model.caches, plan.draft.description.vocab_size
        self.model_path = plan.draft.config.model_path
        self.last_token = self.model.description.vocab_size - 1

    def loadables(self) -> list[tuple[Loadable, str]]:
        return [(self.model, self.model_path)]

    def features(self, hidden: torch.Tensor, captured: Sequence[torch.Tensor]) -> None:
        return None

    def __call__(self, batch: ForwardBatch, features: torch.Tensor | None) -> torch.Tensor:
        # Tokens of the target that the draft has no row for stand for nothing that texts are made of.
        known = replace(
            batch, input_ids=batch.input_ids.clamp(max=self.last_token), embedding_rows=None, turned_by=None
        )
        return self.model.compute(known, None)

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        logits = self.model.logits(state)[:, : self.vocab_size]
        missing = self.vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def build_draft(plan: Plan, target: CausalLM) -> DraftModel:
    """Builds the planned draft, whose weights are still to be filled, as a part of the target's last stage."""
    assert plan.draft is not None
    form = plan.draft.description.form
    if isinstance(form, Concatenated):
        return Eagle3Draft(DraftParts(plan, target), form)
    if isinstance(form, Projected):
        return ProjectedDraft(DraftParts(plan, target), form)
    if isinstance(form, Block):
        return DFlashDraft(DraftParts(plan, target), form)
    return StandaloneDraft(plan, target)
