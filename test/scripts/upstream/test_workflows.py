"""The workflows do what the repository can do: their commands exist, their actions are pinned, their rights are few."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from upstream import tritons

ROOT = Path(__file__).parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCRIPTS = [ROOT / ".ci" / "run", ROOT / ".github" / "report-upstream"]


def jobs() -> list[Any]:
    found = []
    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            found.append(pytest.param(job, id=f"{path.stem}-{name}"))
    return found


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def recipe(target: str, *variables: str) -> str:
    """What `make` would run, with everything installed."""
    command = ["make", "--dry-run", "--assume-old=install", target, *variables]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def check_command(line: str) -> None:
    """Fails unless the repository has what the line runs, "useradd ... && su USER -c SCRIPT" as a plain user."""
    words = shlex.split(line)
    if words[0] == "useradd":
        assert words[-3] != "su" and words[-2] == "-c", line
        words = shlex.split(words[-1])
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        assert targets and set(targets) <= makefile_targets(), line
    else:
        script = ROOT / words[0]
        assert script.is_file() and os.access(script, os.X_OK), line


def test_there_are_workflows_and_both_use_the_commands_of_developers() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "nightly.yml"]
    assert ".ci/run" in WORKFLOWS[0].read_text() and "make upstream" in WORKFLOWS[1].read_text()


@pytest.mark.parametrize("job", jobs())
def test_the_commands_exist(job: dict[str, Any]) -> None:
    lines = [line for step in job["steps"] if "run" in step for line in step["run"].strip().splitlines()]
    assert lines
    for line in lines:
        check_command(line)
        assert "${{" not in line, "values reach a shell through env, never by pasting them into it"


@pytest.mark.parametrize("line", ["make nothing", "scripts/nothing.sh", "pyproject.toml"])
def test_the_check_finds_what_is_missing(line: str) -> None:
    with pytest.raises(AssertionError):
        check_command(line)


@pytest.mark.parametrize("job", jobs())
def test_actions_are_pinned_and_keep_no_token(job: dict[str, Any]) -> None:
    for step in job["steps"]:
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"]), step
            if "checkout" in step["uses"]:
                assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_rights_are_few_and_time_is_bounded(path: Path) -> None:
    text = path.read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        allowed = {"contents": "read", "issues": "write"} if name == "report" else {"contents": "read"}
        assert job.get("permissions", {"contents": "read"}) == allowed
        assert job["timeout-minutes"] <= 120
    assert len(re.findall(r"uses: .* # v\d", text)) == text.count("uses:")  # the version beside the hash


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_the_package_index_is_a_variable_of_the_repository(path: Path) -> None:
    text = path.read_text()
    assert set(re.findall(r"https?://([\w.-]+)", text)) <= {"github.com"}
    for job in yaml.safe_load(text)["jobs"].values():
        if any("make install" in step.get("run", "") for step in job["steps"]):
            assert job["env"]["PIP_EXTRA_INDEX_URL"] == "${{ vars.PIP_EXTRA_INDEX_URL }}"


def test_artifacts_are_where_the_next_job_looks() -> None:
    job = yaml.safe_load(WORKFLOWS[1].read_text())["jobs"]
    (upload,) = [step for step in job["upstream"]["steps"] if "upload-artifact" in step.get("uses", "")]
    assert upload["with"]["path"] == "build/upstream/*.md" and upload["if"] == "always()"
    assert job["report"]["needs"] == "upstream" and "always()" in job["report"]["if"]


def test_the_parts_of_the_long_tests_are_together_all() -> None:
    """Whatever a test is named."""
    job = yaml.safe_load(WORKFLOWS[1].read_text())["jobs"]["thorough"]
    parts = job["strategy"]["matrix"]["part"]
    names = sorted({word for part in parts for word in part.split()} - {"and", "or", "not"})
    for has in itertools.product((False, True), repeat=len(names)):
        known = dict(zip(names, has, strict=True))
        assert any(eval(part, {}, known) for part in parts), known  # pytest's expressions of names are Python's
    assert len(parts) > 1 and names


def test_make_upstream_runs_scripts_that_exist() -> None:
    text = recipe("upstream", "UPSTREAM=0.5.8", "OUT=somewhere")
    scripts = re.findall(r"python (scripts/\S+\.py) ?(drift)? --upstream '0\.5\.8'", text)
    assert [command for _, command in scripts] == ["", "drift"]
    assert all((ROOT / script).is_file() for script, _ in scripts)
    assert "rm -rf 'somewhere/tree'" in text and "--verify" in text


def test_every_change_meets_one_release_in_a_fresh_environment() -> None:
    """A pinned one: what is downloaded is bounded, and no release of the night before breaks a change of ours."""
    steps = yaml.safe_load(WORKFLOWS[0].read_text())["jobs"]["upstream"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands[0].startswith("make install") and len(commands) == 2
    assert re.fullmatch(r"make upstream UPSTREAM=\d+\.\d+\.\d+", commands[1])


def test_the_same_tritons_compile_everywhere() -> None:
    """By the tool's own default: `make upstream` names none, the documents name those, and the newest is installed."""
    assert "triton" not in recipe("upstream").lower()
    assert f"\ntriton=={tritons.VERSIONS[-1]}" in (ROOT / "constraints.txt").read_text()
    assert " and ".join(tritons.VERSIONS) in (ROOT / "docs" / "upstream.md").read_text()


