"""Which Python files of the tree import which, as their texts say."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOTS = ("python", "test", "scripts")
"""Folders from which names are imported."""
FOLDERS = (*ROOTS, "benchmark", "lab")


@functools.cache
def module_file(name: str, root: Path) -> str | None:
    """The file of a module of the tree, by its dotted name; of a package its `__init__.py`."""
    for folder in ROOTS:
        base = Path(folder, *name.split("."))
        for path in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
            if (root / path).is_file():
                return str(path)
    return None


def names_in(tree: ast.AST, package: str) -> Iterator[str]:
    """The dotted names that may be modules: those imported, and texts that name one, as a process is started by it.
    package: of the file, which relative imports start from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("sglang"):
            if node.value.replace(".", "").isidentifier():
                yield node.value


def imported_files(path: str, root: Path) -> set[str]:
    """Those that importing the file imports directly, with the packages that they are in."""
    place = Path(path)
    tree = ast.parse((root / place).read_bytes(), path)
    found: set[str] = set()
    for name in names_in(tree, ".".join(place.parts[1:-1])):
        parts = name.split(".")
        found |= {file for i in range(len(parts)) if (file := module_file(".".join(parts[: i + 1]), root))}
    if place.parts[0] == "test":
        conftests = (str(folder / "conftest.py") for folder in place.parents)
        found |= {file for file in conftests if (root / file).is_file()}
    return found - {path}


class Imports:
    """The graph of imports of a tree."""

    def __init__(self, root: Path) -> None:
        files = [str(path.relative_to(root)) for folder in FOLDERS for path in (root / folder).rglob("*.py")]
        self.imported = {file: imported_files(file, root) for file in files}
        self.importers: dict[str, set[str]] = defaultdict(set)
        for file, imported in self.imported.items():
            for other in imported:
                self.importers[other].add(file)

    def all_importers(self, files: Iterable[str]) -> set[str]:
        """The files, and those that import them, directly or not."""
        found, waiting = set(files), list(files)
        while waiting:
            new = self.importers.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found
