"""`sglang serve --dry-run`: what a start would decide, and its exit status; nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from srt.kernels import published

from sglang.cli import main
from sglang.srt.utils import log


@pytest.fixture(autouse=True)
def logging_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler would keep the stream that this test captures."""
    monkeypatch.setattr(log, "configure_logging", lambda level: None)


def test_the_embedded_model_would_start_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--dry-run", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "Memory plan of" in printed and printed.endswith("A server with these flags would start.\n")


@pytest.mark.parametrize(
    ("name", "flags", "problem"),
    [
        ("Qwen3-8B", "--tp-size 64", "what works: --tp-size 1"),
        ("Qwen3-235B-A22B", "", "more GPUs (--tp-size 16)"),
        ("Qwen3-8B", "--attention-backend fa3 --strict-backends", "needs wgmma, which sm_120 does not have"),
        ("Qwen3-8B", "--context-length 1000000", "--context-length 1000000 exceeds"),
        ("Qwen3-8B", "--chat-template nothing.jinja", "--chat-template: no such file"),
    ],
)
def test_what_would_not_start_is_refused_with_the_servers_words(
    name: str,
    flags: str,
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_FORCE_ARCH", "rtx-5090")
    model = str(published.any_checkpoint(name, tmp_path / "m"))
    assert main(["serve", "--dry-run", "--model-path", model, *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1 and problem in error


def test_two_gb10s_are_two_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_FORCE_ARCH", "gb10")
    model = str(published.any_checkpoint("Qwen3-8B", tmp_path / "m"))
    assert main(["serve", "--dry-run", "--model-path", model, "--tp", "2", "--skip-tokenizer-init"]) == 2
    assert "asks for 2 GPUs of one machine, and one with a gb10 has 1" in capsys.readouterr().err
    assert main(["serve", "--dry-run", "--model-path", model, "--dp", "2", "--skip-tokenizer-init"]) == 2
    assert "--dp-size 2 --tp-size 1 asks for 2 GPUs of one machine" in capsys.readouterr().err
    assert main(["serve", "--dry-run", "--model-path", model, "--skip-tokenizer-init"]) == 0