def test_make_test_checks_the_ledger() -> None:
    assert importlib.util.find_spec("sglang.ledger") is not None
    assert "pytest" in recipe("unit") and (ROOT / "test/srt/kernels/test_ledger.py").is_file()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


GH = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$CALLS"
case "$2" in
    list) echo "$OPEN_ISSUE" ;;
    create | edit) while [[ $1 != --body-file ]]; do shift; done; cp "$2" "$CALLS.body" ;;
esac
"""


def run_report(tmp_path: Path, result: str, open_issue: str, report: str = "- undecided: `--new`\n") -> tuple[str, str]:
    """The calls of `gh` and the text of the issue, from a `gh` that only writes them down."""
    tools, reports = tmp_path / "bin", tmp_path / "reports" / "main"
    tools.mkdir()
    reports.mkdir(parents=True)
    (tools / "gh").write_text(GH)
    (tools / "gh").chmod(0o755)
    (reports / "2-interface.md").write_text(report, encoding="utf-8")
    calls = tmp_path / "calls"
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "OPEN_ISSUE": open_issue,
        "RUN_URL": "https://example.org/run/1",
        "LC_ALL": "C.UTF-8",
    }
    command = [str(ROOT / ".github" / "report-upstream"), str(reports.parent), result]
    subprocess.run(command, check=True, env=environment)
    body = tmp_path / "calls.body"
    return calls.read_text(), body.read_text(encoding="utf-8") if body.exists() else ""


def test_the_first_failure_opens_an_issue_and_the_next_one_updates_it(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    calls, body = run_report(tmp_path / "first", "failure", "")
    assert "issue create --title Upstream moved" in calls
    assert "# main" in body and "`--new`" in body and "https://example.org/run/1" in body
    (tmp_path / "second").mkdir()
    calls, body = run_report(tmp_path / "second", "failure", "17")
    assert "issue edit 17" in calls and "create" not in calls and "`--new`" in body


def test_success_closes_an_open_issue_and_does_nothing_without_one(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    assert "issue close 17" in run_report(tmp_path / "open", "success", "17")[0]
    (tmp_path / "none").mkdir()
    calls, _ = run_report(tmp_path / "none", "success", "")
    assert len(calls.splitlines()) == 1 and calls.startswith("issue list")


def test_a_long_report_is_shortened_to_what_an_issue_holds(tmp_path: Path) -> None:
    _, body = run_report(tmp_path, "failure", "", "→" * 100_000)
    assert 59_000 < len(body) < 65_536 and "the whole reports are with the run" in body
