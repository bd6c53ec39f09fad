"""Writes down in which files of the tree the functions of this process run, and which files it reads.

IMPACT_TOUCHED names a folder. Each process appends paths, below the root of the tree, to a file of its own there, as
soon as it meets them: a process may be killed at any time. Functions that run while modules are imported are apart,
since an import runs a part of nearly every module: their paths come behind AT_IMPORT.

Modules are compiled with one more statement at the beginning of each function. A trace function would cost as much as
most tests do. `site/sitecustomize.py` starts this in every Python process whose PYTHONPATH has its folder.
"""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import marshal
import os
import sys
import threading
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VARIABLE = "IMPACT_TOUCHED"
BYTECODE_VARIABLE = "IMPACT_BYTECODE"
"""A folder for the compiled modules, which processes share."""
FOLDERS = tuple(
    os.path.join(ROOT, name) + os.sep for name in ("python", "test", "docs", "benchmark", "scripts", "docker", "lab")
)
STATEMENT = "if {path!r} in _impact_untouched: _impact_touch({path!r})"
AT_IMPORT = "import "
IMPORT_SYSTEM = "<frozen importlib._bootstrap>"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def importing() -> bool:
    """Whether this is called while a module is imported."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != IMPORT_SYSTEM:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


class Touched:
    """What this process, and those it was forked from, have met."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.untouched: set[str] = set()
        """Modules none of whose functions ran yet, but while something was imported."""
        self.imported: set[str] = set()
        """Modules whose functions ran then."""
        self.read: set[str] = set()

    def write(self, path: str, before: str = "") -> None:
        descriptor = os.open(os.path.join(self.folder, str(os.getpid())), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, f"{before}{os.path.relpath(path, ROOT)}\n".encode())
        finally:
            os.close(descriptor)

    def touch(self, path: str) -> None:
        if not importing():
            self.untouched.discard(path)
            self.write(path)
        elif path not in self.imported:
            self.imported.add(path)
            self.write(path, AT_IMPORT)

    def on_event(self, event: str, args: tuple[Any, ...]) -> None:
        """An audit hook. Imported modules come as bytecode, so a source that is opened is read, or run as a script."""
        if event not in ("open", "cpython.run_file") or not isinstance(args[0], str) or args[0] in self.read:
            return
        if event == "open" and isinstance(args[1], str) and not args[1].startswith("r"):
            return
        self.read.add(args[0])
        path = os.path.abspath(args[0])
        if path.startswith(FOLDERS) and "__pycache__" not in path and not importing():
            self.write(path)


def compiled(path: str) -> CodeType:
    """A module's code, in which each function begins with STATEMENT."""
    with open(path, "rb") as file:
        tree = ast.parse(file.read(), path)
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            (added,) = ast.parse(STATEMENT.format(path=path)).body
            for inner in ast.walk(added):
                ast.copy_location(inner, node.body[0])
            node.body.insert(1 if ast.get_docstring(node, clean=False) is not None else 0, added)
    return compile(tree, path, "exec", dont_inherit=True)


def kept(path: str) -> CodeType:
    """As `compiled`, from the folder of bytecode where it is there."""
    key = hashlib.sha256(f"{path} {os.stat(path).st_mtime_ns} {sys.version}".encode()).hexdigest()[:24]
    stored = os.path.join(os.environ[BYTECODE_VARIABLE], key)
    if os.path.exists(stored):
        with open(stored, "rb") as file:
            code: CodeType = marshal.load(file)
        return code
    code = compiled(path)
    with open(f"{stored}.{os.getpid()}.{threading.get_ident()}", "wb") as file:
        marshal.dump(code, file)
    os.replace(file.name, stored)
    return code


@functools.cache
def start() -> None:
    """Does nothing where the variable names no folder."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    touched = Touched(folder)
    get_code = SourceFileLoader.get_code

    def traced_code(self: SourceFileLoader, name: str) -> CodeType | None:
        path = os.path.abspath(self.get_filename(name))
        if not path.startswith(FOLDERS):
            return get_code(self, name)
        touched.untouched.add(path)
        if not importing():  # it is run as a script
            touched.write(path)
        return kept(path)

    builtins._impact_untouched = touched.untouched  # type: ignore[attr-defined]
    builtins._impact_touch = touched.touch  # type: ignore[attr-defined]
    SourceFileLoader.get_code = traced_code  # type: ignore[method-assign,assignment]
    sys.addaudithook(touched.on_event)
