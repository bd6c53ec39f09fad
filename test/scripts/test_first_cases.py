"""Runs that may end early: each test's first case comes before any second one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import first_cases  # noqa: E402


def test_order() -> None:
    items = [SimpleNamespace(nodeid=name) for name in ("f[1]", "f[2]", "f[3]", "g", "h[1]", "h[2]")]
    assert [item.nodeid for item in first_cases.by_case(items)] == ["f[1]", "g", "h[1]", "f[2]", "h[2]", "f[3]"]  # type: ignore[arg-type]


def test_no_test_begins_late(tmp_path: Path) -> None:
    file = tmp_path / "test_three.py"
    file.write_text("import pytest\n@pytest.mark.parametrize('x', [1, 2, 3])\ndef test_one(x): pass\n")
    for seconds, status, passed in (("60", 0, "3 passed"), ("0", 2, "1 passed")):
        environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts"), first_cases.SECONDS: seconds}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "first_cases", str(file)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status and passed in done.stdout, done.stdout
