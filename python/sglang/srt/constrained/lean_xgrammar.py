"""Import of xgrammar without transformers, and in a process without tensors without torch.

The library's modules import both: a class of transformers' generation, tokenizers as transformers reads them, tensors
as masks. None of that is used here: vocabularies come as bytes (`vocabulary`), masks are numpy arrays. But transformers
takes 1.4 s of processor time and 30 MB, torch 1.7 s and 190 MB, and more with CUDA. While xgrammar is imported, empty
modules stand in for them and are then removed. This is done for tested versions only; any other version, and one that
fails to load this way, is imported as it is.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import sys
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

TESTED = "0.2."
"""Prefix of the tested versions."""


class _StandIn(ModuleType):
    """An empty module; each of its names is a class that takes any arguments."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


def import_xgrammar(torch: bool = True) -> None:
    """Imports xgrammar, so that a later `import xgrammar` takes no time. torch: False keeps torch out of the process
    for good."""
    if "xgrammar" in sys.modules:
        return
    if importlib.metadata.version("xgrammar").startswith(TESTED):
        unused = ("transformers",) if torch else ("transformers", "torch")
        try:
            with _without([name for name in unused if name not in sys.modules]):
                import xgrammar
        except Exception as error:  # whatever the library does with what it imports
            logger.debug("xgrammar is imported with all that it imports: %r", error)
            for name in [name for name in sys.modules if name.partition(".")[0] == "xgrammar"]:
                del sys.modules[name]
        else:
            if not torch:
                sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
            return
    import xgrammar  # noqa: F401


@contextlib.contextmanager
def _without(names: Collection[str]) -> Iterator[None]:
    try:
        if "torch" in names:
            sys.modules["torch"] = None  # type: ignore[assignment]
            with contextlib.suppress(ImportError):
                import tvm_ffi  # noqa: F401  # does without torch where it cannot be imported
        sys.modules.update({name: _StandIn(name) for name in names})
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
