"""Runs the kernels' tests with Triton's code for SM120 executed on this CPU, instruction by instruction. No GPU.

    python scripts/execute_kernels.py                       # every file of kernel tests; an hour or more of one core
    python scripts/execute_kernels.py test/srt/layers/test_gemv.py
    python scripts/execute_kernels.py --page                # writes docs/executed.md of the record

Prints which tests failed, and adds to `python/sglang/ledger/executed.json` what was executed in tests that passed:
launches of each kernel, and the ledger's rows that cover them. Each test compares with the reference of its op. What
the largest launch of each row asked of a card's units goes to `executed_counts.json` beside it (`sglang.explain
--why-slow OP` shows it).
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "scripts")]

import first_cases  # noqa: E402

from sglang.ledger.ptx.record import NOTES, RECORD  # noqa: E402
from sglang.ledger.why_slow import COUNTS  # noqa: E402

MARK = "interpreter.kernel_test"
ENDED_EARLY = 2
"""pytest's status if a plugin ended it; a test that failed before gives 1."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files of kernel tests, or how their paths begin; none: all")
    parser.add_argument("-k", dest="chosen", default="", help="only these tests, as pytest has it; nothing is recorded")
    parser.add_argument("--limit", type=int, default=3600, help="seconds for a file; then no further test begins")
    parser.add_argument("--page", action="store_true", help="only write the page")
    args = parser.parse_args(argv)
    if args.page:
        import executed_page

        executed_page.write()
        return 0
    known = kernel_tests()
    files = [file for file in known if file.startswith(tuple(args.files))] if args.files else known
    if strangers := [name for name in args.files if not any(file.startswith(name) for file in known)]:
        parser.error(f"no files of kernel tests: {', '.join(strangers)}")
    failed = [file for file in files if not run(file, args.chosen, args.limit)]
    print("\n".join(["failed:", *failed]) if failed else "all passed")
    return 1 if failed else 0


def kernel_tests() -> list[str]:
    """Returns the files with tests of kernels, by their path in the repository."""
    files = sorted(file for folder in ("sgl_kernel", "srt") for file in (ROOT / "test" / folder).rglob("test_*.py"))
    files += sorted((ROOT / "test" / "ledger" / "rows").glob("rows_of_*.py"))
    return [file.relative_to(ROOT).as_posix() for file in files if MARK in file.read_text()]


def run(file: str, chosen: str, limit: int) -> bool:
    """Runs one file and records it. Returns whether its tests passed."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        environment = os.environ | {
            "SGLANG_EXECUTE_PTX": "sm_120", NOTES: str(notes), "TRITON_DEFAULT_FP_FUSION": "1",
            "PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'scripts'}", first_cases.SECONDS: str(limit),
        }  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:randomly", "-p", "first_cases"]
        command += ["-x", "-rf", "--tb=short", "-m", "not thorough", *(["-k", chosen] if chosen else []), file]
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        lines = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    whole, passed = status == 0, status in (0, ENDED_EARLY)
    if not chosen:
        record(file, lines, passed, whole)
    return passed


def record(file: str, lines: list[dict[str, Any]], passed: bool, whole: bool) -> None:
    """Writes what one file executed in place of what it had executed before."""
    kernels: dict[str, Any] = {}
    for line in lines:
        one = kernels.setdefault(line["kernel"], {"forms": 0, "launches": 0, "blocks": 0, "lanes": 0, "rows": []})
        one["forms"] += 1
        one["launches"] += line["launches"]
        one["blocks"] += line["blocks"]
        one["lanes"] += sum(line["instructions"].values())
        if line["choices"]:
            one["choices"] = one.get("choices", 0) + line["choices"]
        if line["row"] and line["row"] not in one["rows"]:
            one["rows"].append(line["row"])
    for one in kernels.values():
        one["rows"].sort()
    forms = sorted({form for line in lines for form in line["instructions"]})
    result = "passed" if passed and whole else "passed in part" if passed else "failed"
    date = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    write(RECORD, file, {"date": date, "result": result, "kernels": kernels, "instructions": forms})
    counts: dict[str, Any] = {}
    for line in sorted(lines, key=lambda line: int(line["counted"])):
        if line["row"] and line["counts"]:
            counts[line["row"]] = {"kernel": line["kernel"], **line["counts"]}
    write(COUNTS, file, dict(sorted(counts.items())))


def write(path: Path, file: str, entry: dict[str, Any]) -> None:
    """Writes the entry of a file of tests to a record, a line for each."""
    path.touch()
    with path.open("r+") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)  # several may run side by side
        content: dict[str, Any] = json.loads(opened.read() or "{}")
        content[file] = entry
        parts = [f" {json.dumps(name)}: {json.dumps(content[name])}" for name in sorted(content)]
        opened.seek(0)
        opened.truncate()
        opened.write("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())
