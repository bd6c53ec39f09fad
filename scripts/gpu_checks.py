"""Everything that needs a GPU: the tests marked `gpu`, with this GPU's own choices and with those of SM120.

    python scripts/gpu_checks.py [--jobs 8] [--log-dir DIR] [--only attention]

Each test file runs in a process of its own, --jobs at a time: most of the time is compilation on the host. Prints a row
for each and exits with 1 if any failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FORCED = ("", "sm_120")
"""What SGLANG_FORCE_ARCH is set to; empty: not at all."""
COUNTS = re.compile(r"\d+ (?:passed|failed|errors?|skipped)")


@dataclass(frozen=True, slots=True)
class Run:
    """One file under one architecture's choices."""

    path: Path
    arch: str

    @property
    def name(self) -> str:
        return f"{self.path.relative_to(ROOT / 'test')} ({self.arch or 'own choices'})"


@dataclass(frozen=True, slots=True)
class Outcome:
    word: str  # "ok", "skipped" (all of it: another number of GPUs, say) or "FAILED"
    summary: str
    seconds: float


def files(only: str) -> list[Path]:
    """Test files that have a GPU part."""
    marks = ("mark.gpu", "kernel_test")
    found = sorted((ROOT / "test").rglob("test_*.py"))
    return [path for path in found if only in str(path) and any(mark in path.read_text() for mark in marks)]


def execute(run: Run, log_dir: Path) -> Outcome:
    env = os.environ | {"SGLANG_FORCE_ARCH": run.arch} if run.arch else dict(os.environ)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", str(run.path)]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    log = log_dir / f"{run.path.stem}-{run.arch or 'own'}.log"
    log.write_text(done.stdout + done.stderr)
    counts = COUNTS.findall(done.stdout)
    word = "FAILED" if done.returncode else "ok" if any("passed" in count for count in counts) else "skipped"
    return Outcome(word, ", ".join(counts) or f"exit status {done.returncode}, see {log}", seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--log-dir", type=Path, default=ROOT / ".gpu_checks")
    parser.add_argument("--only", default="", help="files whose path contains this")
    args = parser.parse_args()
    args.log_dir.mkdir(parents=True, exist_ok=True)
    runs = [Run(path, arch) for path in files(args.only) for arch in FORCED]
    with ThreadPoolExecutor(args.jobs) as pool:
        outcomes = list(pool.map(lambda run: execute(run, args.log_dir), runs))
    for run, outcome in zip(runs, outcomes, strict=True):
        print(f"{outcome.word:<7} {run.name:<70} {outcome.summary:<30} {outcome.seconds:6.1f} s")
    words = [outcome.word for outcome in outcomes]
    print(
        ", ".join(f"{words.count(word)} {word}" for word in ("ok", "skipped", "FAILED")) + f"; logs in {args.log_dir}"
    )
    return 0 if "ok" in words and "FAILED" not in words else 1


if __name__ == "__main__":
    sys.exit(main())
