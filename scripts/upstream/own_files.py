"""Our own files for the target tree, imported here: checks and tests run the very code that is written there."""

from __future__ import annotations

import importlib
import sys
import types

from upstream.change import FILES
from upstream.served_files import SERVED, served_module

_PACKAGE = "sglang.srt.sm120"


def own(name: str) -> types.ModuleType:
    """The module files/`name`.py, under the name that it has in the target, where those of the server are, too."""
    if _PACKAGE not in sys.modules:
        package = types.ModuleType(_PACKAGE)
        package.__path__ = [str(FILES)]
        sys.modules[_PACKAGE] = package
        for served in SERVED:
            sys.modules[f"{_PACKAGE}.{served}"] = served_module(served)
    return importlib.import_module(f"{_PACKAGE}.{name}")
