"""Stores of real libraries with their processes, as `make stores` installs them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from live_server import free_port

INSTALLED = Path(__file__).parents[2] / "build" / "stores"
LIMIT_S = 60.0


def environment() -> dict[str, str]:
    """Returns the environment in which the libraries are found."""
    libraries = INSTALLED / "libraries"
    paths = [INSTALLED / "nixl", INSTALLED / "mooncake"]
    linked = [libraries / "usr/lib/x86_64-linux-gnu", libraries / "lib/x86_64-linux-gnu"]
    return {
        "PYTHONPATH": os.pathsep.join(map(str, [*paths, os.environ.get("PYTHONPATH", "")])),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, [*linked, os.environ.get("LD_LIBRARY_PATH", "")])),
    }


@dataclass
class RealStore:
    """A backend whose processes run."""

    backend: str
    options: dict[str, Any]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def extra(self) -> str:
        return json.dumps({"prefetch_threshold": 64, **self.options})

    def kill(self) -> None:
        """Kills the store's processes, as a crash would."""
        for process in self.processes:
            process.kill()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"{process.args!r} does not listen")


@contextmanager
def running(backend: str, folder: Path) -> Iterator[RealStore]:
    """Runs a store with fresh processes."""
    env = {**os.environ, **environment()}
    store = RealStore(backend, {})

    def start(*command: str, port: int, **more: str) -> None:
        with (folder / f"{backend}.log").open("ab") as log:
            store.processes.append(subprocess.Popen(command, stdout=log, stderr=log, env={**env, **more}))
        _wait_for(port, store.processes[-1])

    try:
        if backend == "nixl":
            store.options = {
                "storage_dir": str(folder / "files"),
                "max_size": "100M",
                "plugin": {"posix": {"active": True}},
            }
        elif backend == "mooncake":
            store.options = {"local_buffer_size": "16MB", **_start_mooncake(start)}
        else:
            port = free_port()
            start(
                sys.executable,
                *("-m", "lmcache.v1.server", "127.0.0.1", str(port)),
                port=port,
                PYTHONPATH=str(INSTALLED / "lmcache"),
            )
            store.options = {"url": f"lm://127.0.0.1:{port}"}
        yield store
    finally:
        store.kill()


def _start_mooncake(start: Any) -> dict[str, Any]:
    """Starts the master, and a client that gives the memory, so that entries outlive the servers."""
    master, metrics, holder = free_port(), free_port(), free_port()
    programs = INSTALLED / "mooncake" / "mooncake"
    start(
        str(programs / "mooncake_master"),
        *(f"--rpc_port={master}", "--rpc_address=127.0.0.1", f"--metrics_port={metrics}", "--metrics_host=127.0.0.1"),
        port=master,
    )
    start(
        str(programs / "mooncake_client"),
        *(f"--master_server_address=127.0.0.1:{master}", "--metadata_server=P2PHANDSHAKE", "--host=127.0.0.1"),
        *("--global_segment_size=256MB", f"--port={holder}"),
        port=holder,
    )
    return {"master_server_address": f"127.0.0.1:{master}", "global_segment_size": 0}
