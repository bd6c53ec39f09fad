"""What `make test` runs of a test marked `pairs` or `values`, and what it leaves to `make thorough`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations_with_replacement, product
from pathlib import Path

import pytest
from pairs import covering

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import pytest

@pytest.mark.pairs
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize(("b", "also_b"), [(0, 0), (1, 1), (2, 2)])
@pytest.mark.parametrize("c", ["x", pytest.param("y", marks=pytest.mark.thorough), "z"])
def test_three(a, b, also_b, c): ...

@pytest.mark.pairs
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(3))
def test_two(a, b): ...

@pytest.mark.values
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", [0, 1, pytest.param(2, marks=pytest.mark.thorough)])
def test_values(a, b): ...

@pytest.mark.parametrize("a", range(2))
@pytest.mark.parametrize("b", range(2))
@pytest.mark.parametrize("c", range(2))
def test_all(a, b, c): ...

@pytest.mark.pairs
def test_one(): ...
"""


def grid(*sizes: int) -> list[list[str]]:
    return [list(map(str, values)) for values in product(*map(range, sizes))]


def pairs_of(cases: Sequence[Sequence[str]], a: int, b: int) -> set[tuple[str, str]]:
    return {(case[a], case[b]) for case in cases}


@pytest.mark.parametrize(
    ("sizes", "most"),
    [((5,), 5), ((3, 4), 12), ((2, 2, 2), 4), ((9, 5, 4), 54), ((3, 3, 3, 3), 12), ((4, 1, 3, 2), 12)],
)
def test_every_pair_of_values_is_in_a_case(sizes: tuple[int, ...], most: int) -> None:
    cases = grid(*sizes)
    chosen = [cases[i] for i in covering(cases)]
    for a, b in combinations_with_replacement(range(len(sizes)), 2):
        assert pairs_of(chosen, a, b) == pairs_of(cases, a, b)
    assert len(chosen) <= most


def test_pairs_that_no_case_has_are_not_missed() -> None:
    cases = [case for case in grid(3, 3, 3) if case[0] != case[1]]
    chosen = [cases[i] for i in covering(cases)]
    assert pairs_of(chosen, 0, 1) == {(a, b) for a, b in product("012", repeat=2) if a != b}
    assert len(chosen) < len(cases)


@pytest.mark.parametrize(("sizes", "most"), [((5,), 5), ((3, 4), 4), ((2, 5, 3), 5)])
def test_every_value_is_in_a_case(sizes: tuple[int, ...], most: int) -> None:
    cases = grid(*sizes)
    chosen = [cases[i] for i in covering(cases, 1)]
    for i, size in enumerate(sizes):
        assert {case[i] for case in chosen} == set(map(str, range(size)))
    assert len(chosen) == most


def test_nothing_to_choose_from() -> None:
    assert covering([]) == set()


def collected(path: Path, *options: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--co"]
    command += ["-q", "-o", "addopts=--import-mode=importlib --strict-markers", str(path)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_the_others_are_thorough(tmp_path: Path) -> None:
    """Each case is in one of the two runs."""
    path = tmp_path / "test_cases.py"
    path.write_text(TESTS)
    (tmp_path / "conftest.py").write_text((ROOT / "test" / "conftest.py").read_text())
    every, quick, thorough = (collected(path, *options) for options in ((), ("-m", "not thorough"), ("-m", "thorough")))
    assert sorted(every) == sorted(quick + thorough) and len(set(every)) == 36 + 12 + 12 + 8 + 1
    assert len([name for name in quick if name.startswith("test_three")]) == 12
    assert len([name for name in quick if name.startswith("test_values")]) == 4
    assert not [name for name in thorough if not name.startswith(("test_three", "test_values"))]
