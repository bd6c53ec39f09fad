"""Processes of several ranks, forked from one that has imported what all need: importing it takes seconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import preloaded
import torch.multiprocessing


def run_ranks(work: Callable[..., None], args: tuple[Any, ...], num_ranks: int) -> None:
    """Calls `work(rank, *args)` in a process for each rank, and raises what the first of them to fail raised."""
    torch.multiprocessing.start_processes(
        _run, (dict(os.environ), work, *args), nprocs=num_ranks, start_method="forkserver"
    )


def _run(rank: int, environment: Mapping[str, str], work: Callable[..., None], *args: Any) -> None:
    preloaded.settle()
    os.environ.clear()  # it is that of the first test which forked from this server
    os.environ.update(environment)
    work(rank, *args)
