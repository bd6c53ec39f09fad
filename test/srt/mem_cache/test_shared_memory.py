"""Main memory that several processes map."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang.srt.mem_cache.cache_tier import PageMoves
from sglang.srt.mem_cache.copy_engine import part_of
from sglang.srt.mem_cache.shared_memory import SharingFailed, shared_tensor


class Ranks:
    """Threads in place of ranks: `agree` returns the least of what all give."""

    def __init__(self, count: int) -> None:
        self.given: list[Sequence[int]] = []
        self.least: list[int] = []
        self.barrier = threading.Barrier(count, self._choose)

    def _choose(self) -> None:
        self.least = [min(values) for values in zip(*self.given, strict=True)]
        self.given = []

    def agree(self, values: Sequence[int]) -> list[int]:
        self.given.append(values)
        self.barrier.wait(300)
        return self.least


def on_each(count: int, proc: str = "/proc") -> list[torch.Tensor | None]:
    ranks, made = Ranks(count), [None] * count

    def run(rank: int, agree: Callable[[Sequence[int]], list[int]]) -> None:
        try:
            made[rank] = shared_tensor(5000, rank == 0, agree, proc)
        except SharingFailed:
            pass

    threads = [threading.Thread(target=run, args=(rank, ranks.agree)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return made


def test_all_ranks_see_what_one_writes() -> None:
    made = on_each(3)
    for number, tensor in enumerate(made):
        assert tensor is not None and len(tensor) == 5000
        tensor[number * 1000] = number + 1
    assert all(tensor is not None and tensor[[0, 1000, 2000]].tolist() == [1, 2, 3] for tensor in made)


def test_where_one_rank_cannot_map_it_none_has_it(tmp_path: Path) -> None:
    assert on_each(2, str(tmp_path)) == [None, None]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_ranks_share_out_what_is_saved(count: int) -> None:
    for size in (0, 1, 2, 7, 64):
        moves = PageMoves(np.arange(size), np.arange(size) + 100)
        parts = [part_of(moves, rank, count) for rank in range(count)]
        assert np.concatenate([part.sources for part in parts]).tolist() == list(range(size))
        assert all((part.targets == part.sources + 100).all() for part in parts)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
