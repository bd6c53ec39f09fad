"""Groups of a rank whose others do not exist: collectives exchange nothing, and their results have the right shape."""

from __future__ import annotations

import torch

from sglang.srt.distributed.groups import Group


class SilentGroup(Group):
    """A group that is alone in a process, for a rehearsal of what a rank launches."""

    def library_all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def _gathered(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.new_empty((self.size, *x.shape)).movedim(0, dim).flatten(dim, dim + 1)

    def _exchanged(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def _scattered(self, x: torch.Tensor, exact: bool) -> torch.Tensor:
        return torch.empty_like(x[0], memory_format=torch.contiguous_format)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        return x

    def send_to_next(self, x: torch.Tensor) -> None: ...

    def receive_from_previous(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def from_last(self, x: torch.Tensor) -> torch.Tensor:
        return x
