"""Runs each file of tests in processes of its own, and keeps what it touched and what it took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from impact.tracing import AT_IMPORT

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OWN = "scripts/impact/"
"""This package, which is in every process that is recorded."""
LIMIT_S = 1200.0
PASSED = (0, 5)
"""Exit statuses of pytest: all passed; none was to run."""


def test_files(root: Path = ROOT) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in (root / "test").rglob("test_*.py"))


def result_file(file: str, kept: Path) -> Path:
    return kept / (file.replace("/", "-") + ".json")


def record_file(file: str, kept: Path) -> None:
    """Writes the file's result: {"seconds", "wall_s", "status", "touched": [path, ...], "at_import": [path, ...]}, and
    "tail" of what pytest wrote where tests failed."""
    bytecode = kept / "bytecode"
    bytecode.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="impact-", ignore_cleanup_errors=True) as folder:
        traces, report = Path(folder, "traces"), Path(folder, "report")
        traces.mkdir()
        paths = [str(HERE / "site"), str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "IMPACT_BYTECODE": str(bytecode),
            "IMPACT_TOUCHED": str(traces),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n0", "-q", "--tb=line", file]
        measured = [sys.executable, str(HERE / "measured.py"), str(report), str(LIMIT_S), *words]
        with Path(folder, "log").open("w") as log:
            subprocess.run(measured, cwd=ROOT, env=environment, stdout=log, stderr=log, check=False)
        met = {line for path in traces.iterdir() for line in path.read_text().splitlines()}
        at_import = {line.removeprefix(AT_IMPORT) for line in met if line.startswith(AT_IMPORT)}
        touched = sorted(line for line in met if not line.startswith((AT_IMPORT, OWN)))
        record = json.loads(report.read_text()) | {"touched": touched, "at_import": sorted(at_import)}
        if record["status"] not in PASSED:
            record["tail"] = Path(folder, "log").read_text(errors="replace")[-1500:]
    result_file(file, kept).write_text(json.dumps(record))
    print(f"{record['seconds']:6.1f} s, {len(touched):4} files, status {record['status']}: {file}", flush=True)


def record_all(files: Sequence[str], kept: Path, jobs: int) -> dict[str, dict[str, Any]]:
    """What is kept already is not run again."""
    kept.mkdir(parents=True, exist_ok=True)
    missing = [file for file in files if not result_file(file, kept).exists()]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(partial(record_file, kept=kept), missing))
    return {file: json.loads(result_file(file, kept).read_text()) for file in files}
