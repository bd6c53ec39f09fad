"""Weights for small models in which rounding stays small, so that 16 bits tell a right layout from a wrong one.

The tiny models of the tests have weights of one spread, whatever their widths: branches outweigh the stream they are
added to, attention is nearly a choice, and experts and tokens are chosen by differences that rounding turns round. One
bit then becomes half a nat within four layers. `calm` gives each matrix a gain of about one. No branch adds to the
first dims of the stream, from which alone routers and indexers read. Routers read there which experts a token gets, so
that no two scores are near one another; an indexer's scores may be, but few roundings come before them.

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
KEPT = 64
"""Dims that no branch adds to."""
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
        keep(tensors, KEPT)
        route(tensors, experts, config.get("n_group", 1))
    select(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def keep(tensors: Tensors, dims: int) -> None:
    """The first dims of the stream stay what the embedding has there."""
    for name, tensor in tensors.items():
        if re.search(r"(o_proj|out_proj|down_proj)\.weight$", name):
            tensor[:dims] = 0
        elif re.search(r"\d\.(input|post_attention)_layernorm\.weight$", name):
            tensor[:dims] = tensor.mean().round()  # some add one to it


def select(tensors: Tensors) -> None:
    """Keys, weights and half of the latent of an indexer's queries are made of those dims alone."""
    for name in [name for name in tensors if name.endswith("indexer.wq_b.weight")]:
        layer = name.removesuffix("indexer.wq_b.weight")
        latent = tensors[f"{layer}q_a_proj.weight"]
        half = len(latent) // 2
        of_stream = (f"{layer}indexer.wk.weight", f"{layer}indexer.weights_proj.weight")
        for read, columns in (
            (latent[:half], KEPT),
            *((tensors[key], KEPT) for key in of_stream),
            (tensors[name], half),
        ):
            read *= (read.shape[1] / columns) ** 0.5
            read[:, columns:] = 0


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
        if name.endswith("mlp.gate.weight"):
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
