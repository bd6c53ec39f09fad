"""The libraries that compile grammars, by their names in --grammar-backend."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from sglang.srt.constrained.grammar import Grammar, GrammarKey
from sglang.srt.constrained.llguidance_backend import LLGuidanceBackend
from sglang.srt.constrained.xgrammar_backend import XGrammarBackend

DEFAULT_BACKEND = "xgrammar"


class GrammarBackend(Protocol):
    """Compiles grammars with one library."""

    def import_library(self, torch: bool = True) -> None:
        """Imports the library. torch: False keeps torch out of the process for good."""

    def load(self) -> None:
        """Reads the vocabulary. Called before compile, from one thread at a time."""

    def compile(self, key: GrammarKey) -> Grammar:
        """Compiles a grammar that was verified. Raises GrammarError."""


def make_backend(name: str, vocabulary: Path, compile_threads: int = 1) -> GrammarBackend:
    """Returns the backend `name`. No library is imported before `import_library` or `load`."""
    if name == "llguidance":
        return LLGuidanceBackend(vocabulary)
    return XGrammarBackend(vocabulary, compile_threads)
