"""Our own files for the target tree, imported here: checks and tests run the very code that is written there."""

from __future__ import annotations

import importlib
import sys
import types

from upstream.change import FILES

_PACKAGE = "sglang.srt.sm120"


def own(name: str) -> types.ModuleType:
    """The module files/`name`.py, under the name that it has in the target."""
    if _PACKAGE not in sys.modules:
        package = types.ModuleType(_PACKAGE)
        package.__path__ = [str(FILES)]
        sys.modules[_PACKAGE] = package
    return importlib.import_module(f"{_PACKAGE}.{name}")
