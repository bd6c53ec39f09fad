"""Every command of the documents: run, or checked without being run where that would take a GPU, hours or the network.

What cannot run here is marked on the page with `# GPU`, or listed in NOT_RUN with the reason; its words are checked.
A command that several pages have runs once. Those that only plan run in the process of the tests, others of ours in one
that is forked from one which has imported the server.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from commands.configs import checkpoint
from forked_servers import forked_command
from live_server import PYTHON_ROOT, LiveServer

from docs import recipes
from docs.commands import ROOT, Command, commands
from sglang import cli, explain
from sglang.cli import COMMANDS, with_model
from sglang.embedded import SEEING_PATH
from sglang.launch_server import take_flag
from sglang.plan.layouts import GIB
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.plan.families import SERVED_ARCHITECTURES
from sglang.srt.server_args import ServerArgs

CONFIGS = ROOT / "test" / "srt" / "kernels" / "configs"
ALL = commands()
HERE = [command for command in ALL if not command.needs_gpu]

NOT_RUN = {
    "make": "targets are looked up in the Makefile",
    "pip": "installs; extras are looked up in pyproject.toml",
    "apt": "installs",
    "docker": "needs the docker daemon; flags after the image are parsed, files looked up",
    "sglang serve": "its flags are parsed; the server is started once for all pages",
    "sglang bench serving": "its flags are parsed; sweep runs it",
    "python -m sglang.quantize": "writes a checkpoint; its flags are looked up",
    "python -m sglang.launch_server": "as sglang serve",
    "python -m sglang.ledger": "compiles for minutes; its words are looked up",
    "python lab/": "takes a GPU or minutes; its flags are looked up",
    "python scripts/": "its flags are looked up",
    "python benchmark/": "its flags are looked up; tests of their own run them",
    "python sgl-kernel/": "compiles with nvcc",
    "python test/": "its words are looked up",
}
RUN = (
    "curl",
    "sglang version",
    "sglang doctor",
    "sglang plan",
    "sglang generate",
    "sglang bench",
    "python -m sglang.explain",
)


HERE_IN_PROCESS = ("sglang version", "sglang plan", "sglang bench report", "python -m sglang.explain")
LESS_WORK = {"generate": ["--device", "cpu", "--max-new-tokens", "4"], "sweep": ["--requests", "2", "--repeats", "1"]}
"""Given behind the words of the page, for the same in little time."""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """It drafts, which changes no answer, so that the routes of drafts answer, too."""
    parsers = ("--tool-call-parser", "auto", "--reasoning-parser", "auto")
    live = LiveServer(
        "--model-path", SEEING_PATH, *parsers, "--served-model-name", "tiny", "--speculative-algorithm", "NGRAM"
    )
    yield live.wait_up()
    live.end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where commands run; "model" is a directory with a config.json."""
    path = tmp_path_factory.mktemp("documents")
    (path / "model").mkdir()
    shutil.copy(CONFIGS / "qwen3.json", path / "model" / "config.json")
    return path


def runs(command: Command) -> bool:
    return " ".join(command.words).startswith(RUN) and "bench serving" not in command.text


def test_every_command_is_run_or_has_a_reason() -> None:
    unknown = [str(c) for c in HERE if not runs(c) and not " ".join(c.words).startswith(tuple(NOT_RUN))]
    assert unknown == []
    assert sum(map(runs, HERE)) >= 10 and any(command.needs_gpu for command in ALL)


ONCE = {
    re.sub(r"\w+\.(jsonl|html)", r"name.\1", " ".join(command.words)): command
    for command in reversed(HERE)
    if runs(command)
}
"""By what a command does, whatever it calls its files."""


@pytest.mark.parametrize("command", list(reversed(ONCE.values())), ids=str)
def test_a_command_runs(
    command: Command,
    server: LiveServer,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [word.replace("http://127.0.0.1:30000", server.url) for word in command.words]
    if "generate" in words:
        words = [word for word in words if word not in ("--model-path", "DIR")]
    words = [
        "model" if word == "DIR" else word for word in words if word not in ("and", "any", "other", "server", "flag")
    ]
    words += [word for name, more in LESS_WORK.items() if name in words for word in more]
    if " ".join(words).startswith(HERE_IN_PROCESS):
        monkeypatch.chdir(folder)
        main, given = (cli.main, words[1:]) if words[0] == "sglang" else (explain.main, words[3:])
        assert main(given) == 0, capsys.readouterr()
        assert "--html" in words or capsys.readouterr().out
        assert "--html" not in words or "</html>" in (folder / words[words.index("--html") + 1]).read_text()
        return
    words[1:1] = ["--fail-with-body"] if words[0] == "curl" else []
    environment = os.environ | {"PYTHONPATH": PYTHON_ROOT, "OMP_NUM_THREADS": "1"}
    if words[0] == "sglang":
        monkeypatch.chdir(folder)
        done = forked_command(("-m", "sglang.cli"), words[1:], tmp_path / "log", environment, 250)
        assert done.stdout
    else:
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    allowed = (0, 1) if "doctor" in words else (0,)  # 1: something is wrong with this machine
    assert done.returncode in allowed, done.stdout[-2000:] + done.stderr[-2000:]
    if words[0] == "curl" and done.stdout:
        assert json.loads(done.stdout).get("error") is None
    if "image_url" in command.text:
        assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "square"


def flags_of(words: list[str]) -> list[str]:
    """Of a value that is a quoted list of flags, none."""
    return [word.partition("=")[0] for word in words if word.startswith("--") and " " not in word]


@pytest.mark.parametrize(
    "command", [c for c in ALL if "serve" in c.words[:2] or "sm120-sglang:latest" in c.text], ids=str
)
def test_flags_of_the_server_exist(command: Command) -> None:
    words = command.words
    if words[0] == "docker":
        words = words[words.index("sm120-sglang:latest") + 1 :]
    else:
        words = words[2:]
    try:
        words = list(words)
        take_flag(words, "--models")
        ServerArgs.from_cli(with_model(words))
    except UserError as error:
        pytest.fail(str(error))


@pytest.mark.parametrize("command", [c for c in ALL if c.words[0] == "make"], ids=str)
def test_targets_exist(command: Command) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in (word for word in command.words[1:] if "=" not in word):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("command", [c for c in ALL if c.words[0] == "pip"], ids=str)
def test_what_is_installed_exists(command: Command) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"\.\[(\w+)\]", command.text):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra
    for path in re.findall(r"(?<!\S)\./\S+", command.text):
        assert (ROOT / path).exists()


