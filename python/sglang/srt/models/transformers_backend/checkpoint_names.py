"""What the tensors of a model class are called in published checkpoints, from transformers' own table."""

from __future__ import annotations

import re
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightRenaming

_EXPERT = re.compile(r"(?:\\?\.)?(?P<stem>[\w.\\]+?)\.\*\.(?P<part>\w+)\.weight")


def _transforms(model: Any) -> list[Any]:
    return [each for each in get_model_conversion_mapping(model, add_legacy=False) if each.scope_prefix is None]


def renamings(model: Any) -> tuple[tuple[str, str], ...]:
    """Returns (pattern, replacement) of names in checkpoints, to be applied one after the other."""
    return tuple(
        _placed(source, target, each.scope_prefix, model.base_model_prefix)
        for each in get_model_conversion_mapping(model, add_legacy=False)
        if isinstance(each, WeightRenaming)
        for source, target in zip(each.source_patterns, each.target_patterns * len(each.source_patterns), strict=False)
    )


def _placed(source: str, target: str, scope: str | None, base: str) -> tuple[str, str]:
    """Returns the pattern and replacement for whole names. scope: the part of the model that they are for, below
    `base`; None: they are for whole names."""
    if scope is None:
        return source, target
    inside = re.escape(f"{scope}.") if scope else ""
    behind = re.sub(r"\\(\d)", lambda group: f"\\{int(group[1]) + 1}", target)
    return rf"^((?:{re.escape(base)}\.)?{inside}){source.removeprefix('^')}", rf"\1{behind}"


def joins_tensors(model: Any) -> bool:
    """Returns whether checkpoints store several tensors of the class as one, other than those of experts."""
    return any(
        isinstance(each, WeightConverter) and not isinstance(each.operations[0], MergeModulelist)
        for each in _transforms(model)
    )


def experts_of(model: Any) -> dict[str, tuple[str, ...]]:
    """Returns the parts (gate, up, down) under which checkpoints store each expert by itself, by the end of the name of
    the module that has them all; empty where they store all experts in one tensor."""
    by_stem: dict[str, dict[str, str]] = {}
    for each in _transforms(model):
        if not isinstance(each, WeightConverter) or not isinstance(each.operations[0], MergeModulelist):
            continue
        parts = [match for source in each.source_patterns if (match := _EXPERT.fullmatch(source))]
        stem = parts[0].group("stem").replace("\\", "").strip(".") if parts else ""
        names = [match.group("part") for match in parts]
        roles = ("gate", "up") if len(names) == 2 else ("down",)
        by_stem.setdefault(stem, {}).update(zip(roles, names, strict=False))
    return {
        stem: (parts["gate"], parts["up"], parts["down"])
        for stem, parts in by_stem.items()
        if parts.keys() == {"gate", "up", "down"}
    }
