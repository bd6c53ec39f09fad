from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from forked_servers import forked_children

from sglang.cli import main, with_model
from sglang.embedded import DEFAULT_MODEL_PATH, DFLASH_PATH, EAGLE3_PATH, SEEING_PATH
from sglang.launch_server import report_user_errors
from sglang.srt.errors import UserError
from sglang.srt.server_args import ServerArgs

EMBEDDED = [
    *("--model-path", SEEING_PATH, "--served-model-name", "tiny"),
    *("--tool-call-parser", "auto", "--reasoning-parser", "auto"),
]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], EMBEDDED),
        (["--port", "1"], [*EMBEDDED, "--port", "1"]),
        (["--model-path", "x"], ["--model-path", "x"]),
        (["--model=x"], ["--model=x"]),
        (["--model-p", "x"], ["--model-p", "x"]),
        (["--model-impl", "auto"], [*EMBEDDED, "--model-impl", "auto"]),
        (["--config", "f.yaml"], ["--config", "f.yaml"]),
        (["some/model", "--tp", "2"], ["--model-path", "some/model", "--tp", "2"]),
    ],
)
def test_embedded_model_is_the_default(words: list[str], expected: list[str]) -> None:
    assert with_model(words) == expected


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["--speculative-algorithm", "NEXTN"], DEFAULT_MODEL_PATH),
        (["--speculative-algorithm=EAGLE", "--port", "1"], DEFAULT_MODEL_PATH),
        (["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", "d"], SEEING_PATH),
        (["--speculative-algorithm", "NGRAM"], SEEING_PATH),
        (["--speculative-algorithm"], SEEING_PATH),
    ],
)
def test_drafts_with_the_models_own_layer_take_the_form_that_has_one(
    words: list[str], path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = with_model(words)
    assert given[1] == path and given[len(EMBEDDED) :] == words
    said = capsys.readouterr().err
    assert said.count("\n") == (path == DEFAULT_MODEL_PATH) and ("without eyes" in said) == bool(said)


@pytest.mark.parametrize(("algorithm", "path"), [("EAGLE3", EAGLE3_PATH), ("dflash", DFLASH_PATH)])
def test_the_embedded_drafts_need_no_path(algorithm: str, path: str) -> None:
    words = ["--speculative-algorithm", algorithm]
    draft = ["--speculative-draft-model-path", path]
    assert with_model(words) == [*EMBEDDED, *draft, *words]
    with_own = [*words, "--speculative-draft-model-path", "d"]
    assert with_model(with_own) == [*EMBEDDED, *with_own]
    assert ServerArgs.from_cli(with_model(words)).speculative_draft_model_path == path


def test_user_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise UserError("the value 3 is wrong")

    assert report_user_errors(fail) == 2
    assert capsys.readouterr().err == "error: the value 3 is wrong\n"


def test_a_reader_that_leaves_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang.cli", "version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141 and said == ""


def test_an_interrupt_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    assert report_user_errors(interrupt) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


@pytest.mark.parametrize(
    "words", [["sglang.launch_server", "--model-path", "x"], ["sglang.cli", "serve", "x"], ["sglang.plan"]]
)
def test_an_interrupt_during_imports_is_one_line(words: list[str]) -> None:
    """A module that the import of the arguments needs interrupts it."""
    code = (
        "import runpy, signal, sys, types\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # shells ignore it in the background
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'sglang.srt.hardware':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        f"sys.meta_path.insert(0, Interrupts()); sys.argv = {words!r}\n"
        f"runpy.run_module({words[0]!r}, run_name='__main__', alter_sys=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (130, "Interrupted.\n")


def test_other_errors_pass() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        report_user_errors(fail)


def test_generate_prints_the_answer(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt", "The old gardener", "--max-new-tokens", "4", "--temperature", "0", "--device", "cpu"]
    assert main(["generate", *words]) == 0
    once = capfd.readouterr().out
    assert once.strip()
    with forked_children():
        assert main(["generate", *words]) == 0
    assert capfd.readouterr().out == once


class EndsAtOnce:
    """An engine whose model has nothing to say."""

    def __init__(self, **flags: Any) -> None:
        pass

    def __enter__(self) -> EndsAtOnce:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def generate(self, *asked: Any, **fields: Any) -> Iterator[dict[str, str]]:
        yield {"text": ""}


def test_generate_says_why_nothing_came(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sglang.srt.entrypoints.engine.Engine", EndsAtOnce)
    assert main(["generate", "--prompt", "What is 15+27?"]) == 0
    out, err = capsys.readouterr()
    assert out == "\n" and "without the chat template" in err and "sglang serve" in err


@pytest.mark.parametrize(("words", "names"), [([], True), (["--port", "1"], True), (["some/model"], False)])
def test_serve_says_that_it_chose_the_model(
    words: list[str], names: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sglang.cli.serve", lambda argv, prog: None)
    assert main(["serve", *words]) == 0
    assert ("the small model" in capsys.readouterr().err) == names


def test_no_command_shows_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "serve" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    assert main(["version", "now"]) == 2
