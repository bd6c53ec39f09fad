"""The description of a draft: its own layers, what it reads of the target's steps, and how it makes logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang.srt.blocks.hyper_connections.spec import HyperConnections
from sglang.srt.drafts.form import Form
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.weight_spec import Elements, Weights


@dataclass(frozen=True, slots=True)
class DraftDescription:
    """A draft of a target model.

    kind: name in messages ("EAGLE3", "MTP"); model: layers, names, quantization
    first_layer: number of its first layer among caches, behind the target's layers; the target's vocabulary has
        `vocab_size` tokens
    aux_layers: target layers whose outputs (aux hidden states) it reads
    head_size: rows of its own output head; 0: it uses the target's; reduced: a table of the checkpoint (d2t) maps
        these rows to tokens
    own_embedding: it does not use the target's embedding
    plain_ends: it uses the target's embedding and head without the norm before the first layer and without the
        scaling or capping of logits
    shares_selection: all passes read what an indexer selected for a row of the target's step, and the tokens since
    at: beginnings of its tensors' names in the target's checkpoint
    """

    kind: str
    model: ModelDescription
    form: Form
    first_layer: int
    vocab_size: int
    aux_layers: tuple[int, ...] = ()
    head_size: int = 0
    reduced: bool = False
    own_embedding: bool = False
    plain_ends: bool = False
    shares_selection: bool = False
    at: str | tuple[str, ...] = ""

    def front(self) -> Weights:
        """Returns the weights before the first layer and behind the last one, except embedding and head."""
        hidden = self.model.hidden_size
        norm = Elements(hidden * self.form.final_norm, "float32" if self.model.zero_centred_norms else None)
        table = Elements(2 * self.head_size * self.reduced, "int32")  # a table of int64
        residual = self.model.layers[0].residual
        ends = residual.head_weights(hidden) if isinstance(residual, HyperConnections) else ()
        return (*self.form.weights(hidden), *ends, norm, table)

    def with_embedding_on_host(self) -> DraftDescription:
        """Returns the draft with its own embedding in main memory, if it has one that no output head multiplies by."""
        if not self.own_embedding or self.model.tie_embeddings:
            return self
        return replace(self, model=replace(self.model, embedding=replace(self.model.embedding, on_host=True)))

    def __str__(self) -> str:
        layers = f"{len(self.model.layers)} layer{'s' * (len(self.model.layers) > 1)}"
        read = f" over the outputs of layers {', '.join(map(str, self.aux_layers))}" if self.aux_layers else ""
        head = f", a head of {self.head_size:,} of {self.vocab_size:,} tokens" if self.reduced else ""
        return f"{self.kind} ({self.model.architecture}): {layers}{read}{head}"


def without_ends(model: ModelDescription, vocab_size: int) -> ModelDescription:
    """Returns a draft's model as a part of its target, without embedding and output head. `vocab_size`: tokens of the
    head that it uses."""
    return replace(model, vocab_size=vocab_size, tie_embeddings=False, first_stage=False, last_stage=False)


def finished(draft: DraftDescription, target: ModelDescription) -> DraftDescription:
    """Returns the draft as a part of the target: without ends of its own model, and with the vocabulary of its head."""
    names = draft.model.names
    unread = ["t2d"]
    unread += [] if draft.own_embedding else ["embed_tokens."]
    unread += [] if draft.head_size else ["lm_head."]
    model = replace(draft.model, names=replace(names, unread=(*names.unread, *unread)))
    return replace(draft, model=without_ends(model, draft.head_size or target.vocab_size))
