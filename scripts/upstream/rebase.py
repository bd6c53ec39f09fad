"""A pristine upstream tree -> the same tree as a git repository, with our changes as commits on a branch.

The same input gives the same bytes and the same commit hashes: authors and dates are fixed, and nothing depends on the
machine. The branch's first commit is the pristine tree.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from upstream.change import Change, Outcome, Result, apply, markers
from upstream.source import Source
from upstream.tree import Tree

BRANCH = "sm120"
NOTICE = "NOTICE.sm120"
_IDENTITY = "sm120-sglang"
_DATE = "2026-01-01T00:00:00+0000"
_SETTINGS = ("core.autocrlf=false", "core.compression=1", "commit.gpgsign=false", "gc.auto=0", "core.quotepath=false")


class RebaseError(Exception):
    """The tree cannot be written; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Rebased:
    """`stat`: git's list of the files that differ from the pristine tree."""

    package_parent: Path
    results: tuple[Result, ...]
    stat: str

    @property
    def exit_code(self) -> int:
        return int(any(result.outcome.needs_work for result in self.results))


def rebase(source: Source, out: Path, changes: Sequence[type[Change]]) -> Rebased:
    """Writes the tree to `out`, which must not exist or be empty. Raises RebaseError."""
    if out.exists() and any(out.iterdir()):
        raise RebaseError(f"{out} is not empty; name a directory that does not exist yet.")
    if out.resolve().is_relative_to(source.root.resolve()):
        raise RebaseError(f"{out} lies inside {source.root}; name a directory elsewhere.")
    ignored = shutil.ignore_patterns(".git", "__pycache__", "*.pyc")
    shutil.copytree(source.root, out, symlinks=True, ignore=ignored, dirs_exist_ok=True)
    _git(out, "init", "--quiet", "--template=", f"--initial-branch={BRANCH}")
    pristine = _commit(out, "SGLang as released")

    tree = Tree(out / source.package_parent.relative_to(source.root))
    marked = markers(tree)
    results: list[Result] = []
    for change in changes:
        result = apply(change(), tree, marked)
        results.append(result)
        if result.outcome is Outcome.APPLIED:
            (out / NOTICE).write_text(notice(results), encoding="utf-8")
            _commit(out, message(result.change))
    _require_untouched(out, pristine, tree, results)
    return Rebased(tree.package_parent, tuple(results), _git(out, "diff", "--stat=120", pristine, "HEAD"))


def probe(source: Source, changes: Sequence[type[Change]]) -> tuple[Result, ...]:
    """Report what `rebase` would do, without writing anything."""
    tree = Tree(source.package_parent, write=False)
    marked = markers(tree)
    return tuple(apply(change(), tree, marked) for change in changes)


def message(change: Change) -> str:
    parts = (change.why, f"Done upstream when: {change.merged}.")
    return "\n\n".join([change.title, *(textwrap.fill(part, 76) for part in parts)]) + f"\n\nChange: {change.name}\n"


def notice(results: Sequence[Result]) -> str:
    """The notice of the changes, as the Apache License asks; upstream's own notices stay where they are."""
    lines = [
        "This tree is SGLang (https://github.com/sgl-project/sglang), licensed under the Apache License, Version 2.0,",
        "changed for SM120 and SM121 GPUs by the sm120-sglang project, under the same license. Upstream's license and",
        "copyright notices are unchanged. Every changed file says so in its first lines; new files are in srt/sm120/.",
        "",
    ]
    for result in results:
        if result.outcome in (Outcome.APPLIED, Outcome.ALREADY_APPLIED):
            lines += [f"{result.change.name}: {result.change.title}", *(f"    {path}" for path in result.changed)]
    return "\n".join(lines) + "\n"


def _require_untouched(out: Path, pristine: str, tree: Tree, results: Sequence[Result]) -> None:
    """Whatever git finds different must have been announced by a change."""
    prefix = tree.package_parent.relative_to(out).as_posix()
    prefix = "" if prefix == "." else prefix + "/"
    announced = {NOTICE} | {prefix + path for result in results for path in result.changed}
    changed = set(_git(out, "diff", "--name-only", pristine, "HEAD").splitlines())
    if stray := sorted(changed - announced):
        raise RebaseError(f"Files changed that no change announced: {', '.join(stray)}. This is a defect of a change.")


def _commit(out: Path, text: str) -> str:
    _git(out, "add", "--all", "--force", ".")
    _git(out, "commit", "--quiet", "--allow-empty", "--no-verify", "--message", text)
    return _git(out, "rev-parse", "HEAD").strip()


def _git(out: Path, *arguments: str) -> str:
    settings = [part for setting in _SETTINGS for part in ("-c", setting)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    for role in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{role}_NAME": _IDENTITY, f"GIT_{role}_EMAIL": f"{_IDENTITY}@localhost"}
        environment[f"GIT_{role}_DATE"] = _DATE
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    done = subprocess.run(["git", *settings, *arguments], cwd=out, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise RebaseError(f"git {arguments[0]} failed in {out}: {done.stderr.strip()}")
    return done.stdout
