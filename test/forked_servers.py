"""Servers whose processes are forked from one that has imported what they need: importing it takes them seconds.

A forked server's tree of processes is that of a fresh one but for a process between the front and its ranks, from which
these are forked. Where a test is about starting, or about what a process imports or looks like, it takes a fresh one.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import multiprocessing.context
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.popen_forkserver import Popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import preloaded

from sglang.srt.utils.process_limits import die_with_parent


class ForkedServer:
    """`python LAUNCH... WORDS...` in a session of its own, which writes to `log`. launch: a script, or -m and a module.
    Has of `subprocess.Popen` what tests use."""

    def __init__(
        self, launch: Sequence[str], words: Sequence[str], log: Path, environment: Mapping[str, str], errors: str = ""
    ) -> None:
        """errors: the file of its standard error; empty: `log` too."""
        context = multiprocessing.get_context("forkserver")
        call = (list(launch), list(words), str(log), errors or str(log), dict(environment), os.getcwd())
        self._process = context.Process(target=_serve, args=call, daemon=False)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked server", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


class ForkedProgram(ForkedServer):
    """As `subprocess.Popen([python, "-m", MODULE, *words], stdout=PIPE, stderr=FILE, text=True)`. In a process that was
    forked itself, `start_fork_server` comes first, before it has threads."""

    def __init__(self, command: Sequence[str], *, stdout: int, stderr: IO[str], text: bool) -> None:
        assert command[1] == "-m" and stdout == subprocess.PIPE and text
        self._folder = tempfile.TemporaryDirectory()
        self._pipe = Path(self._folder.name, "stdout")
        os.mkfifo(self._pipe)
        errors = f"/proc/{os.getpid()}/fd/{stderr.fileno()}"
        super().__init__(command[1:3], command[3:], self._pipe, os.environ, errors)

    @property
    def stdout(self) -> Iterator[str]:
        """To be read once."""
        with self._pipe.open() as lines:
            yield from lines


def forked_command(
    launch: Sequence[str], words: Sequence[str], log: Path, environment: Mapping[str, str], limit_s: float
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of `python LAUNCH... WORDS...`; its `stdout` is all that was written, errors too."""
    process = ForkedServer(launch, words, log, environment)
    try:
        status = process.wait(limit_s)
    finally:
        process.kill()
    return subprocess.CompletedProcess([*launch, *words], status, log.read_text(), "")


@contextmanager
def forked_children() -> Iterator[None]:
    """While it lasts, processes that are to be spawned, of an engine of this process, are forked instead."""
    # Started with the first child it would have the signals blocked that a child starts with, and so would each fork.
    forkserver.ensure_running()
    spawned = multiprocessing.context.SpawnProcess.__dict__["_Popen"]  # the static method, not its function
    multiprocessing.context.SpawnProcess._Popen = staticmethod(_fork)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        multiprocessing.context.SpawnProcess._Popen = spawned  # type: ignore[method-assign,assignment]


def _serve(
    launch: list[str], words: list[str], log: str, errors: str, environment: Mapping[str, str], folder: str
) -> None:
    preloaded.settle()
    os.setsid()
    os.chdir(folder)
    _take(environment)
    for number, file in ((1, log), (2, errors)):
        with open(file, "ab") as to:
            os.dup2(to.fileno(), number)
    start_fork_server()
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    sys.argv = [launch[-1], *words]
    with forked_children():
        try:
            if launch[0] == "-m":
                runpy.run_module(launch[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(launch[0], run_name="__main__")
        finally:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()


def start_fork_server() -> None:
    """Forks the process that this one's children will be forked from. It ends with this one, and so do children that
    would end with a parent which had spawned them: one that computes without end keeps a processor from other tests."""
    own = forkserver._forkserver  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(multiprocessing.connection.arbitrary_address("AF_UNIX"))
        listener.listen()
        alive_r, alive_w = os.pipe()
        key = _shared_key()
        assert len(os.listdir("/proc/self/task")) == 1, "a fork has only one of several threads, and all of their locks"
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            os.close(alive_w)
            os.close(own._forkserver_alive_fd)
            try:
                forkserver.main(listener.detach(), alive_r, preload=[], **key)
            finally:
                os._exit(0)
        for fd in (alive_r, *key.values()):
            os.close(fd)
        own._forkserver_address = listener.getsockname()
        own._forkserver_alive_fd, own._forkserver_pid = alive_w, pid


def _shared_key() -> dict[str, int]:
    """Returns the argument by which the process that is forked from learns the key that this one shows it from Python
    3.14 on."""
    own = forkserver._forkserver  # type: ignore[attr-defined]
    if not hasattr(own, "_forkserver_authkey"):
        return {}
    own._forkserver_authkey = os.urandom(forkserver._AUTHKEY_LEN)  # type: ignore[attr-defined]
    reader, writer = os.pipe()
    os.write(writer, own._forkserver_authkey)
    os.close(writer)
    return {"authkey_r": reader}


def _fork(process: BaseProcess) -> Popen:
    process._target = functools.partial(_with_environment, dict(os.environ), process._target)  # type: ignore[attr-defined]
    return Popen(process)


def _with_environment(environment: Mapping[str, str], work: Callable[..., None], *args: Any) -> None:
    preloaded.settle()
    _take(environment)
    work(*args)


def _take(environment: Mapping[str, str]) -> None:
    """It is that of the process which the server of the forks was started by."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
