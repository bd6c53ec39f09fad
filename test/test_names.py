"""Names that a reader cannot search for stay out: what was found, held or made says nothing of what it is."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Set
from pathlib import Path

import pytest
from retired_names import RETIRED

import sglang

ROOT = Path(sglang.__file__).parent
WORD = re.compile(r"\w+")
VAGUE = {"found", "held", "own", "made"}
KERNELS = {"kernels_few.py", "sampling.py", "select_entries.py"}
"""Locals of Triton kernels there: another name would be another kernel on record."""


def sources_with(names: Set[str]) -> Iterator[tuple[Path, str]]:
    """Yields path and text of the modules that have one of these words anywhere; the others need not be parsed."""
    for path in ROOT.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if not names.isdisjoint(WORD.findall(source)):
            yield path, source


def vague_names(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names & VAGUE


@pytest.mark.parametrize("source", ["found = 1", "def f(own): ...", "x.held", "def made(): ..."])
def test_each_kind_of_name_is_seen(source: str) -> None:
    assert vague_names(source)


def test_names_say_what_a_thing_is() -> None:
    assert len([*ROOT.rglob("*.py")]) > 300
    vague = {
        str(path.relative_to(ROOT)): names
        for path, source in sources_with(VAGUE)
        if path.name not in KERNELS and (names := vague_names(source))
    }
    assert not vague


def identifiers(source: str) -> set[str]:
    """Returns all names of a module, but for those inside Triton kernels: another name is another kernel on record."""
    tree = ast.parse(source)
    kernels = [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list)
    ]
    return {
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.NAME and not any(token.start[0] in lines for lines in kernels)
    }


def test_identifiers_are_seen() -> None:
    assert identifiers("class Band:\n    most: int\n") >= {"Band", "most"}
    assert "inside" not in identifiers("@triton.jit\ndef kernel(inside):\n    pass\n")


def test_retired_names_do_not_come_back() -> None:
    back = {
        str(path.relative_to(ROOT)): {name: RETIRED[name] for name in names}
        for path, source in sources_with(RETIRED.keys())
        if (names := identifiers(source) & RETIRED.keys())
    }
    assert not back, "use the term that replaced the name (docs/glossary.md)"


def test_no_retired_name_replaces_another() -> None:
    assert not {old: new for old, new in RETIRED.items() if new in RETIRED}
