"""The produced tree: a git branch with a commit a change, the same every time, and nothing else touched."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import upstream_trees as trees
from upstream import rebase, source, status
from upstream.change import Outcome
from upstream.changes import ALL
from upstream.source import SourceError, resolve

ROOT = Path(__file__).parents[3]
COMMAND = ROOT / "scripts" / "rebase_upstream.py"


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout


def make(root: Path, out: Path) -> rebase.Rebased:
    return rebase.rebase(resolve(str(root)), out, ALL)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trees.write(tmp_path_factory.mktemp("pristine"))


@pytest.fixture(scope="module")
def made(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "tree"
    assert make(pristine, out).exit_code == 0
    return out


def test_one_commit_a_change_on_top_of_the_pristine_tree(pristine: Path, made: Path) -> None:
    assert git(made, "branch", "--show-current").strip() == "sm120"
    titles = git(made, "log", "--reverse", "--format=%s").splitlines()
    assert titles == ["SGLang as released", *(change.title for change in ALL)]
    first = git(made, "rev-list", "--max-parents=0", "HEAD").strip()
    for path in trees.snapshot(pristine):
        assert git(made, "show", f"{first}:{path}") == (pristine / path).read_text()
    last = git(made, "show", "--format=%B", "--no-patch", "HEAD")
    assert "Done upstream when:" in last and f"Change: {ALL[-1].name}" in last
    assert not git(made, "status", "--porcelain")


def test_same_bytes_and_same_hashes_every_time(pristine: Path, made: Path, tmp_path: Path) -> None:
    make(pristine, tmp_path / "again")
    assert trees.snapshot(tmp_path / "again") == trees.snapshot(made)
    assert git(tmp_path / "again", "rev-parse", "HEAD") == git(made, "rev-parse", "HEAD")


def test_a_second_run_says_already_applied_and_changes_nothing(made: Path, tmp_path: Path) -> None:
    again = make(made, tmp_path / "again")
    assert {result.outcome for result in again.results} == {Outcome.ALREADY_APPLIED}
    assert trees.snapshot(tmp_path / "again") == trees.snapshot(made)
    assert git(tmp_path / "again", "rev-list", "--count", "HEAD").strip() == "1"
    assert again.exit_code == 0 and not again.stat


def test_licenses_stay_and_the_notice_lists_every_change(pristine: Path, made: Path) -> None:
    assert (made / "LICENSE").read_bytes() == (pristine / "LICENSE").read_bytes()
    text = (made / rebase.NOTICE).read_text()
    assert "Apache License, Version 2.0" in text
    for change in ALL:
        assert f"{change.name}: {change.title}" in text
    for path, content in trees.snapshot(made).items():
        before = pristine / path
        if path in ("LICENSE", rebase.NOTICE) or (before.exists() and before.read_bytes() == content):
            continue
        assert path in text
        first = content.decode().splitlines()[0]
        assert first.startswith("# Modified for SM120 (") or first == "# SPDX-License-Identifier: Apache-2.0"


def test_nothing_else_is_touched(pristine: Path, made: Path) -> None:
    assert (made / "sglang/srt/untouched.py").read_bytes() == (pristine / "sglang/srt/untouched.py").read_bytes()
    assert "untouched.py" not in git(made, "diff", "--stat", f"HEAD~{len(ALL)}", "HEAD")


def test_a_checkout_keeps_its_layout_and_loses_its_history(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    trees.write(checkout / "python")
    (checkout / "README.md").write_text("a checkout\n")
    (checkout / ".gitignore").write_text("*.json\n")
    (checkout / "python/sglang/kept.json").write_text("{}\n")
    git(tmp_path, "init", "--quiet", str(checkout))
    made = make(checkout, tmp_path / "out")
    assert made.package_parent == tmp_path / "out" / "python"
    assert (tmp_path / "out/README.md").exists()
    assert "python/sglang/kept.json" in git(tmp_path / "out", "ls-files")
    assert len(git(tmp_path / "out", "log", "--format=%h").splitlines()) == len(ALL) + 1


def test_moved_changes_are_in_the_report_and_in_the_exit_code(tmp_path: Path) -> None:
    root = trees.write(tmp_path / "mangled")
    trees.mangle(root, trees.MOE, "get_default_config", "get_default_configuration")
    command = [sys.executable, str(COMMAND), "--upstream", str(root), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "moved: get_default_config is not defined; nearest: get_default_configuration" in done.stdout
    assert "MoE default tile" not in git(tmp_path / "out", "log", "--format=%s")
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 2 and "is not empty" in again.stderr


def test_status_does_not_write_to_the_release(pristine: Path) -> None:
    before = trees.snapshot(pristine)
    results = rebase.probe(resolve(str(pristine)), ALL)
    assert {result.outcome for result in results} == {Outcome.APPLIED}
    assert trees.snapshot(pristine) == before
    text = status.table({"1.0": results, "2.0": results})
    assert "| change | 1.0 | 2.0 |" in text and "| extend-tiles | applied | applied |" in text
    assert f"- 1.0: {len(ALL)} applied.\n- 2.0: {len(ALL)} applied.\n" in text
    for change in ALL:
        assert f"### {change.name}" in text


def test_status_gives_reasons(tmp_path: Path) -> None:
    files = {path: text for path, text in trees.FILES.items() if "inkling" not in path}
    results = rebase.probe(resolve(str(trees.write(tmp_path, files))), ALL)
    assert "- 9: not applicable: the release has no Inkling." in status.table({"9": results})
    assert "- 9 to 11: not applicable: the release has no Inkling." in status.table(
        {"9": results, "10": results, "11": results}
    )


def test_output_inside_the_release_is_refused(tmp_path: Path) -> None:
    root = trees.write(tmp_path)
    with pytest.raises(rebase.RebaseError, match="lies inside"):
        make(root, root / "out")


# Sources


@pytest.mark.parametrize("below", [".", "python", "sglang"])
def test_a_path_may_be_a_checkout_or_the_package(tmp_path: Path, below: str) -> None:
    parent = tmp_path / "python" if below == "python" else tmp_path
    trees.write(parent)
    given = parent / "sglang" if below == "sglang" else tmp_path
    assert source.fetch(str(given)) == parent


def test_bad_sources_say_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is not an existing path, a version such as"):
        resolve("no such thing")
    with pytest.raises(SourceError, match="is not an SGLang tree"):
        resolve(str(tmp_path))


def test_a_git_ref_is_fetched_once_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120_UPSTREAM_CACHE", str(tmp_path / "cache"))
    upstream = trees.write(tmp_path / "upstream")
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false")
    git(upstream, "init", "--quiet", "--initial-branch=main")
    git(upstream, "add", "--all")
    git(upstream, *identity, "commit", "--quiet", "--message", "one")
    first = resolve(f"file://{upstream}@main")
    assert first.label.startswith("main@") and first.package_parent.is_relative_to(tmp_path / "cache")
    assert resolve(f"file://{upstream}@main") == first
    (upstream / "more.txt").write_text("more\n")
    git(upstream, "add", "--all")
    git(upstream, *identity, "commit", "--quiet", "--message", "two")
    assert (resolve(f"file://{upstream}@main").root / "more.txt").exists()
    with pytest.raises(SourceError, match="no-such-branch"):
        resolve(f"file://{upstream}@no-such-branch")


def test_a_release_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120_UPSTREAM_CACHE", str(tmp_path / "cache"))
    tree = trees.write(tmp_path / "tree")
    asked = []

    def download(version: str, into: Path) -> None:
        asked.append(version)
        with zipfile.ZipFile(into / "sglang.whl", "w") as wheel:
            for path in trees.snapshot(tree):
                wheel.write(tree / path, path)

    monkeypatch.setattr(source, "_pip_download", download)
    assert resolve("1.2.3").package_parent == resolve("v1.2.3").package_parent == tmp_path / "cache/releases/1.2.3"
    assert asked == ["1.2.3"] and resolve("1.2.3").label == "1.2.3"


def test_a_broken_download_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120_UPSTREAM_CACHE", str(tmp_path))

    def download(version: str, into: Path) -> None:
        raise SourceError("the package index has none")

    monkeypatch.setattr(source, "_pip_download", download)
    with pytest.raises(SourceError, match="has none"):
        resolve("1.2.3")
    assert not list((tmp_path / "releases").iterdir())
