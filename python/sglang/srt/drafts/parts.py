"""Parts of all drafts with layers of their own: scope, layers, embedding and head, and how a checkpoint fills them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.blocks.hyper_connections.layer import end_of
from sglang.srt.blocks.hyper_connections.spec import HyperConnections
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.block import Site
from sglang.srt.layers.embedding import LMHead, VocabParallelEmbedding
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import Unquantized
from sglang.srt.layers.ops import LINEAR
from sglang.srt.layers.parameter import Init, Param, Scope, TensorPart, WeightShard
from sglang.srt.layers.quantization.activations import values_of
from sglang.srt.layers.quantization.dense import QuantizedMethod
from sglang.srt.layers.quantization.layout import is_redundant
from sglang.srt.layers.rotary_embedding import RotaryTables
from sglang.srt.models.causal_lm import RESIDUALS, CausalLM, DecoderLayer, WrapBlock, embedding_of
from sglang.srt.plan.ranks import whole
from sglang.srt.plan.weight_names import PartKey

if TYPE_CHECKING:
    from sglang.srt.drafts.spec import DraftDescription
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.model_loader.loader import Loadable
    from sglang.srt.plan.plan import Plan


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
            plan=plan.for_draft,
            device=target.device,
            dtype=getattr(torch, plan.dtype),
            groups=parallel_state.groups().draft_groups,
            quant=Unquantized() if quantization is None else QuantizedMethod(quantization),
            weights=model.names,
            first_layer=self.draft.first_layer,
            readable=tuple(target.caches),
        )
        self.weights, self.params, self.finish, self.caches = scope.weights, scope.params, scope.finish, scope.caches
        self.copied: CopiedEmbedding | None = None
        """Copy of the target's embedding, in a last stage without an embedding; filled from the target's
        checkpoint."""
        self.rotary = RotaryTables(plan.num_positions, plan.context_len, scope.device)
        residual = model.layers[0].residual
        self.residual: Any = RESIDUALS[type(residual)](scope, model, residual)
        self.embedding = self._embedding(target)
        self.head = self._head(target)

    def _embedding(self, target: CausalLM) -> Callable[[torch.Tensor], torch.Tensor]:
        if self.draft.own_embedding:
            return VocabParallelEmbedding(
                self.scope.sub("embed"),
                self.draft.vocab_size,
                self.model.hidden_size,
                on_host=self.model.embedding.on_host,
            )
        shared = target.embed
        if shared is None:
            self.copied = CopiedEmbedding(self.scope, target)
            shared = self.copied.embedding
        return shared.plain if self.draft.plain_ends else shared

    def embedded(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns the embeddings [T, H] of the draft's tokens, with the batch's image features in place, since the
        draft reads what the target reads (`drafts.autoregressive.following_rows`). A draft of another width,
        and the last of several stages, which has no features, use the placeholder's embedding."""
        embedded, rows = self.embedding(batch.input_ids), batch.embedding_rows
        return embedded if rows is None or rows.width != embedded.shape[1] else rows.put(embedded)

    def _head(self, target: CausalLM) -> Callable[[torch.Tensor], torch.Tensor]:
        if not self.draft.head_size:
            assert target.head is not None, "the last stage has it"
            return target.head.plain if self.draft.plain_ends else target.head
        head = LMHead(self.scope.sub("lm_head"), self.draft.head_size)
        return ReducedHead(self.scope, head, self.draft) if self.draft.reduced else head

    @property
    def reduced_tokens(self) -> torch.Tensor:
        """Returns the tokens [rows] of the rows of a reduced output head."""
        assert isinstance(self.head, ReducedHead)
        return self.head.tokens

    def layer(self, i: int, around: WrapBlock | None = None) -> DecoderLayer:
        """Builds layer i; `around` wraps its blocks."""
        return DecoderLayer(self.layer_scope(i), self.model.layers[i], self.site(i), self.residual, around)

    def layers(self, first: int = 0) -> list[DecoderLayer]:
        """Builds the layers from `first` on."""
        return [self.layer(i) for i in range(first, len(self.model.layers))]

    def layer_scope(self, i: int) -> Scope:
        """Returns the scope of layer i."""
        return self.scope.sub("layers").sub(i)

    def site(self, i: int) -> Site:
        """Returns the build context of layer i."""
        return Site(i, self.model, self.rotary)

    def norm(self, name: str, size: int = 0) -> RMSNorm:
        """Builds a norm of `size` elements, by default the hidden size."""
        model = self.model
        return RMSNorm(self.scope.sub(name), size or model.hidden_size, model.norm_eps, model.zero_centred_norms)

    def ending(self) -> Callable[[Any], torch.Tensor]:
        """Returns a function that computes normalized rows [T, H] from the stream after the last layer."""
        spec = self.model.layers[0].residual
        if isinstance(spec, HyperConnections):
            join = end_of(self.scope, self.model, spec)
            return lambda stream: values_of(join.before(stream))
        norm = self.norm("norm")
        return lambda stream: values_of(stream.normed(norm))

    def unpacked(self, in_features: int, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns a projection [T, in_features] -> [T, H] on every rank, in 16 bits even if the checkpoint quantizes
        it."""
        scope = self.scope.sub(name)
        weights: list[torch.Tensor] = []
        linear = scope.plan.entry(LINEAR)
        shard = WeightShard("", whole(self.model.hidden_size), whole(in_features))
        scope.quant.create_unpacked(scope, shard, weights.append)
        return lambda rows: linear(rows, weights[0], None)

    def loadables(self) -> list[tuple[Loadable, str]]:
        """Returns the parts that checkpoints fill, each with its directory."""
        draft_path, target_path = self.paths
        return [(self, draft_path)] if self.copied is None else [(self, draft_path), (self.copied, target_path)]

    def ignored_weight(self, name: str) -> bool:
        """Returns whether the draft does not load this tensor of its checkpoint."""
        if not name.startswith(self.draft.at) or name in self.scope.on_other_ranks:
            return True
        if name.startswith(self.weights.unread) or name.endswith(self.weights.ignore):
            return True
        return is_redundant(self.model.quantization, name)

    def projection(
        self, in_features: int, bias: bool = False, name: str = "fc", rows: int = 0, optional_bias: bool = True
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns a 16-bit projection [T, in_features] -> [T, rows] on every rank; rows 0: the hidden size."""
        scope, rows = self.scope.sub(name), rows or self.model.hidden_size
        added = None
        if bias:  # some heads of EAGLE were trained without
            added = scope.param("bias", (rows,), {PartKey(): TensorPart((rows,), optional=optional_bias)}, Init.ZEROS)
        return Unquantized().create_weights(scope, [WeightShard("", whole(rows), whole(in_features))], added)


class ReducedHead:
    """An output head for a subset of the target's tokens, [R, H] -> [R, V] fp32 with -inf for the others."""

    def __init__(self, scope: Scope, head: LMHead, draft: DraftDescription) -> None:
        self.head, self.vocab_size, rows = head, draft.vocab_size, draft.head_size
        offsets = TensorPart((rows,), dtypes=("I64", "I32"), convert=_token_ids)
        self.tokens = replace(scope, path="").param("d2t", (rows,), {PartKey(): offsets}, first_tokens, torch.int64)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden)
        known = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return known.index_copy_(1, self.tokens, logits)


def _token_ids(offsets: torch.Tensor) -> torch.Tensor:
    """Returns the token of each row of the head: row i is token i + offsets[i]."""
    return offsets.to(torch.int64) + torch.arange(len(offsets))


def first_tokens(tokens: torch.Tensor, generator: torch.Generator) -> None:
    """Fills a dummy token map with 0, 1, 2, ..."""
    torch.arange(len(tokens), out=tokens)


class CopiedEmbedding:
    """A copy of the target's embedding, for a stage that lacks it. Implements Loadable for the target's checkpoint."""

    base_prefix = "model."

    def __init__(self, scope: Scope, target: CausalLM) -> None:
        self.weights = target.weights
        self.params: dict[str, Param] = {}
        self.finish: list[Callable[[], None]] = []
        scope = replace(scope, weights=target.weights, params=self.params, finish=self.finish)
        self.embedding = embedding_of(scope, target.description)

    def ignored_weight(self, name: str) -> bool:
        """Returns True: the target's embedding is copied, so no tensor is loaded."""
        return True
