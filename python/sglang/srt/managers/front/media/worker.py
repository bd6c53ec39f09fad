"""Main of a process that decodes images and videos, one job after another, until the pipe is closed.

It has a memory limit, and its parent kills it when it takes too long.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np

from sglang.srt.managers.front.job_process import begin_jobs
from sglang.srt.managers.front.media.messages import Decoded, Features, MediaJob, Ready, Refused, Reply
from sglang.srt.towers.pictures.patch_types import as_type
from sglang.srt.towers.pictures.patches import Patches
from sglang.srt.towers.pictures.processor import load_processor
from sglang.srt.towers.pictures.processor_files import ProcessorFiles
from sglang.srt.towers.pictures.video_processor import VideoProcessor
from sglang.srt.utils import shared_array
from sglang.srt.utils.process_limits import limit_memory
from sglang.srt.utils.shared_array import SharedArray

WORKING_BYTES = 4 << 30
"""Memory that a job may take beyond that of the idle process."""
_FRAMES_MIME = "video/jpeg"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of a decoding process."""

    directory: str
    """Directory of the shared arrays."""
    files: ProcessorFiles
    max_bytes: int
    working_bytes: int = WORKING_BYTES
    pixel_dtype: str = "float32"
    """Type in which the encoder takes patches, as named by `patch_types.as_type`."""


class _NoRoom(RuntimeError):
    """Raised when the shared memory is full."""


def run_worker(settings: WorkerSettings, connection: Connection) -> None:
    """Runs the process."""
    begin_jobs()
    # transformers would import torch, which it does not use here: 12 seconds and 300 MB in each worker.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    try:
        worker = _Worker(settings)
    except Exception as error:
        _send(connection, Refused(f"images cannot be prepared for this model: {error}"))
        return
    limit_memory(settings.working_bytes)
    _send(connection, Ready())
    decoder = msgspec.msgpack.Decoder(MediaJob)
    with contextlib.suppress(EOFError, OSError):  # the front is gone
        while True:
            job = decoder.decode(connection.recv_bytes())
            _send(connection, worker.answer(job))


def _send(connection: Connection, reply: Reply) -> None:
    connection.send_bytes(msgspec.msgpack.encode(reply))


class _Worker:
    def __init__(self, settings: WorkerSettings) -> None:
        from sglang.srt.managers.front.media import containers, decoding

        self._decoding, self._containers = decoding, containers
        self._beside = ThreadPoolExecutor(1)  # hashes while numpy computes patches
        self._max_bytes, self._directory = settings.max_bytes, Path(settings.directory)
        self._files, self._pixel_dtype = settings.files, settings.pixel_dtype
        processor = load_processor(settings.files.family)
        self._image = processor.views(settings.files.image, settings.pixel_dtype)
        self._video = None if processor.video is None else VideoProcessor(processor.video, settings.files.video)

    def answer(self, job: MediaJob) -> Reply:
        try:
            return self._image_reply(job) if job.kind == "image" else self._video_reply(job)
        except MemoryError:
            return Refused("an image or a video takes more memory than there is for one; send a smaller one")
        except _NoRoom as error:
            return Refused(f"the server has no room for more images now ({error}); try again later", True)
        except Exception as error:  # libraries raise anything for malicious files
            known = isinstance(error, ValueError)
            return Refused(str(error) if known else f"an image or a video cannot be prepared: {error}")

    def _image_reply(self, job: MediaJob) -> Decoded:
        data = self._decoding.file_bytes(job.data, job.is_base64, self._max_bytes)
        picture = self._decoding.decode_image(data, job.detail)
        content = self._beside.submit(lambda: hashlib.sha256(picture.tobytes()).digest())
        views = self._image(picture)
        items = []
        for number, patches in enumerate(views.patches):
            seen = (repr(self._files.image), (number, picture.size), content.result())
            items.append(self._features(job, patches, seen, num_runs=patches.grid[0]))
        return Decoded(items=items, parts=views.parts)

    def _video_reply(self, job: MediaJob) -> Decoded:
        assert self._video is not None, "the front refuses videos that the model does not take"
        result = self._video(self._opened_video(job))
        num_runs = sum(isinstance(part, int) for part in result.parts)
        pixels = as_type(np.ascontiguousarray(result.patches.pixels, np.float32), self._pixel_dtype)
        seen = ("", result.frame_seconds, hashlib.sha256(pixels.data).digest())
        features = self._features(job, replace(result.patches, pixels=pixels), seen, num_runs, result.frame_seconds)
        return Decoded(items=[features], parts=result.parts)

    def _opened_video(self, job: MediaJob):  # type: ignore[no-untyped-def]
        if job.mime == _FRAMES_MIME and job.is_base64:
            pieces = job.data.split(b",")
            return self._decoding.Pictures(
                [self._decoding.file_bytes(piece, True, self._max_bytes) for piece in pieces]
            )
        return self._containers.open_video(self._decoding.file_bytes(job.data, job.is_base64, self._max_bytes))

    def _features(
        self,
        job: MediaJob,
        patches: Patches,
        seen: tuple[str, object, bytes],
        num_runs: int = 1,
        frame_seconds: float = 0.0,
    ) -> Features:
        """Stores patches, in the encoder's type. seen: what they depend on besides the model's files, and a digest of
        the decoded picture (a quarter of its patches' bytes), or of the patches of a video."""
        pixels = patches.pixels
        digest = hashlib.sha256(repr((job.kind, patches.grid, pixels.shape, seen)).encode())
        return Features(
            grid=patches.grid,
            pixels=self._shared(job, pixels),
            digest=digest.digest(),
            num_runs=num_runs,
            frame_seconds=frame_seconds,
        )

    def _shared(self, job: MediaJob, pixels: np.ndarray) -> SharedArray:
        try:
            return shared_array.write(self._directory, pixels, job.name, self._pixel_dtype)
        except OSError as error:
            raise _NoRoom(error.strerror) from None
