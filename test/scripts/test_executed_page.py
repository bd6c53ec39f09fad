"""docs/executed.md says what the record says, and the record is of kernels and tests that there are."""

from __future__ import annotations

import json

import executed_page
import pytest
import yaml
from execute_kernels import RECORD, ROOT, kernel_tests, main


def test_page_is_current() -> None:
    assert executed_page.PAGE.read_text() == executed_page.page(), "run python scripts/execute_kernels.py --page"


def test_what_is_no_file_of_kernel_tests_is_not_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no_such_file.py", "/outside.py"])
    assert "no files of kernel tests: no_such_file.py, /outside.py" in capsys.readouterr().err


def test_every_file_is_executed_nightly() -> None:
    """Each by one job, of the beginning of its path."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())["jobs"]
    parts = [part for one in jobs["executed"]["strategy"]["matrix"]["include"] for part in one["files"].split()]
    assert all(sum(file.startswith(part) for part in parts) == 1 for file in kernel_tests())


def test_record_is_of_what_there_is() -> None:
    record = json.loads(RECORD.read_text())
    assert set(record) <= set(kernel_tests())
    assert all((ROOT / file).exists() for file in record)
    assert any(entry["kernels"] for entry in record.values())
