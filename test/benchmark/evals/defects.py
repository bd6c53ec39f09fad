"""Seeded defects: copies of a checkpoint with one thing wrong, which an evaluation must notice.

Each is what a faulty loader or kernel would do: it yields a model that still writes tokens.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Weights = dict[str, Tensor]
Defect = Callable[[Weights], None]

WEIGHTS_FILE = "model.safetensors"


def with_defect(source: Path, target: Path, defect: Defect) -> Path:
    """`target`, with the files of `source` and weights that `defect` has changed. Raises ValueError if it changed
    nothing: a test with such a copy would show nothing."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    weights = load_file(str(source / WEIGHTS_FILE))
    before = {name: w.clone() for name, w in weights.items()}
    defect(weights)
    if all(torch.equal(before[name], w) for name, w in weights.items()):
        raise ValueError("the defect leaves every weight as it was")
    save_file({n: w.contiguous() for n, w in weights.items()}, str(target / WEIGHTS_FILE), metadata={"format": "pt"})
    return target


def swap_experts(layer: int, first: int, second: int) -> Defect:
    """The router's choice of one runs the other."""

    def apply(weights: Weights) -> None:
        for part in ("gate_proj", "up_proj", "down_proj"):
            a, b = (f"model.layers.{layer}.mlp.experts.{e}.{part}.weight" for e in (first, second))
            weights[a], weights[b] = weights[b], weights[a]

    return apply


def scale_block(name: str, row: int, column: int, factor: float, size: int = 128) -> Defect:
    """One block of a block-scaled weight has a wrong scale. `row` and `column` count blocks."""

    def apply(weights: Weights) -> None:
        block = weights[name][row * size : (row + 1) * size, column * size : (column + 1) * size]
        block *= factor

    return apply


def transpose_square(name: str) -> Defect:
    """Rows for columns, which no shape check sees."""

    def apply(weights: Weights) -> None:
        if weights[name].shape[0] != weights[name].shape[1]:
            raise ValueError(f"{name} is not square: {tuple(weights[name].shape)}")
        weights[name] = weights[name].T.contiguous()

    return apply


def forget_norm(name: str) -> Defect:
    """A gain that was never loaded keeps its initial ones."""

    def apply(weights: Weights) -> None:
        weights[name] = torch.ones_like(weights[name])

    return apply
