"""Worker threads for work that would block the event loop. Short work passes long work, because some threads take no
other."""

from __future__ import annotations

import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


MAX_LONG_THREADS = 4
"""Limit of the threads for long work with one replica."""


def num_long_threads(num_replicas: int) -> int:
    """Returns how many threads may take a server's long work: at least one a replica, more on large machines."""
    processors = os.cpu_count() or 1
    return max(1, min(processors, max(num_replicas, min(MAX_LONG_THREADS, processors // 4))))


class _Job(NamedTuple):
    work: Callable[[int], Any]
    outcome: Future[Any]


_Waiting = OrderedDict[Future[Any], _Job]
"""Jobs by their outcome, as they came: many may be cancelled at once, and each is found without a search."""


class WorkerThreads:
    """Numbered worker threads. The first `num_short` take short work only; the others take long work first.

    They are daemon threads, so a call that hangs in one does not keep the program from exiting.
    """

    def __init__(
        self, num_threads: int, name: str, num_short: int = 0, first: Callable[[int], None] | None = None
    ) -> None:
        """first(number): called by each thread before any work."""
        assert num_short < num_threads
        self._num_short = num_short
        self._lock = threading.Lock()
        self._short: _Waiting = OrderedDict()
        self._long: _Waiting = OrderedDict()
        self._idle: list[int] = []
        """Numbers of idle threads. The most recently busy one is used first: its memory and core caches are warm."""
        self._next_of: list[queue.SimpleQueue[_Job | None]] = [queue.SimpleQueue() for _ in range(num_threads)]
        self._closed = False
        for number in range(num_threads):
            thread = threading.Thread(target=self._work, args=(number, first), name=f"{name}-{number}", daemon=True)
            thread.start()

    def submit(self, is_long: bool, work: Callable[[int], T]) -> Future[T]:
        """Has a thread call `work(its number)`. The returned future can be cancelled while the work waits."""
        job = _Job(work, Future())
        with self._lock:
            number = next((i for i in reversed(self._idle) if self._takes(i, is_long)), None)
            if self._closed:
                job.outcome.cancel()
            elif number is None:
                waiting = self._long if is_long else self._short
                waiting[job.outcome] = job
                job.outcome.add_done_callback(partial(self._forget, waiting))
            else:
                self._idle.remove(number)
                self._next_of[number].put(job)
        return job.outcome

    def has_waiting(self, number: int) -> bool:
        """Returns whether work waits that this thread may take."""
        return bool(self._short) or (self._takes(number, True) and bool(self._long))

    def close(self) -> None:
        """Cancels waiting work, and lets each thread end after its current one."""
        with self._lock:
            self._closed = True
            jobs = (*self._short.values(), *self._long.values())
            self._short.clear()
            self._long.clear()
            for number in self._idle:
                self._next_of[number].put(None)
        for job in jobs:
            job.outcome.cancel()

    def _forget(self, waiting: _Waiting, outcome: Future[Any]) -> None:
        """Drops a job that was cancelled while it waited. Takes its future, not the job: a reference cycle would
        otherwise keep both from being freed."""
        if outcome.cancelled():
            with self._lock:
                waiting.pop(outcome, None)  # a thread may have taken it meanwhile

    def _takes(self, number: int, is_long: bool) -> bool:
        return not is_long or number >= self._num_short

    def _work(self, number: int, first: Callable[[int], None] | None) -> None:
        if first is not None:
            first(number)
        while (job := self._take(number)) is not None:
            if job.outcome.set_running_or_notify_cancel():
                _resolve(job, number)
            del job  # frees what the job holds before this thread waits

    def _take(self, number: int) -> _Job | None:
        with self._lock:
            if self._closed:
                return None
            for waiting in (self._long, self._short) if self._takes(number, True) else (self._short,):
                if waiting:
                    return waiting.popitem(last=False)[1]
            self._idle.append(number)
        return self._next_of[number].get()


def _resolve(job: _Job, number: int) -> None:
    try:
        result = job.work(number)
    except BaseException as error:  # a library's panic is not an Exception
        job.outcome.set_exception(error)
        del job  # breaks the cycle job - error - this frame, so that all are freed
    else:
        job.outcome.set_result(result)
