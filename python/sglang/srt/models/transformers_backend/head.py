"""The logits of a model class, or a classifier's scores of labels, computed by its own code from hidden states."""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling, MoeModelOutputWithPast

from sglang.srt.configs.sentence_modules import FIRST, LAST, MEAN


def decoder_of(model: Any) -> Any:
    """Returns the decoder of a causal model: what is below the output head."""
    decoder = model.get_decoder()
    # A class may call something else so: that of ModernBERT is its output head.
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model


class _Output(MoeModelOutputWithPast):
    """An output of a decoder with the last hidden states alone."""

    def __getattr__(self, name: str) -> None:
        """Returns None for what other kinds of outputs have."""
        if name.startswith("__"):
            raise AttributeError(name)


class _Identity(torch.nn.Module):
    """Stands for a decoder, and returns the embeddings that it is given."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _Output:
        given: Any = inputs_embeds
        return _Output(last_hidden_state=given)


def _replace(model: Any, part: Any, other: torch.nn.Module) -> None:
    """Puts another module in the place of a part of a model."""
    places = [(parent, name) for parent in model.modules() for name, child in parent.named_children() if child is part]
    for parent, name in places:
        setattr(parent, name, other)


class Given:
    """Computes logits of given decoder outputs with the class's own code: its scales, biases and caps of logits."""

    def __init__(self, model: Any, decoder: Any) -> None:
        """Takes the decoder out of the model."""
        _replace(model, decoder, _Identity())
        self._model, self._decoder = model, decoder

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits [R, V] of hidden [R, C]."""
        logits: torch.Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0]


class _PooledOutput(BaseModelOutputWithPooling):
    """As `_Output`, with what the pooler of a class makes of the hidden states."""

    def __getattr__(self, name: str) -> None:
        """Returns None for what other kinds of outputs have."""
        if name.startswith("__"):
            raise AttributeError(name)


class _Pooler(torch.nn.Module):
    """Stands for a model without a head, and returns the states that it is given, as its pooler would."""

    def __init__(self, pooler: torch.nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _PooledOutput:
        given: Any = inputs_embeds
        pooled: Any = None if self.pooler is None else self.pooler(inputs_embeds)
        return _PooledOutput(last_hidden_state=given, pooler_output=pooled)


class Classifier:
    """Computes scores of labels of given hidden states with the class's own code: its head, and its pooler."""

    def __init__(self, model: Any) -> None:
        """Takes the base out of the model."""
        self.base = model.base_model
        _replace(model, self.base, _Pooler(getattr(self.base, "pooler", None)))
        text = model.config.get_text_config()
        if text.pad_token_id is None:  # nothing is padded, but classes ask
            text.pad_token_id = 0
        self._model = model

    def scores(self, states: torch.Tensor) -> torch.Tensor:
        """Returns [P, labels] of states [P, N, C], from which the class takes what it takes of a text."""
        scores: torch.Tensor = self._model(inputs_embeds=states).logits
        return scores

    def method(self) -> str:
        """Returns which states of a text the class takes, found by what changes its scores; "" if it is neither the
        first, nor the last, nor the mean of all. The model has no weights and gets random ones for it, in a copy."""
        generator = torch.Generator().manual_seed(0)
        tried = copy(self)
        tried._model = deepcopy(self._model).float().to_empty(device="cpu")
        for tensor in (*tried._model.parameters(), *tried._model.buffers()):
            tensor.data = torch.randn(tensor.shape, generator=generator) * max(1, tensor.shape[-1]) ** -0.5
        states = torch.randn((1, 3, self._model.config.get_text_config().hidden_size), generator=generator)
        scores = tried.scores(states)
        others = [states.index_fill(1, torch.tensor([token]), 0.0) for token in range(3)]
        read = [token for token, other in enumerate(others) if not torch.allclose(tried.scores(other), scores)]
        if read == [0, 1, 2] and torch.allclose(tried.scores(states.mean(1, keepdim=True)), scores, atol=1e-5):
            return MEAN
        if read == [0]:
            return FIRST
        return LAST if read == [2] else ""
