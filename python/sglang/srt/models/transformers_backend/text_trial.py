"""Finds the facts of a class that generates no text: one without a head, for embeddings, or a classifier."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from sglang.srt.models.transformers_backend.calls import Calls
from sglang.srt.models.transformers_backend.checkpoint_names import joins_tensors, renamings
from sglang.srt.models.transformers_backend.head import Classifier
from sglang.srt.models.transformers_backend.reading import Reading, Refused, run
from sglang.srt.plan.transformers_backend.facts import CLASSIFY, ClassFacts, TextFacts

_OLD_NORMS = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
"""What the first checkpoints of BERT call the weights of norms."""


def read_text_class(name: str, model: Any, calls: Calls, task: str) -> ClassFacts:
    """Runs the class without weights, and returns its facts. Raises Refused for what is not computed here."""
    base = model.base_model
    parameters = inspect.signature(base.forward).parameters
    if "position_ids" not in parameters:
        raise Refused("its class takes no positions, so that texts cannot be computed side by side")
    if getattr(model.config, "trigram_input", False):
        raise Refused("its embeddings read the tokens beside them, which may belong to another text")
    if joins_tensors(model):
        raise Refused("its checkpoints store queries, keys and values as one tensor, which is not taken apart here")
    hidden = run(base)
    reading = Reading(model, calls, generates=False)
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, torch.nn.Embedding) or embedding.embedding_dim != hidden.shape[-1]:
        raise Refused("its embedding is no plain one, or has rows of another width than its output")
    at_embedding = reading.names[id(embedding)]
    has_segments = "token_type_ids" in parameters and getattr(model.config, "type_vocab_size", 0) > 1
    text = TextFacts(first_position=_first_position(base), has_segments=has_segments)
    layers = tuple(map(reading.layer, range(len(calls.attention))))
    parts = {path.partition(".")[0] for path, _ in (*model.named_parameters(), *model.named_buffers())}
    if task == CLASSIFY:
        head = Classifier(model)
        scores = head.scores(hidden[:, :1])
        method = head.method() if scores.dim() == 2 and len(scores) == 1 else ""
        if not method:
            raise Refused("its head takes neither the first nor the last state of a text nor their mean")
        text = TextFacts(text.first_position, text.has_segments, method, scores.shape[1])
    return ClassFacts(
        name,
        hidden_size=hidden.shape[-1],
        vocab_size=embedding.num_embeddings,
        layers_at=reading.layers_at,
        layers=layers,
        embedding=at_embedding,
        tensors=tuple(fact for fact in reading.outside if fact.name.rpartition(".")[0] != at_embedding),
        renamings=(*_OLD_NORMS, *renamings(model)),
        ignored=(*(model._keys_to_ignore_on_load_unexpected or ()), r"position_ids$", r"(^|\.)pooler\."),
        beginning="" if model is not base or base.base_model_prefix in parts else f"{base.base_model_prefix}.",
        parts=tuple(sorted(parts)),
        text=text,
    )


def _first_position(base: Any) -> int:
    """Returns what a class calls the position of the first token: RoBERTa and its like count from behind the padding
    token's id."""
    for module in base.modules():
        count = getattr(module, "create_position_ids_from_input_ids", None)
        if count is not None:
            return int(count(torch.tensor([[module.padding_idx + 1]]), module.padding_idx)[0, 0])
    return 0
