"""A plan as named values, by which ranks compare their plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from fractions import Fraction
from math import isfinite
from pathlib import Path
from typing import Any

from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.kernels.spec import Choice
from sglang.srt.kernels.tile_configs import OpTileConfigs
from sglang.srt.plan.plan import Plan

Scalar = bool | int | float | str | None
Items = dict[str, Scalar]

OF_STAGE = ("weights", "description", "caches", "draft")
"""Fields of a plan that differ between stages; all others are the same on every rank."""
NOT_COMPARED = ("warnings", "errors")
"""Fields with texts for the user, which may name files of a machine."""
OF_MACHINE = ("model_path",)
"""Fields of the model's config in which machines may differ."""


def plan_items(plan: Plan) -> tuple[Items, Items]:
    """Returns (values that must be equal on all ranks, values that must be equal on the ranks of a stage), by dotted
    names such as "choices.decode_attention.kernel"."""
    names = [field.name for field in fields(plan) if field.name not in (*OF_STAGE, *NOT_COMPARED)]
    values = {name: getattr(plan, name) for name in names} | {
        "model": {f.name: getattr(plan.model, f.name) for f in fields(plan.model) if f.name not in OF_MACHINE},
        "choices": {op: _launched(choice) for op, choice in plan.choices.items()},
        "tile_configs": {op: _tile_configs(cut) for op, cut in plan.tile_configs.items()},
    }
    return dict(flat(values)), dict(flat({name: getattr(plan, name) for name in OF_STAGE}))


def _launched(choice: Choice) -> dict[str, Any]:
    """Returns what a launch depends on, without the reasons."""
    tiles = [] if choice.tile is None else [choice.tile, *choice.smaller_tiles]
    return {"kernel": choice.name, "entry": choice.spec.entry, "tiles": list(map(tile_key, tiles))}


def _tile_configs(cut: OpTileConfigs) -> list[dict[str, Any]]:
    return [{name: value for name, value in tile_config.items() if name != "why"} for tile_config in cut.to_json()]


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Scalar]]:
    """Yields the values of dataclasses, mappings and sequences by dotted names that are the same in every process. A
    set, or a sequence of plain values, becomes one text. Raises TypeError for a value whose text may differ between
    processes."""
    if isinstance(value, Enum):
        yield name, value.name
    elif value is None or isinstance(value, bool | int | str):
        yield name, value
    elif isinstance(value, float):
        yield name, value if isfinite(value) else str(value)
    elif isinstance(value, Fraction):
        yield name, str(value)
    elif isinstance(value, Path):
        yield name, value.name  # directories are the machine's
    elif isinstance(value, Set):
        yield name, ", ".join(sorted(map(str, value)))
    elif is_dataclass(value):
        yield name, type(value).__name__
        for field in fields(value):
            yield from flat(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from flat(value[key], f"{name}.{key}" if name else str(key))
    elif isinstance(value, Sequence) and all(isinstance(each, bool | int | str) for each in value):
        yield name, ", ".join(map(str, value))
    elif isinstance(value, Sequence):
        for i, each in enumerate(value):
            yield from flat(each, f"{name}.{i}")
    elif isinstance(value, Callable):  # type: ignore[arg-type]
        yield name, f"{value.__module__}.{value.__qualname__}"
    else:
        raise TypeError(f"{name}: a {type(value).__name__} has no text that is the same in every process")
