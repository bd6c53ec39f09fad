"""The names of the causal model classes that the installed transformers has, without importing it."""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache
from pathlib import Path

_TABLE = re.compile(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES\b.*?^\)", re.MULTILINE | re.DOTALL)


@lru_cache(maxsize=1)
def causal_classes() -> frozenset[str]:
    """Returns the names of the classes, read from the source of transformers' table: to import it takes seconds. Empty
    where there is no such table."""
    spec = importlib.util.find_spec("transformers")
    for place in () if spec is None else spec.submodule_search_locations or ():
        file = Path(place) / "models" / "auto" / "modeling_auto.py"
        table = _TABLE.search(file.read_text(encoding="utf-8")) if file.is_file() else None
        if table is not None:
            return frozenset(re.findall(r'"(\w+)"', table.group()))
    return frozenset()
