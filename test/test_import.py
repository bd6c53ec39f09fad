"""Importing us must be cheap and free of side effects; the command line must answer without loading a framework."""

from __future__ import annotations

import subprocess
import sys

import pytest
from packaging.version import parse

from sglang.version import SGLANG_VERSION, __version__

HEAVY = ("torch", "transformers", "triton", "numpy")


def loaded_after(statement: str) -> tuple[set[str], float]:
    """The heavy modules that a fresh interpreter holds after `statement`, and the seconds that it took."""
    program = (
        "import sys, time\nstart = time.perf_counter()\n"
        f"{statement}\n"
        f"print(time.perf_counter() - start, *(name for name in {HEAVY!r} if name in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seconds, *names = result.stdout.split()
    return set(names), float(seconds)


@pytest.mark.parametrize(
    "module",
    [
        "sglang",
        "sglang.embedded",
        "sglang.cli",
        "sglang.launch_server",
        "sglang.srt.server_args",
        "sglang.srt.configs.model_config",
    ],
)
def test_light_modules_load_no_framework(module: str) -> None:
    names, seconds = loaded_after(f"import {module}")
    assert names == set()
    print(f"import {module}: {seconds:.3f} s")


@pytest.mark.parametrize(
    "module",
    ["sglang.srt.managers.wire.io_struct", "sglang.srt.entrypoints.engine", "sglang.srt.entrypoints.http_server"],
)
def test_the_front_needs_numpy_at_most(module: str) -> None:
    """Embeddings and token ids are arrays."""
    names, _ = loaded_after(f"import {module}")
    assert names <= {"numpy"}


def test_lazy_attributes() -> None:
    import sglang
    from sglang.srt.server_args import ServerArgs

    assert sglang.ServerArgs is ServerArgs
    assert sglang.__version__ == f"{SGLANG_VERSION}+sm120.{__version__}"
    assert parse(sglang.__version__) >= parse("0.5.12"), "trainers compare it"
    with pytest.raises(AttributeError, match="no attribute 'NoSuchThing'"):
        _ = sglang.NoSuchThing


@pytest.mark.parametrize(
    ("arguments", "status", "stream", "expected"),
    [
        (["-m", "sglang.cli", "version"], 0, "stdout", "sm120-sglang "),
        (["-m", "sglang.cli", "serve", "--help"], 0, "stdout", "--cuda-graph-max-bs"),
        (["-m", "sglang.cli", "serve", "--pages-size", "4"], 2, "stderr", "Did you mean --page-size"),
        (["-m", "sglang.cli", "sreve"], 2, "stderr", "unknown command 'sreve'"),
        (["-m", "sglang.launch_server"], 2, "stderr", "--model-path is required"),
        (
            ["-m", "sglang.launch_server", "--model", "/no/such/dir", "--custom-weight-loader", "x"],
            2,
            "stderr",
            "not implemented",
        ),
    ],
)
def test_command_line_answers_shortly(arguments: list[str], status: int, stream: str, expected: str) -> None:
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)
    assert result.returncode == status
    assert expected in getattr(result, stream)
    assert "Traceback" not in result.stderr
