"""Pool of processes that decode images and videos.

Each process has a thread here that waits for it. A job that takes too long, or kills its process, fails alone: the
process and what it wrote are removed, and another process takes its place.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.job_process import JobProcess, ProcessEnded, end_all
from sglang.srt.managers.front.media.messages import Decoded, MediaJob, Ready, Refused, Reply
from sglang.srt.managers.front.media.worker import WorkerSettings, run_worker
from sglang.srt.managers.front.worker_threads import WorkerThreads
from sglang.srt.utils import shared_array

START_LIMIT_S = 180.0


class MediaPool:
    """Decodes media in several processes."""

    def __init__(self, settings: WorkerSettings, num_workers: int, limit_s: float) -> None:
        """Starts the processes without waiting for them; the first of several decodes images only, so that no image
        waits for a video. limit_s: most seconds of a job."""
        self._directory, self._limit_s = Path(settings.directory), limit_s
        self._workers = [_Worker(settings) for _ in range(num_workers)]
        self._threads = WorkerThreads(num_workers, "media", num_short=min(1, num_workers - 1), first=self._start)

    def _start(self, number: int) -> None:
        self._workers[number].start()

    async def decode(self, job: MediaJob) -> Decoded:
        """Decodes an image or video. Raises RequestError: 400 for a file that is refused, 503 if the server has no
        room."""
        future = self._threads.submit(job.kind == "video", partial(self._run, job))
        try:
            reply = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: self._discard(job, done))
            raise
        if isinstance(reply, Refused):
            raise RequestError(reply.message, 503 if reply.is_overload else 400)
        return reply

    def close(self) -> None:
        self._threads.close()
        end_all(worker.process for worker in self._workers)

    @property
    def process_ids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def _run(self, job: MediaJob, number: int) -> Decoded | Refused:
        worker = self._workers[number]
        try:
            reply = worker.run(job, self._limit_s)
        except _WorkerEnded as error:
            reply = Refused(str(error), error.is_overload)
            worker.start()
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
    """One decoding process."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._ready = False
        self.process = JobProcess(run_worker, (settings,), "media")

    def start(self) -> None:
        self.process.start()
        self._ready = False

    def run(self, job: MediaJob, limit_s: float) -> Decoded | Refused:
        """Does a job. Raises _WorkerEnded, after which there is no process."""
        self._wait_ready()
        try:
            reply = self._decoder.decode(self.process.ask(msgspec.msgpack.encode(job), lambda s: s >= limit_s))
        except (ProcessEnded, msgspec.DecodeError) as error:
            self.process.kill()
            if isinstance(error, ProcessEnded) and error.is_late:
                text = f"an image or a video was not decoded within {limit_s:g} s (--mm-per-request-timeout)"
                raise _WorkerEnded(text) from None
            raise _WorkerEnded("an image or a video ended the process that decoded it; it is damaged") from None
        assert not isinstance(reply, Ready)
        return reply

    def _wait_ready(self) -> None:
        if self._ready:
            return
        try:
            reply: Reply | None = self._decoder.decode(self.process.receive(lambda s: s >= START_LIMIT_S))
        except ProcessEnded:
            reply = None
        if not isinstance(reply, Ready):
            self.process.kill()
            text = reply.message if isinstance(reply, Refused) else "the processes for images do not start"
            raise _WorkerEnded(text, True)
        self._ready = True
