"""The processes that decode images and videos.

Each has a thread here that waits for it. One that takes too long, or dies, fails its job alone: it is killed, what it
wrote is removed, and another one takes its place.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.media.messages import Decoded, MediaJob, Ready, Refused, Reply
from sglang.srt.managers.front.media.worker import WorkerSettings, run_worker
from sglang.srt.utils import shared_array

START_LIMIT_S = 180.0


class MediaPool:
    def __init__(self, settings: WorkerSettings, num_workers: int, limit_s: float) -> None:
        """Starts the processes, and does not wait for them. limit_s: seconds that a job may take."""
        self._directory, self._limit_s = Path(settings.directory), limit_s
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="media")
        self._workers = [_Worker(settings) for _ in range(num_workers)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        """The one that was busy last goes first: its memory and the caches of its core are warm."""
        self._closed = False
        for worker in self._workers:
            worker.start()
            self._idle.put(worker)

    async def decode(self, job: MediaJob) -> Decoded:
        """Raises RequestError: 400 for a file that is refused, 503 where the server has no room."""
        future = self._threads.submit(self._run, job)
        try:
            reply = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: self._discard(job, done))
            raise
        if isinstance(reply, Refused):
            raise RequestError(reply.message, 503 if reply.is_overload else 400)
        return reply

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    @property
    def process_ids(self) -> list[int]:
        return [worker.process.pid or 0 for worker in self._workers if worker.process is not None]

    def _run(self, job: MediaJob) -> Decoded | Refused:
        worker = self._idle.get()
        try:
            reply = worker.run(job, self._limit_s)
        except _WorkerEnded as error:
            reply = Refused(str(error), error.is_overload)
            if not self._closed:
                worker.start()
        finally:
            self._idle.put(worker)
        if isinstance(reply, Refused):
            shared_array.remove_all(self._directory, job.name)
        return reply

    def _discard(self, job: MediaJob, done: Future[Decoded | Refused]) -> None:
        """Removes the shared arrays of a job that nobody waits for any more."""
        if not done.cancelled():
            shared_array.remove_all(self._directory, job.name)


class _WorkerEnded(RuntimeError):
    def __init__(self, message: str, is_overload: bool = False) -> None:
        super().__init__(message)
        self.is_overload = is_overload


class _Worker:
    """One process and its pipe."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._ready = False
        self.process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def start(self) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=True)
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=run_worker, args=(self._settings, theirs), name="media", daemon=True)
        self.process.start()
        theirs.close()
        self._pipe, self._ready = ours, False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
        if self._pipe is not None:
            with suppress(OSError):
                self._pipe.close()

    def run(self, job: MediaJob, limit_s: float) -> Decoded | Refused:
        """Raises _WorkerEnded, after which there is no process."""
        self._wait_ready()
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode(job))
            reply = self._receive(limit_s)
        except (OSError, EOFError, msgspec.DecodeError):
            self.kill()
            raise _WorkerEnded("an image or a video ended the process that decoded it; it is damaged") from None
        if reply is None:
            self.kill()
            raise _WorkerEnded(f"an image or a video was not decoded within {limit_s:g} s (--mm-per-request-timeout)")
        assert not isinstance(reply, Ready)
        return reply

    def _wait_ready(self) -> None:
        end = time.monotonic() + START_LIMIT_S
        while not self._ready:
            try:
                reply = self._receive(end - time.monotonic())
            except (OSError, EOFError):
                reply = None
            if not isinstance(reply, Ready):
                self.kill()
                text = reply.message if isinstance(reply, Refused) else "the processes for images do not start"
                raise _WorkerEnded(text, True)
            self._ready = True

    def _receive(self, limit_s: float) -> Reply | None:
        """None: nothing came in this time."""
        assert self._pipe is not None
        if not self._pipe.poll(max(0.0, limit_s)):
            return None
        reply: Reply = self._decoder.decode(self._pipe.recv_bytes())
        return reply
