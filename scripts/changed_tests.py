"""Prints the files of tests that changes since BASE can break, one a line; nothing where all tests have to run.

    make test-changed BASE=main
    python scripts/changed_tests.py --base main
    python scripts/changed_tests.py --record --jobs 3  # an hour on two cores; it goes on where it was interrupted

A change is what differs between the files here and the commit that BASE and HEAD have in common; files that git does
not know, and does not ignore, are new ones. What was chosen, and why, is said on the standard error stream.

--record runs every file of tests, each in processes of its own, writes which files of the tree their functions run in
and which they read, and so renews scripts/impact/record.json.gz. Tests that fail then are left out of the record.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from impact import record
from impact.imports import Imports
from impact.recording import PASSED, record_all, test_files
from impact.selection import Change, Selection, Selector, outside_functions

ROOT = Path(__file__).parents[1]


def git(*words: str, root: Path = ROOT) -> str:
    """Raises subprocess.CalledProcessError."""
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout


def changes_since(base: str, root: Path = ROOT) -> list[Change]:
    common = git("merge-base", base, "HEAD", root=root).strip()
    paths = git("diff", "--name-only", "--no-renames", "-z", common, root=root).split("\0")
    paths += git("ls-files", "--others", "--exclude-standard", "-z", root=root).split("\0")
    return [Change(path, only_in_functions(path, common, root)) for path in sorted({*paths} - {""})]


def only_in_functions(path: str, common: str, root: Path) -> bool:
    """Whether a module is there before and after, and all that differs is in bodies of functions."""
    if not path.endswith(".py") or not (root / path).exists():
        return False
    try:
        before = git("show", f"{common}:{path}", root=root)
        return outside_functions(before) == outside_functions((root / path).read_text())
    except (subprocess.CalledProcessError, SyntaxError):
        return False


def summary(changes: list[Change], selection: Selection, selector: Selector) -> str:
    if selection.everything:
        return f"All tests run: {selection.everything}."
    left = len(selection.files & selector.unknown)
    minutes = selector.seconds(selection.files) / 60
    return (
        f"{len(changes)} changed files can break {len(selection.files)} of {len(selector.tests)} files of tests, "
        f"{minutes:.0f} minutes of one processor; {left} of these are chosen by their imports, for want of a record."
    )


def renew(jobs: int, kept: Path) -> None:
    known = record_all(test_files(ROOT), kept, jobs)
    passed = {file: taken for file, taken in known.items() if taken["status"] in PASSED}
    tests = {
        file: record.Known(record.digest(ROOT / file), taken["seconds"], frozenset(taken["touched"]))
        for file, taken in passed.items()
    }
    record.write(record.Record(tests, frozenset().union(*(taken["at_import"] for taken in passed.values()))))
    print(f"{len(passed)} of {len(known)} files of tests are in {record.FILE.relative_to(ROOT)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="a branch, tag or commit")
    parser.add_argument("--record", action="store_true", help="run all tests and renew the record")
    parser.add_argument("--jobs", type=int, default=1, help="files of tests at once, for --record")
    parser.add_argument("--kept", type=Path, default=ROOT / "build/impact", help="what --record found so far")
    args = parser.parse_args()
    if args.record:
        renew(args.jobs, args.kept)
        return 0
    if not args.base:
        parser.error("--base is missing: name what the change is compared with, such as main")
    try:
        changes = changes_since(args.base)
    except subprocess.CalledProcessError as error:
        parser.error(f"--base {args.base}: {error.stderr.strip()}. Fetch it, or name a commit that is here")
    selector = Selector(ROOT, record.read(), Imports(ROOT))
    selection = selector.choose(changes)
    print(summary(changes, selection, selector), file=sys.stderr)
    if not selection.everything:
        print("\n".join(sorted(selection.files)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
