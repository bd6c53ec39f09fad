"""Batches made ahead of the trainer, in processes of their own."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tiny_model.mixture import Encoder, Rows, Shape, batch

AHEAD = 3
"""Batches in the making or waiting, for each process."""

_worker: dict[str, Any] = {}


def _start_worker(tokenizer_file: str, shape: Shape, seed: int, only: tuple[str, ...]) -> None:
    _worker.update(encoder=Encoder(Tokenizer.from_file(tokenizer_file)), shape=shape, seed=seed, only=only)


def _make(step: int) -> list[Rows]:
    return batch(_worker["encoder"], _worker["shape"], _worker["seed"], step, _worker["only"])


def batches(
    tokenizer_file: Path, shape: Shape, seed: int, first_step: int, workers: int, only: tuple[str, ...] = ()
) -> Generator[list[Rows], None, None]:
    """The batches of `first_step` and those after it, without end. `workers` 0: made here."""
    if workers == 0:
        encoder = Encoder(Tokenizer.from_file(str(tokenizer_file)))
        step = first_step
        while True:
            yield batch(encoder, shape, seed, step, only)
            step += 1
    # spawn: a forked process would share the state of the GPU's driver.
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _start_worker, (str(tokenizer_file), shape, seed, only)) as pool:
        step = first_step
        waiting: deque[Any] = deque()
        while True:
            while len(waiting) < AHEAD * workers:
                waiting.append(pool.apply_async(_make, (step,)))
                step += 1
            yield waiting.popleft().get(timeout=120)
