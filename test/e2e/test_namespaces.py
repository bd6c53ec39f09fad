"""Two machines as network namespaces of one host, with a cable between them: what goes wrong there is said within a
minute, and nothing is left behind. Needs the right to make namespaces; skipped without."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
from live_server import LiveServer, free_port, fresh_server
from seen_pictures import RIGHT, seeing_server, seen
from shared_files import arrays_of

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
LIMIT_S = 300.0
"""Within which an error is said, with the start of the processes on a busy machine of two processors."""
WAIT_S = 10
"""Seconds that the machines wait for one another here."""
LEAVING_S = 60.0
"""In which helpers of a process that has ended go, too."""
FAILED = (1, 2)
"""Statuses of a server that does not start: a process of it says why, or it does so itself."""
PORT = 50000
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PROMPTS = ("What is 431 + 88?", "The capital of France is", "a b c d e f g h i j k l")


class Machine:
    """A network namespace. A thread of it, so that what it starts and connects to is in there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._pool = ThreadPoolExecutor(1)
        self.do(self._enter)

    def _enter(self) -> None:
        with Path(f"/run/netns/{self.name}").open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def do(self, work: Callable[..., T], *args: object) -> T:
        return self._pool.submit(work, *args).result()

    def end(self) -> None:
        self._pool.shutdown()


def _run(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    names = [f"sglang-{os.getpid()}-{number}" for number in range(2)]
    made: list[Machine] = []
    try:
        try:
            for name in names:
                _run("netns", "add", name)
            _run(
                "link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1", "netns", names[1]
            )
        except OSError as error:
            pytest.skip(f"no right to make network namespaces: {error}")
        for number, name in enumerate(names):
            _run("-n", name, "link", "set", "lo", "up")
            _run("-n", name, "addr", "add", f"{ADDRESSES[number]}/24", "dev", f"cable{number}")
            _run("-n", name, "link", "set", f"cable{number}", "up")
            made.append(Machine(name))
        yield made
    finally:
        for machine in made:
            machine.end()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextmanager
def started(
    machines: list[Machine], *each: tuple[str, ...] | None, start: Callable[..., LiveServer] = fresh_server
) -> Iterator[list[LiveServer]]:
    """A server of two ranks, with the flags of each machine; None: it is not started. Nothing of it is left."""
    servers = []
    for rank, (machine, own) in enumerate(zip(machines, each, strict=True)):
        if own is not None:
            address = () if "--dist-init-addr" in own else ("--dist-init-addr", f"{ADDRESSES[0]}:{PORT}")
            words = ("--tp-size", "2", "--nnodes", "2", "--node-rank", str(rank), *address, *own)
            servers.append(machine.do(lambda words=words: start(*words, port=free_port())))
    try:
        yield servers
    finally:
        for server in servers:
            server.end()
        for server in servers:
            assert not list(server.log_path.parent.glob("sglang-*")), "sockets are left"
            end = time.monotonic() + LEAVING_S
            while _of_group(server.process.pid) and time.monotonic() < end:
                time.sleep(0.1)
            assert not _of_group(server.process.pid), "processes are left"


def _of_group(leader: int) -> list[int]:
    """Processes of the session that a server had."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] not in "ZX":
            found.append(int(stat.parent.name))
    return found


def _said(server: LiveServer) -> str:
    return " ".join(server.log().split())


def answers(url: str) -> list[str]:
    body = {"sampling_params": {"max_new_tokens": 16, "temperature": 0.0}}
    return [httpx.post(f"{url}/generate", json={"text": text, **body}, timeout=300).json()["text"] for text in PROMPTS]


@pytest.mark.thorough
def test_two_namespaces_serve_and_end_together(machines: list[Machine]) -> None:
    """A machine that dies takes the other one down."""
    with started(machines, (), (), start=seeing_server) as (first, second):
        machines[0].do(first.wait_up)
        found = machines[0].do(answers, first.url)
        assert all(found) and found == machines[0].do(answers, first.url), "once more, from the cache"
        assert machines[0].do(seen, first.url) == RIGHT, "pictures cross the cable"
        end = time.monotonic() + LEAVING_S
        while any(arrays_of(each.log_path.parent) for each in (first, second)):
            assert time.monotonic() < end, "pixels are left"
            time.sleep(0.1)
        second.process.send_signal(signal.SIGKILL)
        assert first.wait_exit(LIMIT_S) == 1
        assert "the scheduler TP0 process failed: " in first.log()


@pytest.mark.thorough
def test_a_cable_that_breaks_ends_both(machines: list[Machine]) -> None:
    """Nothing closes a connection then."""
    with started(machines, ("--watchdog-timeout", "15"), ("--watchdog-timeout", "15")) as (first, second):
        machines[0].do(first.wait_up)
        _run("-n", machines[1].name, "link", "set", "cable1", "down")
        assert first.wait_exit(LIMIT_S) == 1 and second.wait_exit(LIMIT_S) == 1


@pytest.mark.thorough
def test_a_missing_machine_is_named(machines: list[Machine]) -> None:
    wait = ("--dist-timeout", str(WAIT_S))
    with started(machines, wait, None) as (first,):
        assert first.wait_exit(LIMIT_S) in FAILED
        assert f"of 2 ranks, 1 did not come within {WAIT_S} s" in _said(first)
    with started(machines, None, wait) as (second,):
        assert second.wait_exit(LIMIT_S) in FAILED
        assert f"no server answers there within {WAIT_S} s" in _said(second)


@pytest.mark.thorough
@pytest.mark.parametrize("address", ["10.77.0.9", "10.78.0.1", "10.77.0.2"])
def test_a_wrong_address_is_said(address: str, machines: list[Machine]) -> None:
    """Of nobody, of no network that the machine knows, and its own."""
    wrong = ("--dist-init-addr", f"{address}:{PORT}", "--dist-timeout", str(WAIT_S))
    with started(machines, None, wrong) as (second,):
        assert second.wait_exit(LIMIT_S) in FAILED
        assert f"--dist-init-addr {address}" in _said(second)


@pytest.mark.thorough
def test_another_version_is_refused(machines: list[Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sglang.version\nsglang.version.__version__ = '0.0.1'\n")
    with started(machines, (), None) as (first,):
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with started(machines, None, ()) as (second,):
            assert second.wait_exit(LIMIT_S) in FAILED and first.wait_exit(LIMIT_S) in FAILED
            for said in (_said(first), _said(second)):
                assert "rank 0 (machine 0) and rank 1 (machine 1) are not started alike: version: " in said
                assert " and 0.0.1. All ranks of a server need the same release" in said


@pytest.mark.thorough
def test_a_taken_port_is_said(machines: list[Machine]) -> None:
    taken = machines[0].do(socket.create_server, (ADDRESSES[0], PORT))
    try:
        with started(machines, (), None) as (first,):
            assert first.wait_exit(LIMIT_S) == 2
            assert "with a port that nothing uses" in _said(first)
    finally:
        taken.close()
