"""A server of this checkout in its own process, for as long as a script needs it."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 300.0
"""The first server on a GPU compiles its kernels."""
OURS = (sys.executable, "-m", "sglang.launch_server")


class ServerFailed(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    start_seconds: float
    pid: int

    def info(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/server_info", timeout=60) as reply:
            found: dict[str, Any] = json.load(reply)
        return found

    def kill(self) -> None:
        """Ends it and its ranks at once, which frees its GPU memory for others."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def first_gpu() -> dict[str, str]:
    """The environment in which the first of the GPUs that this process sees is the only one."""
    return {"CUDA_VISIBLE_DEVICES": nth_gpu(0)}


def nth_gpu(number: int) -> str:
    """Its name in CUDA_VISIBLE_DEVICES, which may already leave some out."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",")[number] if seen else str(number)


def checkout_env(**more: str) -> dict[str, str]:
    """The environment in which `python -m sglang...` is this checkout's."""
    path = os.pathsep.join(filter(None, (str(ROOT / "python"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", **more}


@contextmanager
def served(
    model: Path,
    log: Path,
    flags: Sequence[str] = (),
    limit_s: float = START_LIMIT_S,
    command: Sequence[str] = OURS,
    **environment: str,
) -> Iterator[Server]:
    """`command`: what starts a server when flags are put behind it. Raises ServerFailed, with the end of `log`, if the
    server does not come up within `limit_s`."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    words = [*command, "--model-path", str(model), "--port", str(port), *flags]
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=file, env=checkout_env(**environment), start_new_session=True
        )
    try:
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() - started > limit_s:
                raise ServerFailed(f"the server of {model} did not come up; {log} ends with\n{_end(log)}")
            time.sleep(0.2)
        yield Server(url, time.monotonic() - started, process.pid)
    finally:
        _stop(process)


def _free_port() -> int:
    """None that the system gives to connections: SGLang has a second port 10,000 above, which must be one too."""
    for port in random.sample(range(15_000, 30_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
