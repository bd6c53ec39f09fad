"""The names of the model classes that the installed transformers has, without importing it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

_TABLE = re.compile(r"^MODEL(?:_FOR)?(?:_(\w+))?_MAPPING_NAMES\b.*?^\)", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r'\(\s*"([\w.-]+)",\s*\(?((?:\s*"\w+",?)+)\s*\)?,?\s*\)')
_CAUSAL, _IMAGE_TEXT, _BASE = "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", None


@lru_cache(maxsize=1)
def _tables() -> Mapping[str | None, Mapping[str, tuple[str, ...]]]:
    """Returns the names of classes by model type, by what they do, read from the source of transformers' tables: to
    import them takes seconds. Empty where there are no such tables."""
    spec = importlib.util.find_spec("transformers")
    for place in () if spec is None else spec.submodule_search_locations or ():
        file = Path(place) / "models" / "auto" / "modeling_auto.py"
        if file.is_file():
            tables = _TABLE.finditer(file.read_text(encoding="utf-8"))
            return {table.group(1): _classes(table.group()) for table in tables}
    return {}


def _classes(table: str) -> dict[str, tuple[str, ...]]:
    return {kind: tuple(re.findall(r"\w+", names)) for kind, names in _ENTRY.findall(table)}


def _names(table: str | None) -> frozenset[str]:
    return frozenset(name for names in _tables().get(table, {}).values() for name in names)


def causal_classes() -> frozenset[str]:
    """Returns the names of the classes of causal language models."""
    return _names(_CAUSAL)


def image_text_classes() -> frozenset[str]:
    """Returns the names of the classes that generate text from images and text."""
    return _names(_IMAGE_TEXT)


def has_base_class(model_type: str) -> bool:
    """Returns whether there is a class without a head for this model type."""
    return model_type in _tables().get(_BASE, {})
