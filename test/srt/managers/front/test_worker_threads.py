"""Short work passes long work, and nobody's work is lost."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from types import FrameType
from typing import Any

import pytest

from sglang.srt.managers.front.worker_threads import WorkerThreads


@pytest.fixture
def make() -> Iterator[Callable[..., WorkerThreads]]:
    made: list[WorkerThreads] = []

    def threads(num_threads: int, num_short: int = 0) -> WorkerThreads:
        made.append(WorkerThreads(num_threads, "test", num_short))
        return made[-1]

    yield threads
    for each in made:
        each.close()


def test_short_work_passes_long_work(make: Callable[..., WorkerThreads]) -> None:
    threads, go = make(2, num_short=1), threading.Event()
    long = [threads.submit(True, lambda number: (number, go.wait(300))) for _ in range(16)]
    assert [threads.submit(False, lambda number: number).result(300) for _ in range(3)] == [0, 0, 0]
    assert not any(future.done() for future in long)
    go.set()
    assert [future.result(300) for future in long] == [(1, True)] * 16


def test_long_work_is_not_held_up_by_a_stream_of_short_work(make: Callable[..., WorkerThreads]) -> None:
    threads, go, order = make(1), threading.Event(), list[str]()
    threads.submit(True, lambda _: go.wait(300))
    waiting = [threads.submit(kind == "long", lambda _, kind=kind: order.append(kind)) for kind in ("short", "long")]
    go.set()
    for future in waiting:
        future.result(300)
    assert order == ["long", "short"]


def test_a_panic_is_the_outcome_of_its_job_alone(make: Callable[..., WorkerThreads]) -> None:
    class Panic(BaseException):
        pass

    def panics(_: int) -> None:
        raise Panic

    threads = make(1)
    with pytest.raises(Panic):
        threads.submit(True, panics).result(300)
    assert threads.submit(True, lambda number: number).result(300) == 0


def test_what_waits_is_cancelled_when_the_threads_close(make: Callable[..., WorkerThreads]) -> None:
    threads, began, go = make(1), threading.Event(), threading.Event()
    threads.submit(True, lambda _: began.set() or go.wait(300))
    assert began.wait(300)
    waiting = threads.submit(False, lambda _: None)
    assert threads.has_waiting(0)
    threads.close()
    go.set()
    for future in (waiting, threads.submit(False, lambda _: None)):
        with pytest.raises(CancelledError):
            future.result(300)


def test_a_program_ends_although_a_job_does_not() -> None:
    program = (
        "import threading; from sglang.srt.managers.front.worker_threads import WorkerThreads;"
        "threads = WorkerThreads(1, 'x'); threads.submit(True, lambda _: threading.Event().wait()); threads.close()"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=300).returncode == 0


def test_an_error_keeps_nothing_of_its_job(make: Callable[..., WorkerThreads]) -> None:
    """Without a collection: what a large body left behind would stay until the next, and cut memory to pieces."""

    class Body:
        pass

    def fails(body: Body, _: int) -> None:
        raise ValueError("no")

    async def ask(threads: WorkerThreads) -> weakref.ref[Body]:
        body = Body()
        with contextlib.suppress(ValueError):
            await asyncio.wrap_future(threads.submit(True, functools.partial(fails, body)))
        return weakref.ref(body)

    threads = make(1)
    gc.disable()
    try:
        kept = asyncio.run(ask(threads))
        threads.submit(True, lambda _: None).result(300)  # the thread is behind its job
        assert kept() is None
    finally:
        gc.enable()


def test_work_that_nobody_wants_any_more_does_not_wait(make: Callable[..., WorkerThreads]) -> None:
    """Who sends large bodies and leaves would fill the memory while one takes long, and make that one give way."""

    class Body:
        pass

    threads, began, go = make(1), threading.Event(), threading.Event()
    threads.submit(True, lambda _: began.set() or go.wait(300))
    assert began.wait(300)
    body = Body()
    kept = weakref.ref(body)
    futures = [threads.submit(is_long, functools.partial(lambda body, _: None, body)) for is_long in (True, False)]
    del body
    for future in futures:
        assert threads.has_waiting(0)
        assert future.cancel()
    del future, futures
    assert not threads.has_waiting(0)
    assert kept() is None
    go.set()
    assert threads.submit(True, lambda number: number).result(300) == 0


def test_a_cancelled_job_is_found_without_a_search(make: Callable[..., WorkerThreads]) -> None:
    def num_lines(num_waiting: int) -> int:
        """Returns how many lines of Python run when the job that came last is cancelled."""
        lines = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal lines
            lines += event == "line"
            return trace

        threads, go = make(1), threading.Event()
        threads.submit(True, lambda _: go.wait(300))
        waiting = [threads.submit(True, lambda _: None) for _ in range(num_waiting)]
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            waiting[-1].cancel()
        finally:
            sys.settrace(before)
            go.set()
        return lines

    assert num_lines(500) == num_lines(5)
