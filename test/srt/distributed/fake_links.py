"""Links between processes of a CPU for `peer_probe`, each with one defect of the first pair or none."""

from __future__ import annotations

import json
import os
import time

import torch
import torch.distributed as dist

from sglang.srt.distributed.custom_all_reduce import StalledPeer, exchange
from sglang.srt.distributed.peer_checks import LIBRARY, PATTERN_WORDS


class FakeLinks:
    """What is written arrives with the next barrier. `defect` is of what rank 0 writes to rank 1."""

    defect = ""
    ways = ("packed", "two_shot", LIBRARY)

    def __init__(self, rank: int, ranks: int, device: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.memory = torch.zeros(ranks, PATTERN_WORDS, dtype=torch.int32)
        self.sent: dict[int, torch.Tensor] = {}
        self.last: dict[str, torch.Tensor] = {}
        self.writes = 0
        if self.defect == "refused" and rank == 1:
            raise RuntimeError("peer access is not supported between these two devices")

    def _faulty(self, peer: int) -> bool:
        return (self.rank, peer) == (0, 1)

    def write(self, peer: int, words: torch.Tensor) -> None:
        if self._faulty(peer):
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
        for writer, answer in enumerate(exchange(dist.group.WORLD, mine)):
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
        dist.all_reduce(x)
        return x

    def agree(self, ok: bool) -> bool:
        return all(answer == b"1" for answer in exchange(dist.group.WORLD, b"1" if ok else b"0"))


def links(rank: int, ranks: int, device: int) -> FakeLinks:
    fake = type("Links", (FakeLinks,), {"defect": os.environ["FAKE_DEFECT"]})
    return fake(rank, ranks, device)
