"""Compares what PEFT repeats of the base model beside adapters of the embedding and of the output head with the model's
own weights: rows of it that were trained, or added, would be lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from safetensors import safe_open

from sglang.srt.configs.adapters.config import EMBEDDINGS
from sglang.srt.configs.adapters.files import FLOATS, AdapterFiles
from sglang.srt.errors import UserError
from sglang.srt.model_loader.checkpoint import Checkpoint, find_checkpoint
from sglang.srt.plan.weight_names import WeightMap

ROWS = 4096
"""Rows that are compared at once."""
ROUNDING, LEAST = 2.0**-7, 1e-6
"""What may differ, of the value and at all: the adapter may have been trained on the weights in another type."""


def refuse_changed_bases(files: AdapterFiles, model_path: str, names: WeightMap, tied: bool) -> None:
    """Raises UserError if an adapter brings other weights of the base model than the model has. Compares those that
    the model's safetensors have as floats. names: of the model's tensors; tied: the head's are the embedding's."""
    if not files.bases:
        return
    wanted = {module: _name_of(module, names, tied) for module in files.bases}
    with ExitStack() as stack, safe_open(files.weights, "pt") as file:  # type: ignore[no-untyped-call]
        stored = dict(_stored(model_path, names, stack))
        for module, name in files.bases.items():
            ours, theirs = stored.get(wanted[module]), file.get_slice(name)
            if ours is not None and not _equal(ours, theirs):
                raise UserError(
                    f"{files.folder}: {name} differs from the model's: its rows were trained or added, or the adapter"
                    " was made for another model. Whole modules are not replaced; merge the adapter into the model."
                )


def _name_of(module: str, names: WeightMap, tied: bool) -> str:
    is_embedding = tied or module.endswith(EMBEDDINGS)
    return names.model["embed" if is_embedding else "lm_head"] + ".weight"


def _stored(model_path: str, names: WeightMap, stack: ExitStack) -> Iterator[tuple[str, Any]]:
    """Yields the embedding and the output head of a model in safetensors, by their usual names."""
    wanted = {names.model[end] + ".weight" for end in ("embed", "lm_head")}
    try:
        checkpoint = find_checkpoint(model_path)
    except UserError:  # random weights need no files
        return
    promised: Mapping[Any, Any] = checkpoint.files if isinstance(checkpoint, Checkpoint) else {}
    for path, listed in promised.items():
        if listed is not None and not any(names.canonical(name) in wanted for name in listed):
            continue
        opened = stack.enter_context(safe_open(path, "pt"))  # type: ignore[no-untyped-call]
        for name in opened.keys() if listed is None else listed:
            if names.canonical(name) in wanted:
                yield names.canonical(name), opened.get_slice(name)


def _equal(ours: Any, theirs: Any) -> bool:
    """Returns whether two slices of safetensors are equal but for roundings; True where the model's are no floats, and
    for the rows that only the model's checkpoint has."""
    if ours.get_dtype() not in FLOATS:
        return True
    rows, columns = theirs.get_shape()
    if ours.get_shape()[0] < rows or ours.get_shape()[1] != columns:
        return False
    for begin in range(0, rows, ROWS):
        part = slice(begin, min(begin + ROWS, rows))
        mine, other = (each[part].to(torch.float32) for each in (ours, theirs))
        if ((mine - other).abs() > ROUNDING * mine.abs() + LEAST).any():
            return False
    return True
