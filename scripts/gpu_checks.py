"""Everything that needs a GPU: the tests marked `gpu`, with this GPU's own choices and with those of SM120.

    python scripts/gpu_checks.py [--jobs 14] [--log-dir DIR] [--only moe]

Most of the time is compilation on the host, so --jobs processes share the tests. Prints a row for each file and exits
with 1 if any test failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FORCED = ("", "sm_120")
"""The values of SGLANG_FORCE_ARCH; empty: it is not set."""
TEST_LIMIT_S = 900
"""A test that compiles waits for a core."""

Counts = dict[str, Counter[str]]
"""File -> "passed", "skipped", "failed" -> tests."""


def files(only: str) -> list[Path]:
    """Test files that have a GPU part."""
    marks = ("mark.gpu", "kernel_test")
    found = sorted((ROOT / "test").rglob("test_*.py"))
    return [path for path in found if only in str(path) and any(mark in path.read_text() for mark in marks)]


def execute(arch: str, paths: list[Path], jobs: int, log_dir: Path) -> Counts | None:
    """None if pytest did not get so far as to run tests."""
    # One thread each: what tests compute on the host would otherwise take all cores in every process.
    env = os.environ | {"OMP_NUM_THREADS": "1"} | ({"SGLANG_FORCE_ARCH": arch} if arch else {})
    name = arch or "own"
    report = log_dir / f"{name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--dist", "worksteal"]
    command += ["-n", str(jobs), "--timeout", str(TEST_LIMIT_S), f"--junitxml={report}", *map(str, paths)]
    with (log_dir / f"{name}.log").open("w") as log:
        subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
    return read_report(report) if report.exists() else None


def read_report(report: Path) -> Counts:
    """The results in pytest's JUnit report, by file."""
    counts: Counts = defaultdict(Counter)
    for case in ET.parse(report).iter("testcase"):
        # The class name is the dotted path of the file; of a file that cannot be imported, the name is.
        path = case.get("classname") or case.get("name", "")
        bad = case.find("failure") is not None or case.find("error") is not None
        counts[path]["failed" if bad else "skipped" if case.find("skipped") is not None else "passed"] += 1
    return counts


def rows(arch: str, counts: Counts) -> list[str]:
    found = []
    for path, count in sorted(counts.items()):
        word = "FAILED" if count["failed"] else "ok" if count["passed"] else "skipped"
        summary = ", ".join(f"{number} {outcome}" for outcome, number in sorted(count.items()))
        found.append(f"{word:<7} {path:<60} {arch or 'own choices':<12} {summary}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--log-dir", type=Path, default=ROOT / ".gpu_checks")
    parser.add_argument("--only", default="", help="files whose path contains this")
    args = parser.parse_args()
    args.log_dir.mkdir(parents=True, exist_ok=True)
    paths, jobs = files(args.only), max(1, args.jobs // len(FORCED))
    with ThreadPoolExecutor(len(FORCED)) as pool:
        results = list(pool.map(lambda arch: execute(arch, paths, jobs, args.log_dir), FORCED))
    passed = failed = 0
    for arch, counts in zip(FORCED, results, strict=True):
        if counts is None:
            print(f"FAILED  nothing ran ({arch or 'own choices'})")
            failed += 1
            continue
        print("\n".join(rows(arch, counts)))
        passed += sum(count["passed"] for count in counts.values())
        failed += sum(count["failed"] for count in counts.values())
    print(f"{passed} passed, {failed} failed; logs in {args.log_dir}")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
