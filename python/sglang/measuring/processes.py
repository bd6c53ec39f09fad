"""Candidates in processes of their own: one that crashes, hangs or breaks its CUDA context harms no other.

A process is forked from a server that has imported what candidates need and touched no GPU, which takes a fraction of a
second. It serves one candidate, for one point after the other: what it has compiled stays.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, Protocol

from sglang.measuring.points import Candidate, Point
from sglang.measuring.rounds import CandidateProblem, Timer

MAX_PROCESSES = 8
"""Processes that wait for their candidate's next point: each holds a CUDA context, about 0.5 GB."""


class Launched(Protocol):
    """A candidate in its process."""

    def problem(self) -> str:
        """Returns what is wrong with its result; "" if nothing is."""

    def seconds(self) -> float:
        """Returns the seconds of the point's ops."""


Launcher = Callable[[Point, Candidate], Launched]
"""Compiles and launches a candidate, in its process. Must be picklable."""


class ProcessBench:
    """As `rounds.Bench`. Used as a context manager, whose end ends all processes."""

    def __init__(self, launcher: Launcher, preload: Sequence[str] = ()) -> None:
        """preload: modules that the server of forks imports."""
        self._launcher = launcher
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._idle: dict[tuple[str, str, str], _CandidateProcess] = {}

    def __enter__(self) -> ProcessBench:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._idle.values():
            process.end()
        self._idle.clear()

    def open(self, point: Point, candidate: Candidate, limit_s: float) -> Timer:
        """Returns the candidate's timer. Raises CandidateProblem, and TimeoutError."""
        key = (point.question.op, point.question.scheme, candidate.name)
        process = self._idle.pop(key, None) or _CandidateProcess(self._context, self._launcher)
        timer = _ProcessTimer(self, key, process)
        process.ask(("open", point, candidate), limit_s)
        return timer

    def keep(self, key: tuple[str, str, str], process: _CandidateProcess) -> None:
        """Keeps an idle process; of too many the one that was kept first ends."""
        self._idle[key] = process
        while len(self._idle) > MAX_PROCESSES:
            self._idle.pop(next(iter(self._idle))).end()


class _ProcessTimer:
    def __init__(self, bench: ProcessBench, key: tuple[str, str, str], process: _CandidateProcess) -> None:
        self._bench, self._key, self._process = bench, key, process

    def seconds(self, limit_s: float) -> float:
        return float(self._process.ask(("time",), limit_s))

    def close(self) -> None:
        if not self._process.ended:
            self._bench.keep(self._key, self._process)


class _CandidateProcess:
    """The parent's end of a candidate's process."""

    def __init__(self, context: Any, launcher: Launcher) -> None:
        self._connection, childs = context.Pipe()
        self._process: ForkServerProcess = context.Process(target=_serve, args=(childs, launcher), daemon=True)
        self._process.start()
        childs.close()
        self.ended = False

    def ask(self, request: tuple[Any, ...], limit_s: float) -> Any:
        """Returns the answer to a request. Without one within `limit_s` seconds the process is killed: TimeoutError.
        Raises CandidateProblem with the reason that it gives, or if it is gone."""
        try:
            self._connection.send(request)
            if not self._connection.poll(limit_s):
                self.end()
                raise TimeoutError
            problem, answer = self._connection.recv()
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            self._process.join(1.0)
            status = self._process.exitcode
            self.end()
            raise CandidateProblem(f"it crashes: its process ended with status {status}") from None
        if problem:
            self.end()
            raise CandidateProblem(problem)
        return answer

    def end(self) -> None:
        """Kills the process."""
        if not self.ended:
            self.ended = True
            self._process.kill()
            self._process.join()
            self._connection.close()


def _serve(connection: Connection, launcher: Launcher) -> None:
    """Serves a candidate: "open" a point, and "time" it. Ends with its parent."""
    launched: Launched | None = None
    while True:
        try:
            request = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            if request[0] == "open":
                launched = None  # its buffers go before the next ones come
                launched = launcher(*request[1:])
                connection.send((launched.problem(), None))
            else:
                assert launched is not None
                connection.send(("", launched.seconds()))
        except KeyboardInterrupt:
            return
        except Exception as error:  # whatever a compiler or a driver raises
            text = str(error).strip().splitlines()[0] if str(error).strip() else ""
            connection.send((f"{type(error).__name__}: {text}"[:300], None))
