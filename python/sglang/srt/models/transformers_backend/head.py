"""The logits of a model class, computed by its own code from the output of its decoder."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast


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


class Given:
    """Computes logits of given decoder outputs with the class's own code: its scales, biases and caps of logits."""

    def __init__(self, model: Any, decoder: Any) -> None:
        """Takes the decoder out of the model."""
        places = [
            (parent, name) for parent in model.modules() for name, child in parent.named_children() if child is decoder
        ]
        for parent, name in places:
            setattr(parent, name, _Identity())
        self._model, self._decoder = model, decoder

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits [R, V] of hidden [R, C]."""
        logits: torch.Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0]
