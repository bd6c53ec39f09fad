"""The trained weights under their published names, and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny_model.model import Layer, TinyModel

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "router": "mlp.gate",
}
WEIGHTS_FILE = "model.safetensors"


def named_weights(model: TinyModel) -> Iterator[tuple[str, Tensor]]:
    """Published name -> the parameter, or the part of it, that has this name."""
    yield "model.embed_tokens.weight", model.embedding
    yield "model.norm.weight", model.norm
    for index, layer in enumerate(model.layers):
        yield from layer_weights(layer, f"model.layers.{index}.")


def layer_weights(layer: Layer, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """As `named_weights`, of one layer, whose names begin with `prefix`."""
    for name, parameter in layer.named_parameters():
        if name in LAYER_NAMES:
            yield f"{prefix}{LAYER_NAMES[name]}.weight", parameter
            continue
        for expert, part in enumerate(parameter):
            owner = f"mlp.experts.{expert}" if layer.num_experts else "mlp"
            yield f"{prefix}{owner}.{name}_proj.weight", part


def save_weights(model: TinyModel, directory: Path) -> None:
    weights = {name: w.detach().to("cpu", torch.bfloat16).contiguous().clone() for name, w in named_weights(model)}
    save_file(weights, str(directory / WEIGHTS_FILE), metadata={"format": "pt"})
    (directory / WEIGHTS_FILE).chmod(0o644)


@torch.no_grad()
def load_weights(model: TinyModel, directory: Path) -> None:
    """Raises ValueError if the checkpoint is of another model."""
    weights = load_file(str(directory / WEIGHTS_FILE))
    for name, parameter in named_weights(model):
        found = weights.pop(name, None)
        if found is None or found.shape != parameter.shape:
            raise ValueError(f"{directory / WEIGHTS_FILE}: {name} is missing or has another shape")
        parameter.copy_(found)
    if weights:
        raise ValueError(f"{directory / WEIGHTS_FILE}: unknown weights: {', '.join(sorted(weights)[:5])}")
