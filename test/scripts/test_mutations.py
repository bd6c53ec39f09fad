"""`scripts/mutations.py`: a change is made in a copy alone, and the tests that run its line are tried first."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from mutation import trials
from mutation.changes import ROOMS, change_between, effect, statement_at
from mutation.tests import FILES_OF_FIRST, FIRST_TESTS, Measured, batches

MODULE = "python/half.py"
SOURCE = """\
FACTOR = (
    2
)


def half(value: int) -> int:
    if value % 2:
        raise ValueError
    return value // FACTOR
"""
TEST = """\
import pytest
from half import half


@pytest.mark.parametrize("value", [0, 4])
def test_half(value):
    assert half(value) * 2 == value


def test_odd():
    with pytest.raises(ValueError):
        half(3)


def test_of_something_else():
    assert True


def test_that_fails():
    assert False
"""


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tree = tmp_path / "plain"
    for name, text in {
        MODULE: SOURCE,
        "test/test_half.py": TEST,
        "pyproject.toml": "[tool.pytest.ini_options]",
    }.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    monkeypatch.setattr(trials, "COPIED", ("python", "test", "pyproject.toml"))
    scripts = Path(__file__).resolve().parents[2] / "scripts"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(scripts), *sys.path]))
    return tree


def changed(old: str, new: str) -> trials.Change:
    return change_between("room", MODULE, "operator", SOURCE, SOURCE.replace(old, new))


def measured() -> Measured:
    tests = [f"test/test_half.py::{name}" for name in ("test_half[0]", "test_half[4]", "test_odd", "test_that_fails")]
    known = Measured()
    record = {
        "seconds": dict.fromkeys([*tests, "test/test_half.py::test_of_something_else"], 0.01),
        "failed": [tests[3]],
        "processes": False,
        "lines": {MODULE: {"1": [-1], "6": [-1], "7": [0, 1, 2], "8": [2], "9": [0, 1]}},
    }
    known.add("test/test_half.py", json.loads(json.dumps(record)))
    return known


def test_the_recorder_knows_who_runs_a_line(plain: Path, tmp_path: Path) -> None:
    pytest.importorskip("coverage")
    lines = {MODULE: [1, 2, 7, 8, 9]}
    words, clock = ["test/test_half.py"], trials.Clock(600)
    result = trials.session(plain, words, clock, 600, tmp_path / "scratch", MUTATION_LINES=lines)
    tests = list(result.record["seconds"])
    ran = result.record["lines"][MODULE]
    assert [tests[number].partition("::")[2] for number in ran["8"]] == ["test_odd"]
    assert len(ran["7"]) == 3 and -1 in ran["1"]
    assert result.record["failed"] == ["test/test_half.py::test_that_fails"]


@pytest.mark.parametrize(
    ("old", "new", "by"),
    [
        ("// FACTOR", "+ FACTOR", "test/test_half.py::test_half[0]"),
        ("    2\n", "    3\n", "test/test_half.py::test_half[4]"),
        ("if value % 2", "if value < 0", "test/test_half.py::test_odd"),
        ("def half", "def halve", "tests cannot be collected"),
        ("value // FACTOR", "int(value / FACTOR)", ""),
    ],
)
def test_who_notices_a_change(plain: Path, tmp_path: Path, old: str, new: str, by: str) -> None:
    outcome = trials.try_out(changed(old, new), measured(), plain, tmp_path / "job", trials.Clock(600))
    assert outcome.noticed_by.startswith(by) and outcome.noticed == bool(by)
    assert (plain / MODULE).read_text() == SOURCE and not (tmp_path / "job").exists()


def test_a_test_that_fails_without_the_change_notices_nothing(plain: Path, tmp_path: Path) -> None:
    known = measured()
    known.failed.clear()
    batch = ["test/test_half.py::test_that_fails", "test/test_half.py::test_of_something_else"]
    noticed, _ = trials.run_batch(plain, plain, batch, known, trials.Clock(600), tmp_path / "scratch")
    assert not noticed and known.failed == {batch[0]}


def test_a_run_that_is_over_counts_for_nothing(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(trials.OutOfTime):
        trials.try_out(changed("// FACTOR", "+ FACTOR"), measured(), plain, tmp_path / "job", trials.Clock(0))


def test_tests_that_run_the_statement_come_first() -> None:
    tests = [test.partition("::")[2] for test in measured().tests_of(changed("raise ValueError", "return 0"))]
    assert tests[0] == "test_odd" and len(tests) == 4


def test_what_imports_run_is_tried_with_the_whole_file() -> None:
    assert len(measured().tests_of(changed("    2\n", "    3\n"))) == 4


@pytest.mark.parametrize(("line", "span"), [(2, (1, 3)), (6, (6, 6)), (7, (7, 7)), (9, (9, 9))])
def test_the_statement_around_a_line(line: int, span: tuple[int, int]) -> None:
    assert statement_at(SOURCE, line) == span


def test_batches_hold_each_test_once_until_the_last_limit() -> None:
    seconds = {f"{file}.py::{test}": 1.0 for file in range(FILES_OF_FIRST + 4) for test in range(5)}
    parts = list(batches(list(seconds), seconds))
    assert sorted(test for part in parts for test in part) == sorted(seconds)
    assert len({test.partition("::")[0] for test in parts[0]}) <= FILES_OF_FIRST
    assert [len(part) for part in batches(["long::1"], {"long::1": 1e9})] == [1]


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [("int", "str", True), ("raise ValueError", "raise KeyError", True), ("value % 2", "value", False)],
)
def test_what_has_no_effect_is_left_out(old: str, new: str, same: bool) -> None:
    assert (effect(SOURCE) == effect(SOURCE.replace(old, new))) == same


def test_what_no_test_runs_is_tried_with_those_that_start_ranks() -> None:
    known = measured()
    unreached = changed("FACTOR = (", "FACTOR = -(")
    known.runs[MODULE].clear()
    assert not known.tests_of(unreached)
    ranks = {"seconds": {"test/ranks.py::test": 1.0}, "failed": [], "lines": {}, "processes": True}
    known.add("test/ranks.py", ranks)
    assert known.tests_of(unreached) == ["test/ranks.py::test"]


def test_those_that_start_ranks_come_behind_what_runs_a_change() -> None:
    known = measured()
    ranks = {"seconds": {"test/ranks.py::test": 0.0}, "failed": [], "lines": {}, "processes": True}
    known.add("test/ranks.py", ranks)
    first, second, *others = known.tests_of(changed("raise ValueError", "return 0"))
    assert first.endswith("test_odd") and second == "test/ranks.py::test" and len(others) == 3


def test_whole_files_where_nothing_is_measured(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FIRST_TESTS, "room", ("test_half.py",))
    known = Measured()
    known.unmeasured()
    (plain / "test/srt").mkdir()
    (plain / "test/test_half.py").rename(plain / "test/srt/test_half.py")
    outcome = trials.try_out(changed("if value % 2", "if value < 0"), known, plain, tmp_path / "job", trials.Clock(600))
    assert outcome.noticed_by.endswith("test_odd")
    outcome = trials.try_out(
        changed("value // FACTOR", "int(value / FACTOR)"), known, plain, tmp_path / "job", trials.Clock(600)
    )
    assert not outcome.noticed and [test.partition("::")[2] for test in known.failed] == ["test_that_fails"]


def test_files_that_notice_most_are_there() -> None:
    assert FIRST_TESTS.keys() == ROOMS.keys()
    tests = Path(__file__).resolve().parents[1] / "srt"
    assert not [file for files in FIRST_TESTS.values() for file in files if not (tests / file).exists()]


def test_a_change_follows_its_line(plain: Path) -> None:
    change = changed("if value % 2", "if value < 0")
    (plain / MODULE).write_text("# new\n" + SOURCE)
    change.write(plain)
    assert (plain / MODULE).read_text() == "# new\n" + SOURCE.replace("if value % 2", "if value < 0")
    with pytest.raises(ValueError, match="no longer has the line 7"):
        change.write(plain)