@pytest.mark.parametrize("command", [c for c in ALL if c.words[0] == "docker"], ids=str)
def test_files_of_docker_exist(command: Command) -> None:
    words = command.words
    for flag, path in pairwise(words):
        assert flag != "-f" or (ROOT / path).exists(), path
        if flag == "--profile":
            services = yaml.safe_load((ROOT / "docker/compose.yml").read_text())["services"]
            assert any(path in service.get("profiles", ()) for service in services.values())


@pytest.mark.parametrize("command", [c for c in HERE if c.words[0] == "python" and not runs(c)], ids=str)
def test_flags_of_scripts_exist(command: Command) -> None:
    """Looked up in the sources: starting each takes seconds, and some need packages that are not here. Scripts that
    keep unknown words pass them to a server."""
    words = command.words[1:]
    if words[0] == "-m":
        spec = importlib.util.find_spec(words[1])
        assert spec is not None and spec.origin is not None
        if words[1] == "sglang.launch_server":
            return
        sources = Path(spec.origin).parent if spec.origin.endswith("__init__.py") else Path(spec.origin)
    else:
        sources = ROOT / words[0]
        assert sources.exists()
        sources = sources if sources.is_dir() else sources.parent
    files = [sources] if sources.is_file() else [*sources.rglob("*.py"), *sources.parent.glob("upstream/*.py")]
    text = "\n".join(path.read_text() for path in files)
    of_servers = (ROOT / "docs" / "flags.md").read_text() if "parse_known_args" in text else ""
    for flag in flags_of(words):
        assert f'"{flag}"' in text or f"`{flag}" in of_servers, flag


def test_commands_of_the_usage_are_those_that_there_are() -> None:
    from sglang.cli import USAGE

    assert set(re.findall(r"^  (\w+) ", USAGE, re.MULTILINE)) == set(COMMANDS)


# --- recipes and troubleshooting --------------------------------------------------------------------------------------


def test_every_recipe_is_compared() -> None:
    assert set(recipes.ROWS) == set(recipes.CONFIGS)
    assert {model for model in recipes.ROWS if recipes.recipe_flags(model) is None} == recipes.NO_COMMAND
    assert "--mem-fraction-static" in (recipes.recipe_flags("Muse-Glimmer-30B") or ())


@pytest.mark.parametrize(("model", "name"), recipes.CONFIGS.items())
def test_a_recipe_says_what_the_plan_says(model: str, name: str, tmp_path: Path) -> None:
    """With the flags of its command; of a row without one, with a layout of those that `sglang plan` goes through."""
    _, _, cards, weights, tokens, proven, _ = recipes.ROWS[model]
    flags = recipes.recipe_flags(model) or ["--tp", cards]
    args = ServerArgs.from_cli(["--model-path", str(checkpoint(name, tmp_path)), *flags])
    explained = explain.explain(args, arch_by_name("rtx-pro-6000"), frozenset({"triton"}))
    assert explained.plan is not None, explained.notes
    assert explained.plan["memory"]["weights"] / GIB == pytest.approx(float(weights), rel=0.01)
    unit = {"k": 1e3, "M": 1e6}[tokens[-1]]
    assert explained.plan["max_total_num_tokens"] == pytest.approx(float(tokens[:-1]) * unit, rel=0.05)
    assert ("planned" == proven) == (explained.model.architecture not in SERVED_ARCHITECTURES)


def test_our_messages_are_in_the_source() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text().split("## Errors of other programs")[0]
    source = "".join(path.read_text() for path in (ROOT / "python" / "sglang").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    texts = [text for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for text in re.findall(r"`([^`]+)`", row)]
    assert len(texts) >= 14
    for text in texts:
        assert text in joined, text
