"""Reads tensors of files into parameters, several at a time where these lie in main memory."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

READERS = 4
"""Tensors that are read at a time: a file's pages come on demand, so one reader alone waits for each of them."""
WAITING = 64
"""Most tensors that wait to be read."""


class Reads:
    """Copies whose sources are read from files while they are made. Copies to a GPU are made at once."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[None]] = deque()

    def copy(self, target: torch.Tensor, source: torch.Tensor, later: bool) -> None:
        """Copies a tensor. later: beside others, until `wait` is called."""
        if not later:
            target.copy_(source)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READERS, "weights")
        self._waiting.append(self._pool.submit(_copy, target, source))
        if len(self._waiting) > WAITING:
            self._waiting.popleft().result()

    def wait(self) -> None:
        """Waits for all copies. Raises what they raised."""
        while self._waiting:
            self._waiting.popleft().result()

    def __enter__(self) -> Reads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.inference_mode():  # which is a thread's own
        target.copy_(source)
