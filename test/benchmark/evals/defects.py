"""Seeded defects: copies of a checkpoint with one thing wrong, which an evaluation must notice.

Each is what a faulty loader or kernel would do: it yields a model that still writes tokens.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Weights = dict[str, Tensor]
Config = dict[str, Any]
Defect = Callable[[Weights, Config], None]

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"


def with_defect(source: Path, target: Path, defect: Defect) -> Path:
    """`target`, with the files of `source` and weights or a configuration that `defect` has changed. Raises ValueError
    if it changed nothing: a test with such a copy would show nothing."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    weights = load_file(str(source / WEIGHTS_FILE))
    config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    before, config_before = {name: w.clone() for name, w in weights.items()}, dict(config)
    defect(weights, config)
    if config == config_before and all(torch.equal(before[name], w) for name, w in weights.items()):
        raise ValueError("the defect leaves everything as it was")
    save_file({n: w.contiguous() for n, w in weights.items()}, str(target / WEIGHTS_FILE), metadata={"format": "pt"})
    (target / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    return target


def swap_experts(layer: int, first: int, second: int) -> Defect:
    """The router's choice of one runs the other."""

    def apply(weights: Weights, _: Config) -> None:
        for part in ("gate_proj", "up_proj", "down_proj"):
            a, b = (f"model.layers.{layer}.mlp.experts.{e}.{part}.weight" for e in (first, second))
            weights[a], weights[b] = weights[b], weights[a]

    return apply


def scale_block(name: str, row: int, column: int, factor: float, size: int = 128) -> Defect:
    """One block of a block-scaled weight has a wrong scale. `row` and `column` count blocks."""

    def apply(weights: Weights, _: Config) -> None:
        block = weights[name][row * size : (row + 1) * size, column * size : (column + 1) * size]
        block *= factor

    return apply


def transpose_square(name: str) -> Defect:
    """Rows for columns, which no shape check sees."""

    def apply(weights: Weights, _: Config) -> None:
        if weights[name].shape[0] != weights[name].shape[1]:
            raise ValueError(f"{name} is not square: {tuple(weights[name].shape)}")
        weights[name] = weights[name].T.contiguous()

    return apply


def forget_norm(name: str) -> Defect:
    """A gain that was never loaded keeps its initial ones."""

    def apply(weights: Weights, _: Config) -> None:
        weights[name] = torch.ones_like(weights[name])

    return apply


def configure(key: str, value: Any) -> Defect:
    """The server reads another number than training used."""

    def apply(_: Weights, config: Config) -> None:
        if key not in config:
            raise ValueError(f"config.json has no {key}")
        config[key] = value

    return apply


def _layer(number: int, rest: str) -> str:
    return f"model.layers.{number}.{rest}.weight"


CATALOG: dict[str, Defect] = {
    "two experts change places": swap_experts(3, 1, 5),
    "a block of the queries has twice its scale": scale_block(_layer(2, "self_attn.q_proj"), 0, 1, 2.0),
    "a block of the keys has twice its scale": scale_block(_layer(0, "self_attn.k_proj"), 0, 1, 2.0),
    "a block of the values has twice its scale": scale_block(_layer(4, "self_attn.v_proj"), 0, 1, 2.0),
    "a block of the output projection is 10% off": scale_block(_layer(2, "self_attn.o_proj"), 0, 1, 1.1),
    "a block of a dense MLP has twice its scale": scale_block(_layer(0, "mlp.down_proj"), 0, 0, 2.0),
    "an expert of eight has twice its scale": scale_block(_layer(4, "mlp.experts.3.down_proj"), 0, 0, 2.0),
    "rows for columns": transpose_square(_layer(3, "self_attn.o_proj")),
    "a norm before attention is not applied": forget_norm(_layer(5, "input_layernorm")),
    "the queries' norm is not applied": forget_norm(_layer(3, "self_attn.q_norm")),
    "one expert a token instead of two": configure("num_experts_per_tok", 1),
    "three experts a token instead of two": configure("num_experts_per_tok", 3),
    "positions turn 1% slower": configure("rope_theta", 10100.0),
    "epsilon of the norms is ten times too large": configure("rms_norm_eps", 1e-5),
}
"""What a faulty loader, kernel or plan does, by what it is."""
