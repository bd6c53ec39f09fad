"""Names that a reader cannot search for stay out: what was found, held or made says nothing of what it is."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest
from retired_names import RETIRED

import sglang

ROOT = Path(sglang.__file__).parent
VAGUE = {"found", "held", "own", "made"}
KERNELS = {"kernels_few.py", "sampling.py", "select_entries.py"}
"""Locals of Triton kernels there: another name would be another kernel on record."""


def vague_names(source: str) -> set[str]:
    tree = ast.parse(source)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return names & VAGUE


@pytest.mark.parametrize("source", ["found = 1", "def f(own): ...", "x.held", "def made(): ..."])
def test_each_kind_of_name_is_seen(source: str) -> None:
    assert vague_names(source)


def test_names_say_what_a_thing_is() -> None:
    files = [path for path in ROOT.rglob("*.py") if path.name not in KERNELS]
    assert len(files) > 300
    assert {str(path.relative_to(ROOT)): vague_names(path.read_text(encoding="utf-8")) for path in files} == {
        str(path.relative_to(ROOT)): set() for path in files
    }


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
        for path in ROOT.rglob("*.py")
        if (names := identifiers(path.read_text(encoding="utf-8")) & RETIRED.keys())
    }
    assert not back, "use the term that replaced the name (docs/glossary.md)"


def test_no_retired_name_replaces_another() -> None:
    assert not {old: new for old, new in RETIRED.items() if new in RETIRED}
