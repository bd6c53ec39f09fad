"""Runs each file of tests in processes of its own, and keeps what it touched and what it took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 1200.0
PASSED = (0, 5)
"""Exit statuses of pytest: all passed; none was to run."""


def test_files(root: Path = ROOT) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in (root / "test").rglob("test_*.py"))


def record_file(file: str, kept: Path) -> None:
    """Writes KEPT/FILE.json: {"seconds", "wall_s", "status", "touched": [path, ...]}."""
    bytecode = kept / "bytecode"
    bytecode.mkdir(exist_ok=True)
    target = kept / (file.replace("/", "-") + ".json")
    with tempfile.TemporaryDirectory(prefix="impact-", ignore_cleanup_errors=True) as folder:
        touched, report = Path(folder, "touched"), Path(folder, "report")
        touched.mkdir()
        paths = [str(HERE / "site"), str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "IMPACT_BYTECODE": str(bytecode),
            "IMPACT_TOUCHED": str(touched),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n0", "-q", "--tb=line", file]
        measured = [sys.executable, str(HERE / "measured.py"), str(report), str(LIMIT_S), *words]
        with Path(folder, "log").open("w") as log:
            subprocess.run(measured, cwd=ROOT, env=environment, stdout=log, stderr=log, check=False)
        met = {line for path in touched.iterdir() for line in path.read_text().splitlines()}
        record = json.loads(report.read_text()) | {"touched": sorted(met)}
        if record["status"] not in PASSED:
            record["tail"] = Path(folder, "log").read_text(errors="replace")[-1500:]
    target.write_text(json.dumps(record))
    print(f"{record['seconds']:6.1f} s, {len(met):4} files, status {record['status']}: {file}", flush=True)


def record_all(files: Iterable[str], kept: Path, jobs: int) -> dict[str, dict[str, Any]]:
    """What is kept already is not run again."""
    kept.mkdir(parents=True, exist_ok=True)
    known = {path.name for path in kept.iterdir()}
    missing = [file for file in files if file.replace("/", "-") + ".json" not in known]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(partial(record_file, kept=kept), missing))
    return {file: json.loads((kept / (file.replace("/", "-") + ".json")).read_text()) for file in files}
