"""Weights for small models in which rounding stays small, so that 16 bits tell a right layout from a wrong one.

The tiny models of the tests have weights of one spread, whatever their widths: branches outweigh the stream they are
added to, attention is nearly a choice, and experts and tokens are chosen by differences that rounding turns round. One
bit then becomes half a nat within four layers. `calm` gives each matrix a gain of about one. Which experts a token gets
is written in its embedding, in dims that no branch adds to and from which alone the routers read, so that no two scores
are near one another.

`FAULTS` are what a layout that is wrong would compute, as changes of the weights: one server shows what they change.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

Tensors = dict[str, torch.Tensor]
GAINS = {r"(o_proj|out_proj)\.weight$": 2.0, r"lm_head\.weight$": 2.0}
"""Of matrices that do not have one: attention averages over many tokens, and logits need a spread."""
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
FROM, UPTO = -2.0, 2.0
"""Of the scores of experts, evenly apart."""
LAYER = 1
"""Where faults are."""


def read(folder: Path) -> tuple[Tensors, dict[str, int]]:
    config = json.loads((folder / "config.json").read_text())
    return safetensors.torch.load_file(folder / "model.safetensors"), config


def calm(folder: Path) -> None:
    """Changes the weights of a model of test/srt/models/harness.py that is saved there."""
    tensors, config = read(folder)
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            gain = next((gain for pattern, gain in GAINS.items() if re.search(pattern, name)), 1.0)
            fan_in = 1 if name.endswith("embed_tokens.weight") else tensor[0].numel()
            tensors[name] = tensor * (gain * fan_in**-0.5 / tensor.std())
    if experts := next((config[key] for key in NUM_EXPERTS if key in config), 0):
        route(tensors, experts, config.get("n_group", 1))
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def route(tensors: Tensors, experts: int, groups: int) -> None:
    """Gives each token an order of experts, in which those of a group are neighbours, in the first dims of the
    stream."""
    generator = torch.Generator().manual_seed(5)
    (embedding,) = (tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    scores = torch.linspace(UPTO, FROM, experts)
    for row in embedding:
        order = torch.randperm(groups, generator=generator)[:, None] * (experts // groups)
        inside = torch.stack([torch.randperm(experts // groups, generator=generator) for _ in range(groups)])
        row[(order + inside).flatten()] = scores
    for name, tensor in tensors.items():
        if re.search(r"(o_proj|out_proj|down_proj)\.weight$", name):
            tensor[:experts] = 0
        elif re.search(r"\d\.(input|post_attention)_layernorm\.weight$", name):
            tensor[:experts] = tensor.mean().round()  # some add one to it
        elif name.endswith("mlp.gate.weight"):
            tensor.zero_()[:, :experts] = torch.eye(experts)
        elif name.endswith("e_score_correction_bias"):
            tensor *= 0.1


def _attention_output(tensors: Tensors) -> torch.Tensor:
    pattern = rf"\.layers\.{LAYER}\.\w+\.(o_proj|out_proj)\.weight$"
    (output,) = (tensor for name, tensor in tensors.items() if re.search(pattern, name))
    return output


def leave_out_a_summand(tensors: Tensors) -> None:
    """Of the sum behind the attention of one layer, that of one of four ranks."""
    output = _attention_output(tensors)
    output[:, -output.shape[1] // 4 :] = 0


def rotate_heads(tensors: Tensors) -> None:
    """In one layer the outputs of one of four ranks' heads arrive in another order."""
    output = _attention_output(tensors)
    quarter = output.shape[1] // 4
    output[:, :quarter] = output[:, :quarter].roll(quarter // 4, dims=1)


def swap_experts(tensors: Tensors) -> None:
    """In one layer two of the experts have one another's weights."""
    for name in [name for name in tensors if re.search(rf"\.layers\.{LAYER}\.mlp\.experts\.0\.", name)]:
        other = name.replace(".experts.0.", ".experts.1.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


FAULTS: dict[str, Callable[[Tensors], None]] = {
    "a summand of one layer left out": leave_out_a_summand,
    "heads of one rank in one layer rotated": rotate_heads,
    "two experts of one layer swapped": swap_experts,
}


def save_with(fault: str, folder: Path, target: Path) -> Path:
    """A copy of the model in `folder`, with a fault."""
    if not target.exists():
        shutil.copytree(folder, target)
        tensors, _ = read(folder)
        FAULTS[fault](tensors)
        safetensors.torch.save_file(
            {name: tensor.clone() for name, tensor in tensors.items()}, target / "model.safetensors"
        )
    return target


def with_other_tokens(prompt: list[int]) -> list[int]:
    """The prompt in which every fourth token is the fourth one before: a cache of which one of four ranks has the
    entries at wrong places. The last token stays, whose stream answers."""
    return [prompt[i - 4] if i % 4 == 2 and 4 <= i < len(prompt) - 1 else token for i, token in enumerate(prompt)]
