"""The Pythons that the package may be installed with are the same everywhere, and the installation follows."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import constraints
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
OLDEST, NEWEST = (
    int(number)
    for number in re.findall(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', (ROOT / "pyproject.toml").read_text())[0]
)
NEWEST -= 1


def test_the_makefile_and_the_documents_say_what_the_package_says() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert f"(3, {OLDEST}) <= sys.version_info < (3, {NEWEST + 1})" in makefile
    looked_for = {int(number) for number in re.findall(r"command -v python3\.(\d+)", makefile)}
    assert looked_for == set(range(OLDEST, NEWEST + 1))
    for path in ("Makefile", "README.md", "docs/index.md"):
        assert f"Python 3.{OLDEST} to 3.{NEWEST}" in (ROOT / path).read_text(), path


def test_every_python_is_tested_somewhere() -> None:
    workflows = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    matrices = [job.get("strategy", {}).get("matrix", {}) for each in workflows for job in each["jobs"].values()]
    tested = {python for matrix in matrices for python in matrix.get("python", [])}
    tested |= {row["python"] for matrix in matrices for row in matrix.get("include", []) if "python" in row}
    assert tested == {f"3.{number}" for number in range(OLDEST, NEWEST + 1)}


def test_pins_that_need_a_newer_python_say_so() -> None:
    """A pin without a marker holds on the oldest Python; what is installed says whether it can."""
    oldest, looked_at, wrong = f"3.{OLDEST}", 0, []
    for line in constraints.constraints((ROOT / "constraints.txt").read_text(), (), "2.13.0+cpu"):
        pin = Requirement(line)
        if pin.marker is not None and not pin.marker.evaluate({"python_version": oldest}):
            continue
        try:
            needs = metadata(pin.name)
        except PackageNotFoundError:
            continue
        if needs["Version"] in pin.specifier:
            looked_at += 1
            wrong += [] if f"{oldest}.99" in SpecifierSet(needs["Requires-Python"] or "") else [line]
    assert not wrong and looked_at > 50


def make(*arguments: str) -> str:
    """What `make install` would run."""
    command = ["make", "--dry-run", "--always-make", "install", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_uv_installs_where_it_is_there() -> None:
    text = make("UV=/bin/uv", "PYTHON=/bin/python3.14")
    assert "/bin/uv venv --seed --allow-existing --python '/bin/python3.14' .venv" in text
    assert text.count("/bin/uv pip install --python .venv/bin/python ") == 4 and "-m pip" not in text


def test_uv_gets_the_settings_of_pip() -> None:
    command = ["make", "--eval", "shown: ; @echo $(PIP) $$UV_FIND_LINKS", "shown", "UV=/bin/uv"]
    settings = {"PATH": os.environ["PATH"], "PIP_FIND_LINKS": "/a  /b", "PIP_NO_INDEX": "1"}
    shown = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=True).stdout
    assert shown == "/bin/uv pip install --python .venv/bin/python --no-index /a,/b\n"


def test_torch_is_the_one_that_is_asked_for() -> None:
    assert "pip install --no-compile 'torch';" in make("UV=")
    text = make("UV=", "TORCH=2.14.1")
    assert "pip install --no-compile 'torch==2.14.1';" in text and "'torch==2.14.1+cpu'" in text


def test_pip_installs_where_there_is_no_uv() -> None:
    text = make("UV=", "PYTHON=/bin/python3.14")
    assert "/bin/python3.14 -m venv .venv" in text and text.count("-m pip install --no-compile ") == 4
    assert "uv " not in text


PINNED = "# Comment.\nTorch==2.13.0\ntriton==3.9.0; python_version >= '3.11'\nhugging_face==1.0\n"


@pytest.mark.parametrize(
    ("torch", "others", "expected"),
    [
        ("2.13.0+cpu", (), ["triton==3.9.0; python_version >= '3.11'", "hugging_face==1.0"]),
        ("2.14.1+cu130", (), ["hugging_face==1.0"]),  # it requires the Triton that fits it
        ("2.13.0", ("hugging-face==2.0",), ["hugging-face==2.0"]),
    ],
)
def test_constraints(torch: str, others: tuple[str, ...], expected: list[str]) -> None:
    assert constraints.constraints(PINNED, others, torch) == expected


@pytest.mark.parametrize("pin", ["hugging_face>=2", "unknown==1"])
def test_a_pin_that_changes_nothing_is_refused(pin: str) -> None:
    with pytest.raises(ValueError, match=re.escape(pin)):
        constraints.constraints(PINNED, (pin,), "2.13.0+cpu")
