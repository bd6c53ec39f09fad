"""Runs tests in copies of the tree, each with one change."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutation.changes import ROOT, Change
from mutation.tests import Measured, batches

COPIED = ("python", "test", "benchmark", "scripts", "lab", "docs", "pyproject.toml", "README.md", "Makefile")
SLOWER = 6
"""Tests that take so many times as long as without a change, and a minute, do not end."""
MIN_S = 60.0
NO_TEST_RAN = 5
PLUGINS = ("mutation.recorder", "no:cacheprovider", "pytest_asyncio.plugin", "pytest_timeout")


def copy_tree(source: Path, target: Path) -> Path:
    """A tree whose files are hard links, or copies on another file system. Who writes a file there replaces it."""
    target.mkdir(parents=True)
    paths = [str(source / name) for name in COPIED]
    if subprocess.run(["cp", "-al", *paths, str(target)], stderr=subprocess.DEVNULL).returncode:
        subprocess.run(["cp", "-a", *paths, str(target)], check=True)
    return target


def compiled_tree(target: Path) -> Path:
    """A copy of this tree with the bytecode of its modules, for copies to share."""
    copy_tree(ROOT, target)
    words = [sys.executable, "-m", "compileall", "-q", "-j", "0", "python", "test"]
    subprocess.run(words, cwd=target, check=True, stdout=subprocess.DEVNULL)
    return target


class Clock:
    """The end of the whole run; what still runs then is killed and counts for nothing."""

    def __init__(self, limit_s: float) -> None:
        self.began, self.limit_s = time.monotonic(), limit_s

    def left_s(self) -> float:
        return max(0.0, self.began + self.limit_s - time.monotonic())


class OutOfTime(Exception):
    """The clock of the whole run is over."""


@dataclass(frozen=True)
class Session:
    """What came of one call of pytest."""

    status: int | None
    """None: it was killed at its limit."""
    seconds: float
    record: dict[str, Any]
    tail: str


def session(tree: Path, words: list[str], clock: Clock, limit_s: float, scratch: Path, **files: Any) -> Session:
    """`files`: contents of the recorder's variables. Raises OutOfTime at the end of the clock."""
    scratch.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(tree / "python"), str(tree / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "COVERAGE_CORE": "ctrace",
        "HF_HUB_OFFLINE": "1",
        "MUTATION_RECORD": str(scratch / "record.json"),
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # others that are installed take seconds to import
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(scratch),
        "TOKENIZERS_PARALLELISM": "false",
    }
    for variable, content in files.items():
        path = scratch / f"{variable}.json"
        path.write_text(json.dumps(content))
        environment[variable] = str(path) if variable != "MUTATION_SECONDS" else str(content)
    (scratch / "record.json").unlink(missing_ok=True)
    plugins = [word for plugin in PLUGINS for word in ("-p", plugin)]
    command = [sys.executable, "-m", "pytest", *plugins, "-q", "--tb=line"]
    began = time.monotonic()
    allowed_s = min(limit_s, clock.left_s())
    with (scratch / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, *words], cwd=tree, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            status: int | None = process.wait(allowed_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status is None and not clock.left_s():
        raise OutOfTime
    record = scratch / "record.json"
    return Session(
        status,
        time.monotonic() - began,
        json.loads(record.read_text()) if status is not None and record.exists() else {},
        (scratch / "log").read_text(errors="replace")[-2000:],
    )


@dataclass(frozen=True)
class Outcome:
    change: Change
    noticed_by: str
    """A node id; or what happened instead; "" if no test noticed it."""
    seconds: float
    tests: int
    """How many tests ran, or were about to."""

    @property
    def noticed(self) -> bool:
        return bool(self.noticed_by)


def run_batch(
    tree: Path, plain: Path, batch: list[str], measured: Measured, clock: Clock, scratch: Path
) -> tuple[str, int]:
    """What noticed the change of `tree`, and how many tests ran. A failed test counts if it passes in `plain`."""
    expected_s = sum(measured.seconds[test] for test in batch)
    limit_s = MIN_S + SLOWER * expected_s
    longest_s = max(measured.seconds[test] for test in batch)
    files = list(dict.fromkeys(test.partition("::")[0] for test in batch))
    words = ["-x", "-o", f"timeout={MIN_S + SLOWER * longest_s:.0f}", *files]
    whole = batch == files
    words += [f"--deselect={test}" for test in sorted(measured.failed) if whole and test.partition("::")[0] in files]
    only = {} if whole else {"MUTATION_ONLY": batch}
    result = session(tree, words, clock, limit_s, scratch, **only)
    ran = len(result.record.get("seconds", ()))
    if result.status is None:
        return "its tests do not end", ran
    if result.status in (0, NO_TEST_RAN):
        return "", ran
    failed = result.record.get("failed", [])
    if not failed:
        error = re.search(r"^E?R?R?O?R? *.*(?:Error|Exception).*$", result.tail, re.MULTILINE)
        return f"tests cannot be collected: {error.group(0).strip()[:120] if error else result.status}", ran
    if failed[0] in measured.failed:  # it was left out, and yet runs
        return "", ran
    again = session(plain, failed[:1], clock, limit_s, scratch, MUTATION_ONLY=failed[:1])
    if again.status == 0:
        return failed[0], ran
    measured.failed.add(failed[0])
    rest = [test for test in batch if test not in measured.failed]
    return run_batch(tree, plain, rest, measured, clock, scratch) if rest else ("", ran)


def try_out(change: Change, measured: Measured, plain: Path, folder: Path, clock: Clock) -> Outcome:
    """Raises OutOfTime."""
    began, tests, noticed_by = time.monotonic(), 0, ""
    tree = copy_tree(plain, folder / "tree")
    try:
        change.write(tree)
        for batch in batches(measured.tests_of(change), measured.seconds):
            noticed_by, ran = run_batch(tree, plain, batch, measured, clock, folder / "s")
            tests += ran
            if noticed_by:
                break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(change, noticed_by, time.monotonic() - began, tests)
