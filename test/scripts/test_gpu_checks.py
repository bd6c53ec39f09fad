"""The table of `scripts/gpu_checks.py`, of reports that pytest really wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import gpu_checks  # noqa: E402


def report_of(tmp_path: Path, text: str) -> gpu_checks.Counts:
    (tmp_path / "test_it.py").write_text(text)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "test_it.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    return gpu_checks.read_report(report)


def test_counts_and_words(tmp_path: Path) -> None:
    text = "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip('no')\n"
    counts = report_of(tmp_path, text)
    assert counts == {"test_it": {"passed": 1, "failed": 1, "skipped": 1}}
    (row,) = gpu_checks.rows("", counts)
    assert row.startswith("FAILED") and row.endswith("1 failed, 1 passed, 1 skipped")


def test_what_cannot_be_imported_has_failed(tmp_path: Path) -> None:
    assert report_of(tmp_path, "import not_there\n") == {"test_it": {"failed": 1}}


def test_what_ran_nothing_is_no_success(tmp_path: Path) -> None:
    (row,) = gpu_checks.rows("sm_120", report_of(tmp_path, "import pytest\ndef test_c(): pytest.skip('no')\n"))
    assert row.startswith("skipped")


def test_every_file_with_a_gpu_part_is_found() -> None:
    names = {path.name for path in gpu_checks.files("")}
    assert {"test_fused_moe.py", "test_attention_kernels.py", "test_scheduler_gpu.py"} <= names
    assert {path.name for path in gpu_checks.files("test_topk")} == {"test_topk.py"}
