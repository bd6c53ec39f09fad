"""A real server in its own process, for tests that talk to it over a socket."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from forked_servers import ForkedServer

from sglang.embedded import DEFAULT_MODEL_PATH

START_LIMIT_S = 600.0
PATIENCE_S = 300.0
"""For whatever else takes a moment on a machine that has nothing else to do."""
LAUNCH = ("-m", "sglang.launch_server")
PYTHON_ROOT = str(Path(__file__).parents[1] / "python")


# Requests that name no limit: httpx gives up after five seconds of silence, which a busy machine takes.
for part in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, part, PATIENCE_S)

_claims: deque[socket.socket] = deque(maxlen=100)
"""Of the last ports that this process was given."""


def free_port(*further: int) -> int:
    """A port that nothing has now, nor those at distances of `further` above it, and that no other process of the tests
    is given. Not one of those that the system gives to connections: until a server binds it, another test's connection
    may have it."""
    for _ in range(100):
        port = 15_000 + secrets.randbelow(15_000)
        with suppress(OSError):
            _claims.extend([_claim(port + distance) for distance in (0, *further)])
            return port
    raise RuntimeError("no port is free")


def _claim(port: int) -> socket.socket:
    """While the result is open, other processes get an OSError here, as this one does if something has the port."""
    claim = socket.socket(socket.AF_UNIX)
    claim.bind(f"\0sglang-test-port-{port}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
    return claim


class LiveServer:
    """`python -m sglang.launch_server` with the embedded model on the CPU and further `flags`.

    In float32, so that batch mates cannot turn a tie between two tokens. `launch` are the words after `python` that
    start it. Its processes are forked from one that has imported everything, unless it is to be `fresh`.
    """

    def __init__(
        self, *flags: str, port: int | None = None, launch: Sequence[str] = LAUNCH, fresh: bool = False
    ) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = Path(tempfile.mkdtemp(prefix="sglang-test-")) / "log"
        model = [] if "--model-path" in flags else ["--model-path", DEFAULT_MODEL_PATH]
        fixed = ["--device", "cpu", "--dtype", "float32", "--port", str(self.port)]
        words = [*fixed, *model, *flags]
        paths = [PYTHON_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        environment.setdefault("SGLANG_END_TIMEOUT", str(PATIENCE_S))  # of a busy machine, too, it ends in order
        environment["SGLANG_TORCH_PROFILER_DIR"] = environment["TMPDIR"] = str(self.log_path.parent)
        self.started = time.monotonic()
        self.start_seconds = 0.0
        self.process: subprocess.Popen[bytes] | ForkedServer
        if not fresh:
            self.process = ForkedServer(launch, words, self.log_path, environment)
            return
        command = [sys.executable, *launch, *words]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def wait_up(self) -> LiveServer:
        """Until `/health` says 200; fails with the log."""
        while time.monotonic() - self.started < START_LIMIT_S:
            if self.process.poll() is not None:
                break
            if self.health() == 200:
                self.start_seconds = time.monotonic() - self.started
                return self
            time.sleep(0.05)
        raise AssertionError(f"the server did not come up, status {self.process.poll()}:\n{self.log()}")

    def health(self) -> int:
        """The status of `/health`; 0: nobody listens."""
        try:
            return httpx.get(f"{self.url}/health", timeout=PATIENCE_S).status_code
        except httpx.TransportError:
            return 0

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_exit(self, limit_s: float = PATIENCE_S) -> int:
        return self.process.wait(limit_s)

    def end(self) -> None:
        """Kill what is left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(300)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def fresh_server(*flags: str, port: int | None = None) -> LiveServer:
    return LiveServer(*flags, port=port, fresh=True)


@contextmanager
def live_server(*flags: str, fresh: bool = False) -> Iterator[LiveServer]:
    server = LiveServer(*flags, fresh=fresh)
    try:
        yield server.wait_up()
    finally:
        server.end()
