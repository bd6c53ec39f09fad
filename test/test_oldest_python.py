"""The oldest Python that the package may be installed with has every name that it imports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEWER: dict[str, set[str]] = {
    "asyncio": {"Runner", "TaskGroup", "timeout", "timeout_at"},
    "datetime": {"UTC"},
    "enum": {"EnumCheck", "ReprEnum", "StrEnum", "member", "nonmember", "property", "verify"},
    "itertools": {"batched"},
    "typing": {"LiteralString", "Never", "NotRequired", "Required", "Self", "TypeVarTuple", "Unpack", "assert_never",
               "assert_type", "dataclass_transform", "override", "reveal_type"},
}  # fmt: skip
"""Names that came with Python 3.11 or 3.12, by their modules."""
EXCEPTIONS = ("BaseExceptionGroup", "ExceptionGroup")
WITH_A_SUBSTITUTE = {"configs/storage_backend.py": "tomllib"}


def may_use_them(source: str) -> bool:
    """Returns whether the text has a newer name and its module; others need not be parsed."""
    words = set(re.findall(r"\w+", source))
    modules = any(module in words and not names.isdisjoint(words) for module, names in NEWER.items())
    return modules or not words.isdisjoint({"tomllib", *EXCEPTIONS}) or "except*" in source.replace(" ", "")


def problems(tree: ast.Module) -> list[str]:
    """Returns what Python 3.10 does not have, but for imports that only type checkers see."""
    for_checkers = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in for_checkers:
            continue
        if isinstance(node, ast.ImportFrom) and node.module in NEWER:
            found += [alias.name for alias in node.names if alias.name in NEWER[node.module]]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name == "tomllib"]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [node.attr] if node.attr in NEWER.get(node.value.id, ()) else []
        elif isinstance(node, ast.Name) and node.id in EXCEPTIONS:
            found.append(node.id)
        elif isinstance(node, getattr(ast, "TryStar", ())):
            found.append("except*")
    return found


def test_names_of_newer_pythons_are_not_imported() -> None:
    assert 'requires-python = ">=3.10' in (ROOT / "pyproject.toml").read_text()
    wrong = []
    for path in (ROOT / "python" / "sglang").rglob("*.py"):
        name = path.relative_to(ROOT / "python" / "sglang").as_posix()
        name = re.sub("^srt/", "", name)
        source = path.read_text()
        if may_use_them(source):
            wrong += [f"{name}: {what}" for what in problems(ast.parse(source)) if WITH_A_SUBSTITUTE.get(name) != what]
    assert not wrong


def test_such_a_name_is_found() -> None:
    for source, name in (
        ("from typing import Any, Self", "Self"),
        ("async def f():\n    async with asyncio.timeout(1): pass", "timeout"),
        ("import tomllib", "tomllib"),
        ("raise ExceptionGroup('', [])", "ExceptionGroup"),
        ("import enum\n@enum.verify\nclass A: ...", "verify"),
    ):
        assert problems(ast.parse(source)) == [name] and may_use_them(source)
    assert problems(ast.parse("if TYPE_CHECKING:\n    from typing import Self")) == []
