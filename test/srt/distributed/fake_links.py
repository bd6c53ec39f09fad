"""Links between ranks of a CPU, processes or threads, each with one defect of the first pair or none."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from sglang.srt.distributed.custom_all_reduce import StalledPeer, exchange
from sglang.srt.distributed.peer_checks import LIBRARY, PATTERN_WORDS


class Meeting:
    """Threads that tell one another bytes. Once one has left, nobody waits for it."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._told = threading.Barrier(ranks, timeout=60.0), [b""] * ranks

    def exchange(self, rank: int, data: bytes) -> list[bytes]:
        self._told[rank] = data
        self._barrier.wait()
        answers = list(self._told)
        self._barrier.wait()
        return answers

    def leave(self) -> None:
        self._barrier.abort()


class FakeLinks:
    """What is written arrives with the next barrier. `defect` is of what rank 0 writes to rank 1; `tell` exchanges
    bytes with the other ranks."""

    ways = ("packed", "two_shot", LIBRARY)

    def __init__(self, rank: int, ranks: int, defect: str, tell: Callable[[bytes], list[bytes]]) -> None:
        self.rank, self.ranks, self.defect, self.tell = rank, ranks, defect, tell
        self.memory = torch.zeros(ranks, PATTERN_WORDS, dtype=torch.int32)
        self.sent: dict[int, torch.Tensor] = {}
        self.last: dict[str, torch.Tensor] = {}
        self.writes = 0
        if defect == "refused" and rank == 1:
            raise RuntimeError("peer access is not supported between these two devices")

    def write(self, peer: int, words: torch.Tensor) -> None:
        if (self.rank, peer) == (0, 1):
            self.writes += 1
            if self.defect == "hanging write":
                time.sleep(1000)
            if self.defect == "copy that does not end":
                raise StalledPeer("a copy has not ended", 0)
            if self.defect == "own buffer":
                self.memory[self.rank] = words
                return
            if self.defect == "stale memory" and self.writes > 1:
                return
            if self.defect == "torn memory":
                words = words.clone()
                words[7] = -1
        self.sent[peer] = words

    def read(self, writer: int) -> torch.Tensor:
        return self.memory[writer].clone()

    def barrier(self) -> None:
        mine = json.dumps({peer: words.tolist() for peer, words in self.sent.items()}).encode()
        for writer, answer in enumerate(self.tell(mine)):
            words = json.loads(answer).get(str(self.rank))
            if words is not None:
                self.memory[writer] = torch.tensor(words, dtype=torch.int32)
        self.sent.clear()

    def reduce(self, way: str, x: torch.Tensor) -> torch.Tensor:
        if way == "two_shot" and self.rank == 0:
            if self.defect == "hanging sum":
                time.sleep(1000)
            if self.defect == "stale sum":
                before, self.last[str(len(x))] = self.last.get(str(len(x)), x), x
                x = before
        x = x.clone()
        if way == LIBRARY and self.defect == "wrong library" and self.rank == 0:
            x[3] += 1
        partial_sums = [torch.frombuffer(bytearray(each), dtype=x.dtype) for each in self.tell(x.numpy().tobytes())]
        return torch.stack(partial_sums).sum(0)

    def agree(self, ok: bool) -> bool:
        return all(answer == b"1" for answer in self.tell(b"1" if ok else b"0"))


def links(rank: int, ranks: int, device: int) -> FakeLinks:
    """Of the processes of the default group, with the defect that the environment names."""
    return FakeLinks(rank, ranks, os.environ["FAKE_DEFECT"], partial(exchange, dist.group.WORLD))
