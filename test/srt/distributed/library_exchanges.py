"""An exchanger for tests over gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sglang.srt.distributed.groups import Group


class LibraryExchanges:
    """Implements Exchanger by the library, for parts of up to `most` bytes that are whole vectors, and counts them."""

    def __init__(self, group: Group, most: int) -> None:
        self.group, self.most, self.count = group, most, 0

    def can_exchange(self, part: torch.Tensor) -> bool:
        return part.nbytes % 16 == 0 and part.nbytes <= self.most

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return self.exchange(x.expand(self.group.size, *x.shape))

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=self.group.communicator())
        return received
