"""Uploads of the patches of encoder steps to the device.

A thread reads shared arrays into pinned memory and computes patch positions, and a stream of its own copies both to the
device, while the scheduler's thread launches other steps. With two buffers, one part of an encoder step is computed
while the next is copied. Both are allocated at the start and counted in the memory plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import torch

from sglang.srt.plan.media import PATCH_BUFFERS, PATCHES_A_STEP
from sglang.srt.towers.base.encoder import PatchPart
from sglang.srt.towers.base.patch_places import Grid, num_patches
from sglang.srt.utils.shared_array import SharedArray

PlaceArrays = Callable[[Sequence[Grid]], dict[str, np.ndarray]]


class PatchReader:
    """Reads the patches of several shared arrays, one after the other."""

    def __init__(self, files: Sequence[BinaryIO], arrays: Sequence[SharedArray]) -> None:
        """files: opened at their first byte; each is closed after its last value."""
        self._left = deque(
            (file, getattr(torch, array.dtype), int(np.prod(array.shape)))
            for file, array in zip(files, arrays, strict=True)
        )

    def fill(self, values: torch.Tensor) -> None:
        """Reads the next N values into `values`, which lies in host memory, and converts them to its dtype. Raises
        OSError for a file that has become shorter."""
        while len(values):
            file, dtype, left = self._left.popleft()
            count = min(left, len(values))
            if dtype == values.dtype:
                _read(file, values[:count])
            else:
                stored = torch.empty(count, dtype=dtype)
                _read(file, stored)
                values[:count] = stored
            values = values[count:]
            if count < left:
                self._left.appendleft((file, dtype, left - count))
            else:
                file.close()


def _read(file: BinaryIO, values: torch.Tensor) -> None:
    into = memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]  # arrays are buffers
    while into:
        count = file.readinto(into)  # type: ignore[attr-defined]  # of a file without a buffer
        if not count:
            raise OSError("a shared array of patches is shorter than it was")
        into = into[count:]


@dataclass(slots=True)
class _Buffer:
    """A pair of buffers `host`, `device` [values of a part]; without a GPU they are the same tensor. Event `sent`
    follows the last copy from `host`, `used` the last kernel that reads `device`."""

    host: torch.Tensor
    device: torch.Tensor
    sent: torch.cuda.Event | None = None
    used: torch.cuda.Event | None = None


class PatchUploads:
    """Two buffers, a thread and a stream that send encoder parts to the device ahead of their computation."""

    def __init__(self, patch_values: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """patch_values: values per patch. dtype: of the values on the device."""
        self._values = patch_values
        on_gpu = torch.device(device).type == "cuda"
        self._stream = torch.cuda.Stream() if on_gpu else None
        size = PATCHES_A_STEP * patch_values
        hosts = [torch.empty(size, dtype=dtype, pin_memory=on_gpu) for _ in range(PATCH_BUFFERS)]
        self._buffers = [_Buffer(host, torch.empty_like(host, device=device) if on_gpu else host) for host in hosts]
        self._next = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="patches")

    def send(self, reader: PatchReader, parts: Sequence[Sequence[Grid]], places: PlaceArrays) -> Iterator[PatchPart]:
        """Begins to send the parts of an encoder step and returns an iterator over them; `places` is
        `VisionEncoder.places`. A part may be used, by kernels of the then current stream, until the next one is asked
        for. One step at a time."""
        left = deque(parts)
        sent = deque(self._begin(reader, left.popleft(), places) for _ in range(min(PATCH_BUFFERS, len(left))))
        return self._arriving(sent, lambda: self._begin(reader, left.popleft(), places) if left else None)

    def _begin(self, reader: PatchReader, part: Sequence[Grid], places: PlaceArrays) -> _Sent:
        buffer = self._buffers[self._next % PATCH_BUFFERS]
        self._next += 1
        return buffer, self._thread.submit(self._fill, buffer, reader, part, places)

    def _arriving(self, sent: deque[_Sent], begin_next: Callable[[], _Sent | None]) -> Iterator[PatchPart]:
        while sent:
            buffer, future = sent.popleft()
            part = future.result()
            if self._stream is not None:
                assert buffer.sent is not None
                here = torch.cuda.current_stream()
                here.wait_event(buffer.sent)
                for tensor in part.places.values():
                    tensor.record_stream(here)
            try:
                yield part
            finally:
                if self._stream is not None:
                    buffer.used = torch.cuda.current_stream().record_event()
            following = begin_next()
            if following is not None:
                sent.append(following)

    def _fill(self, buffer: _Buffer, reader: PatchReader, part: Sequence[Grid], places: PlaceArrays) -> PatchPart:
        """Fills a buffer and starts its copies, on the upload thread."""
        count = num_patches(part) * self._values
        if buffer.sent is not None:
            buffer.sent.synchronize()
        host, device = buffer.host[:count], buffer.device[:count]
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            reader.fill(host)
            tensors = {name: torch.from_numpy(array) for name, array in places(part).items()}
            if self._stream is not None:
                if buffer.used is not None:
                    self._stream.wait_event(buffer.used)
                device.copy_(host, non_blocking=True)
                tensors = {
                    name: tensor.pin_memory().to(device.device, non_blocking=True) for name, tensor in tensors.items()
                }
                buffer.sent = self._stream.record_event()
        return PatchPart(part, device.view(-1, self._values), tensors)


_Sent = tuple[_Buffer, "Future[PatchPart]"]
