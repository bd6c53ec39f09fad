"""A tree of Python sources: where symbols are defined, parsed modules, and edits staged until all are known good."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import libcst as cst

_DEFINITION = re.compile(rb"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)
_SEARCHED = ("srt", "kernels", "jit_kernel")
"""Where seams live. `multimodal_gen`, tests and benchmarks define functions of the same names."""


class Tree:
    """The package `sglang/` below `package_parent`. Paths are relative to `package_parent`, with slashes.

    `stage` keeps a new text in memory, where `text` and `module` see it; `commit` accepts what is staged, `discard`
    forgets it. What is accepted is written to disk, or, with `write=False`, kept in memory as well.
    """

    def __init__(self, package_parent: Path, *, write: bool = True) -> None:
        self.package_parent = package_parent
        self.write = write
        self.staged: dict[str, str] = {}
        self._accepted: dict[str, str] = {}
        self._modules: dict[str, tuple[str, cst.Module]] = {}

    def exists(self, path: str) -> bool:
        return path in self.staged or path in self._accepted or (self.package_parent / path).is_file()

    def text(self, path: str) -> str:
        for memory in (self.staged, self._accepted):
            if path in memory:
                return memory[path]
        return (self.package_parent / path).read_bytes().decode("utf-8")

    def module(self, path: str) -> cst.Module:
        text = self.text(path)
        known = self._modules.get(path)
        if known is None or known[0] != text:
            known = self._modules[path] = (text, cst.parse_module(text))
        return known[1]

    def stage(self, path: str, text: str) -> None:
        self.staged[path] = text

    def commit(self) -> None:
        for path, text in self.staged.items():
            if not self.write:
                self._accepted[path] = text
                continue
            target = self.package_parent / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text.encode("utf-8"))
        self.staged.clear()

    def discard(self) -> None:
        self.staged.clear()

    def python_files(self) -> Iterator[str]:
        package = self.package_parent / "sglang"
        for part in _SEARCHED:
            for path in sorted((package / part).rglob("*.py")):
                yield path.relative_to(self.package_parent).as_posix()

    @cached_property
    def _definitions(self) -> dict[str, list[str]]:
        """Name of a function or class -> the pristine files that define it."""
        found: dict[str, list[str]] = {}
        for path in self.python_files():
            for match in set(_DEFINITION.findall((self.package_parent / path).read_bytes())):
                found.setdefault(match.decode(), []).append(path)
        return found

    def files_defining(self, name: str) -> list[str]:
        return self._definitions.get(name, [])

    def nearest(self, name: str, count: int = 3) -> list[str]:
        """Definitions whose names resemble `name`, as `name (path)`, best first."""
        close = difflib.get_close_matches(name, list(self._definitions), n=count, cutoff=0.6)
        return [f"{candidate} ({self._definitions[candidate][0]})" for candidate in close]
