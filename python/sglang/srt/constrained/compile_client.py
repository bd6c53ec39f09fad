"""Client of the compile process: starts it, sends it grammars and receives verdicts, without blocking its caller."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import NamedTuple

import msgspec

from sglang.srt.constrained.compile_process import Cancel, Job, Setup, Verdict
from sglang.srt.constrained.grammar import GrammarKey

logger = logging.getLogger(__name__)

_DIED = Verdict(error="The process that compiles grammars died. Send the request again.", status_code=500)


class Check(NamedTuple):
    """A grammar that is being verified."""

    id: int
    verdict: Future[Verdict]


class _Process:
    """One run of the compile process. It inherits no descriptor but its end of the pipe, and no device."""

    def __init__(self, setup: Setup) -> None:
        self.pipe, theirs = multiprocessing.Pipe(duplex=True)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "1",  # arenas reserve address space, which is limited
        }
        command = [sys.executable, "-m", "sglang.srt.constrained.compile_process", str(theirs.fileno())]
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=environment,
            start_new_session=True,  # an interrupt at the terminal is the parent's to handle
        )
        theirs.close()
        self.checks: dict[int, Future[Verdict]] = {}
        self.pipe.send_bytes(msgspec.msgpack.encode(setup))


class CompileClient:
    """Has grammars verified. The process starts with `start_ahead` or the first submitted grammar, and again after it
    died."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._process: _Process | None = None
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="grammar-sender")
        self._closed = False

    @property
    def process_id(self) -> int | None:
        """Returns the id of the compile process; None if none runs."""
        return None if self._process is None else self._process.popen.pid

    def start_ahead(self) -> None:
        """Starts the process, which then loads what it needs."""
        self._sender.submit(self._ensure_started)

    def submit(self, key: GrammarKey) -> Check:
        """Sends a grammar to be verified. The verdict's future never raises."""
        check = Check(next(self._ids), Future())
        self._sender.submit(self._send, check, key)
        return check

    def cancel(self, check: Check) -> None:
        """Cancels a check that nobody waits for. Its future never gets a result."""
        self._sender.submit(self._send_cancel, check.id)

    def close(self) -> None:
        """Ends the process and everything under way."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.popen.kill()
        self._sender.shutdown(wait=False, cancel_futures=True)

    # --- in the sender's thread: a pipe to a process that is starting may be full -------------------------------------

    def _ensure_started(self, check: Check | None = None) -> _Process | None:
        """Returns the process, which will answer `check`; None if it cannot be started."""
        with self._lock:
            if self._closed:
                return None
            if self._process is None:
                try:
                    self._process = self._start()
                except OSError as error:
                    logger.error("The process that compiles grammars cannot be started: %s", error)
                    if check is not None:
                        check.verdict.set_result(_DIED)
                    return None
            if check is not None:
                self._process.checks[check.id] = check.verdict
            return self._process

    def _send(self, check: Check, key: GrammarKey) -> None:
        process = self._ensure_started(check)
        if process is not None:
            self._try_send(process.pipe, Job(check.id, key.kind, key.source))

    def _send_cancel(self, check_id: int) -> None:
        with self._lock:
            process = self._process
            if process is None or process.checks.pop(check_id, None) is None:
                return
        self._try_send(process.pipe, Cancel(check_id))

    def _try_send(self, pipe: Connection, message: Job | Cancel) -> None:
        try:
            pipe.send_bytes(msgspec.msgpack.encode(message))
        except OSError:
            pass  # it died: the reader notices and answers the checks

    def _start(self) -> _Process:
        process = _Process(self._setup)
        threading.Thread(target=self._read, args=(process,), name="grammar-reader", daemon=True).start()
        return process

    # --- in the reader's thread ---------------------------------------------------------------------------------------

    def _read(self, process: _Process) -> None:
        decode: Callable[[bytes], Verdict] = msgspec.msgpack.Decoder(Verdict).decode
        try:
            while True:
                verdict = decode(process.pipe.recv_bytes())
                with self._lock:
                    future = process.checks.pop(verdict.id, None)
                if future is not None:
                    future.set_result(verdict)
        except (EOFError, OSError):
            pass
        with self._lock:
            lost, process.checks = process.checks, {}
            if self._process is process:
                self._process = None
            closed = self._closed
        process.pipe.close()
        status = process.popen.wait()
        if not closed:
            logger.error(
                "The process that compiles grammars died (status %d); the next grammar starts it again.", status
            )
        for future in lost.values():
            future.set_result(_DIED)
