"""Chooses the files of tests that a change can break.

A file of tests is chosen if the record says that it runs a function of a changed module, or reads a changed file. The
record is older than the change, so more are chosen:

- those that import a changed module themselves;
- where a module changed outside of its functions, or its functions run while others are imported, or no recorded test
  runs it: those that run or import a module which imports it;
- those that the record does not have, or that changed since: if they import a changed module, however indirectly.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path, PurePath

from impact.imports import Imports
from impact.record import Record, digest

CORE = (
    "test/http/test_openai_api.py",
    "test/srt/managers/test_scheduler.py",
    "test/srt/test_server_args.py",
    "test/test_cli.py",
    "test/test_embedded_model.py",
    "test/test_import.py",
    "test/test_names.py",
)
"""Run for every change: a server answers, the package is imported, names and flags are as they should be."""
OF_DOCUMENTS = "test/docs/"
"""Tests of every document."""
CODE = ("python", "scripts", "benchmark")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Change:
    """A file that was changed, added or removed."""

    path: str
    only_in_functions: bool = False


@dataclass(frozen=True)
class Selection:
    files: frozenset[str]
    everything: str = ""
    """Why all tests run; "": only those of `files`."""


def outside_functions(source: str) -> str:
    """What a module is without the bodies of its functions: a text to compare."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            node.body = []
    return ast.dump(tree)


def is_test(path: str) -> bool:
    place = PurePath(path)
    return place.parts[0] == "test" and place.suffix == ".py" and place.name.startswith("test_")


def is_document(path: str) -> bool:
    return path.endswith(".md") and (path.startswith("docs/") or "/" not in path)


class Selector:
    def __init__(self, root: Path, record: Record, imports: Imports) -> None:
        self.known, self.at_import, self.imports = record.tests, record.at_import, imports
        self.tests = {path for path in imports.imported if is_test(path)}
        self.unknown = {
            path for path in self.tests if path not in self.known or digest(root / path) != self.known[path].digest
        }

    def choose(self, changes: list[Change]) -> Selection:
        chosen = self.tests & set(CORE)
        for change in changes:
            more = self._broken_by(change)
            if not more:
                return Selection(frozenset(), f"it is not known which tests {change.path} can break")
            chosen |= more
        return Selection(frozenset(chosen))

    def _broken_by(self, change: Change) -> set[str]:
        """Empty: that is not known."""
        path = change.path
        if is_document(path):
            return self._touching({path}) | {test for test in self.tests if test.startswith(OF_DOCUMENTS)}
        place = PurePath(path)
        if place.suffix != ".py" or place.name == "conftest.py":
            return set()
        if place.parts[0] == "test":
            helped = self.imports.all_importers([path]) & self.tests | self._touching({path})
            return helped or self._core_for_removed(path)
        return self._broken_by_code(change) if place.parts[0] in CODE else set()

    def _core_for_removed(self, path: str) -> set[str]:
        """For a file of tests that is no more, what runs anyway."""
        return self.tests & set(CORE) if is_test(path) else set()

    def _broken_by_code(self, change: Change) -> set[str]:
        running, importers = self._touching({change.path}), self.imports.importers.get(change.path, set())
        chosen = running | (importers & self.tests)
        if not change.only_in_functions or not running or change.path in self.at_import:
            chosen |= self._touching(importers)
            chosen |= {test for module in importers for test in self.imports.importers.get(module, ())} & self.tests
        return chosen | (self.imports.all_importers([change.path]) & self.unknown)

    def _touching(self, paths: set[str]) -> set[str]:
        return {test for test in self.tests & self.known.keys() if self.known[test].touched & paths}

    def seconds(self, files: frozenset[str]) -> float:
        """Of processors, as far as is recorded."""
        return sum(self.known[file].seconds for file in files if file in self.known)
