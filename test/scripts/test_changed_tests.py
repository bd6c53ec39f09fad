"""Tests that a change can break: what is recorded of them, and which are chosen."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import changed_tests
import pytest
from impact import record, recording
from impact.imports import Imports
from impact.record import Known, Record, digest
from impact.selection import CORE, Change, Selector, outside_functions

ROOT = Path(__file__).parents[2]
TREE = {
    "python/sglang/__init__.py": "",
    "python/sglang/low.py": "LIMIT = 3\n\n\ndef low() -> int:\n    return LIMIT\n",
    "python/sglang/high.py": "from sglang.low import low\n\n\ndef high() -> int:\n    return low()\n\n\nSIZE = low()\n",
    "python/sglang/sizes.py": "SIZES = (1, 2)\n",
    "python/sglang/user.py": "from . import sizes\n\n\ndef use() -> int:\n    return len(sizes.SIZES)\n",
    "python/sglang/server.py": "from sglang.high import high\n\nif __name__ == '__main__':\n    high()\n",
    "docs/page.md": "text",
    "test/helper.py": "import sglang.user\n",
    "test/conftest.py": "",
    "test/test_core.py": "",
    "test/test_low.py": "from sglang.low import low\n\n\ndef test_it():\n    assert low() == 3\n",
    "test/test_high.py": "from sglang import high\n\n\ndef test_it():\n    assert high.SIZE == 3\n",
    "test/test_user.py": "import helper\n\n\ndef test_it():\n    assert helper.sglang.user.use() == 2\n",
    "test/test_server.py": (
        "import pathlib, subprocess, sys\n\n\n"
        "def test_it():\n"
        "    assert pathlib.Path('docs/page.md').read_text()\n"
        "    subprocess.run([sys.executable, '-m', 'sglang.server'], check=True)\n"
    ),
    "test/docs/test_pages.py": "",
}
TOUCHED = {
    "test/test_low.py": {"python/sglang/low.py"},
    "test/test_high.py": set(),
    "test/test_user.py": {"python/sglang/user.py"},
    "test/test_server.py": {"python/sglang/high.py", "python/sglang/low.py", "docs/page.md"},
    "test/test_core.py": set(),
    "test/docs/test_pages.py": set(),
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path, text in TREE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def selector(tree: Path, without: str = "", changed: str = "", at_import: str = "") -> Selector:
    """changed: a file of tests that now imports `helper`."""
    known = {path: Known(digest(tree / path), 60.0, frozenset(met)) for path, met in TOUCHED.items() if path != without}
    if changed:
        (tree / changed).write_text("import helper\n")
    return Selector(tree, Record(known, frozenset({at_import})), Imports(tree))


def names(selected: frozenset[str]) -> str:
    return " ".join(sorted(Path(path).stem.removeprefix("test_") for path in selected))


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        (Change("python/sglang/low.py", only_in_functions=True), "low server"),
        (Change("python/sglang/low.py"), "high low server"),
        (Change("python/sglang/high.py", only_in_functions=True), "high server"),
        (Change("python/sglang/sizes.py"), "user"),  # it has no functions: what its importer can break
        (Change("python/sglang/user.py", only_in_functions=True), "user"),
        (Change("test/test_low.py"), "low"),
        (Change("test/helper.py"), "user"),
        (Change("docs/page.md"), "pages server"),
        (Change("docs/other.md"), "pages"),
    ],
)
def test_what_a_change_can_break(tree: Path, change: Change, chosen: str) -> None:
    selection = selector(tree).choose([change])
    assert not selection.everything
    assert names(selection.files) == chosen


@pytest.mark.parametrize(
    "path",
    ["pyproject.toml", "Makefile", "test/conftest.py", "python/sglang/table.json", "python/sglang/new.py", "docs/a.css",
     "scripts/new.py", "lab/x.py", ".ci/run"],
)  # fmt: skip
def test_everything_runs_where_nothing_is_known(tree: Path, path: str) -> None:
    selection = selector(tree).choose([Change("test/test_low.py"), Change(path)])
    assert path in selection.everything


def test_a_core_runs_for_every_change(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("impact.selection.CORE", ("test/test_core.py",))
    assert names(selector(tree).choose([Change("test/test_low.py")]).files) == "core low"
    assert names(selector(tree).choose([Change("test/test_removed.py")]).files) == "core"
    assert [path for path in CORE if not (ROOT / path).exists()] == []


def test_what_runs_while_others_are_imported(tree: Path) -> None:
    change = [Change("python/sglang/low.py", only_in_functions=True)]
    assert names(selector(tree, at_import="python/sglang/low.py").choose(change).files) == "high low server"


def test_files_without_a_record_are_chosen_by_their_imports(tree: Path) -> None:
    change = [Change("python/sglang/low.py", only_in_functions=True)]
    without = selector(tree, without="test/test_server.py")
    assert without.unknown == {"test/test_server.py"}
    assert names(without.choose(change).files) == "low server"  # it names a module that imports it


def test_so_are_files_that_changed_since(tree: Path) -> None:
    change = [Change("python/sglang/sizes.py", only_in_functions=True)]
    assert names(selector(tree, changed="test/test_high.py").choose(change).files) == "high user"


def test_what_lies_outside_of_functions() -> None:
    source = TREE["python/sglang/low.py"]
    assert outside_functions(source) == outside_functions(source.replace("return LIMIT", "return LIMIT + 1"))
    for old, new in (("LIMIT = 3", "LIMIT = 4"), ("low() -> int", "low(x: int = 1) -> int")):
        assert outside_functions(source) != outside_functions(source.replace(old, new))


def test_the_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    file, tests = tmp_path / "record", {"b": Known("d", 1.5, frozenset("xz")), "a": Known("e", 2.0, frozenset())}
    assert record.read(file) == Record()
    record.write(Record(tests, frozenset("yz")), file)
    first = file.read_bytes()
    record.write(Record(dict(reversed(tests.items())), frozenset("zy")), file)
    assert record.read(file) == Record(tests, frozenset("yz")) and file.read_bytes() == first


def test_changes_are_those_since_the_common_commit(tree: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tree, check=True)

    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-qm", "1")
    git("checkout", "-q", "-b", "change")
    low, sizes = tree / "python/sglang/low.py", tree / "python/sglang/sizes.py"
    low.write_text(low.read_text().replace("return LIMIT", "return 1 + LIMIT"))
    git("commit", "-qam", "2")
    git("checkout", "-q", "main")
    (tree / "docs/page.md").write_text("what main has changed since is no part of it")
    git("commit", "-qam", "3")
    git("checkout", "-q", "change")
    sizes.write_text("SIZES = (1, 2, 3)\n")
    (tree / "test/helper.py").unlink()
    (tree / "test/test_new.py").write_text("")
    assert changed_tests.changes_since("main", tree) == [
        Change("python/sglang/low.py", only_in_functions=True),
        Change("python/sglang/sizes.py"),
        Change("test/helper.py"),
        Change("test/test_new.py"),
    ]


def test_an_unknown_base_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for words, reason in (([], "--base is missing"), (["--base", "no-such"], "name a commit that is here")):
        monkeypatch.setattr(sys, "argv", ["changed_tests.py", *words])
        with pytest.raises(SystemExit, match="2"):
            changed_tests.main()
        assert reason in capsys.readouterr().err


def test_what_tests_touch_is_recorded(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a process that a test starts; not what runs while modules are imported."""
    shutil.copytree(ROOT / "scripts/impact", tree / "scripts/impact", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "pyproject.toml").write_text("[tool.pytest.ini_options]\npythonpath = ['test']\n")
    monkeypatch.setattr(recording, "ROOT", tree)
    monkeypatch.setattr(recording, "HERE", tree / "scripts/impact")
    files = [f"test/test_{name}.py" for name in ("high", "server", "user")]
    taken = recording.record_all(files, tree / "kept", jobs=2)
    assert [taken[file]["status"] for file in files] == [0, 0, 0], taken
    touched = [{path for path in taken[file]["touched"] if not path.startswith("test/")} for file in files]
    assert touched == [
        set(),
        {"docs/page.md", "python/sglang/high.py", "python/sglang/low.py", "python/sglang/server.py"},
        {"python/sglang/user.py"},
    ]
    assert [taken[file]["at_import"] for file in files] == [["python/sglang/low.py"], ["python/sglang/low.py"], []]
    (tree / "test/test_user.py").write_text("raise AssertionError")
    assert recording.record_all(files, tree / "kept", jobs=2) == taken  # it goes on from what is there


def test_everything_runs_without_a_base() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "exec make test\n" in (ROOT / ".ci/run").read_text()
    assert "changed_tests.py --base '$(BASE)'" in makefile
