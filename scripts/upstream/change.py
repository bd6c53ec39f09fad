"""The type of a change, and its outcomes."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path

from upstream.served_files import SERVED, served_text
from upstream.toolbox import Moved
from upstream.tree import Tree

FILES = Path(__file__).parent / "files"
PACKAGE = "sglang/srt/sm120"
"""Where our own files go in the target."""


class Outcome(enum.Enum):
    APPLIED = "applied"
    ALREADY_UPSTREAM = "already upstream"
    ALREADY_APPLIED = "already applied"
    NOT_APPLICABLE = "not applicable"
    MOVED = "moved"
    FAILED = "failed check"

    @property
    def needs_work(self) -> bool:
        return self in (Outcome.MOVED, Outcome.FAILED)


@dataclass(frozen=True, slots=True)
class Result:
    """`detail`: the reason for anything but APPLIED. `changed`: paths below the package's parent directory."""

    change: Change
    outcome: Outcome
    detail: str = ""
    changed: tuple[str, ...] = field(default=())


class NotApplicable(Exception):
    """The release has no such feature."""


class AlreadyUpstream(Exception):
    """The release does by itself what the change is for."""


class FailedCheck(Exception):
    """The tree does not behave as the change promises."""


class Change:
    """One seam. Subclasses say what for, where and how; `apply` sees to it that all of it happens or nothing.

    name        short and stable: the marker in changed files and the key of the status table
    title, why  subject and body of the commit
    merged      how to see that upstream has done this
    files       our own files that the change needs: below files/, or in `served_files`
    """

    name: str
    title: str
    why: str
    merged: str
    files: tuple[str, ...] = ()

    def transform(self, tree: Tree) -> None:
        """Stages every edit. Raises NotApplicable, AlreadyUpstream or Moved."""
        raise NotImplementedError

    def check(self, tree: Tree) -> None:
        """Raises FailedCheck unless the tree, with what is staged, behaves as promised; needs no GPU."""
        raise NotImplementedError

    def marker(self) -> str:
        return f"# Modified for SM120 ({self.name}): see NOTICE.sm120."


def apply(change: Change, tree: Tree, marked: dict[str, list[str]]) -> Result:
    """Applies a change to the tree on disk, completely or not at all.

    `marked`: name of a change -> files that carry its marker already.
    """
    if before := marked.get(change.name):
        return _checked(change, tree, Result(change, Outcome.ALREADY_APPLIED, "its marker is there", tuple(before)))
    try:
        change.transform(tree)
        for path in tree.staged:
            tree.stage(path, mark(tree.text(path), change.marker()))
        for name in ("__init__.py", *change.files):
            _stage_own_file(tree, name)
        for path, text in tree.staged.items():
            compile(text, path, "exec")
        result = _checked(change, tree, Result(change, Outcome.APPLIED, changed=tuple(sorted(tree.staged))))
    except NotApplicable as reason:
        result = Result(change, Outcome.NOT_APPLICABLE, str(reason))
    except AlreadyUpstream as reason:
        result = Result(change, Outcome.ALREADY_UPSTREAM, str(reason))
    except Moved as reason:
        result = Result(change, Outcome.MOVED, str(reason))
    except SyntaxError as reason:
        result = Result(change, Outcome.FAILED, f"the result is not Python: {reason}")
    except Exception as error:  # changes run parts of the release to see what it does
        found = f"the symbol is there but no longer works as expected: {type(error).__name__}: {error}"
        result = Result(change, Outcome.MOVED, found)
    if result.outcome is Outcome.APPLIED:
        tree.commit()
    tree.discard()
    return result


def _checked(change: Change, tree: Tree, result: Result) -> Result:
    try:
        change.check(tree)
    except (FailedCheck, Moved) as reason:
        return Result(change, Outcome.FAILED, str(reason))
    except Exception as error:  # what is checked is foreign code
        return Result(change, Outcome.FAILED, f"the check raised {type(error).__name__}: {error}")
    return result


def own_text(name: str) -> str:
    """Returns the text of one of our own files."""
    module = name.removesuffix(".py")
    return served_text(module) if module in SERVED else (FILES / name).read_text(encoding="utf-8")


def _stage_own_file(tree: Tree, name: str) -> None:
    """Ours may already be there, from another change; anything else in its place is not overwritten."""
    path, text = f"{PACKAGE}/{name}", own_text(name)
    if not tree.exists(path):
        tree.stage(path, text)
    elif tree.text(path) != text:
        raise Moved(f"{path} exists in the release with other contents")


def mark(text: str, marker: str) -> str:
    """Puts the marker into the comments that open a file, below a shebang and an encoding line."""
    lines = text.splitlines(keepends=True)
    start = 0
    while start < min(2, len(lines)) and (
        lines[start].startswith("#!") or "coding" in lines[start].split("#")[-1][:12]
    ):
        start += 1
    return "".join([*lines[:start], marker + "\n", *lines[start:]])


def markers(tree: Tree) -> dict[str, list[str]]:
    """Name of a change -> the files that carry its marker."""
    found: dict[str, list[str]] = {}
    prefix, suffix = "# Modified for SM120 (", "): see NOTICE.sm120."
    for path in tree.python_files():
        with (tree.package_parent / path).open(encoding="utf-8", errors="replace") as file:
            for _, line in zip(range(40), file, strict=False):
                line = line.rstrip("\n")
                if line.startswith(prefix) and line.endswith(suffix):
                    found.setdefault(line[len(prefix) : -len(suffix)], []).append(path)
    return found
