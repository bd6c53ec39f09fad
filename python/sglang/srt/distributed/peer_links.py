"""The GPU links of a group that `peer_checks` tests."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from sglang.srt.distributed.custom_all_reduce import (
    CustomAllReduce,
    IpcWorkspaces,
    StalledPeer,
    data_vectors_for,
    exchange,
)
from sglang.srt.distributed.peer_checks import LIBRARY, PATTERN_WORDS, REDUCED_SIZES
from sglang.srt.kernels.all_reduce_table import SizeRange

DEADLINE_S = 10.0
_ALGORITHMS = ("packed", "one_shot", "two_shot")


class GpuLinks:
    """Implements `Links` over the default group, which is gloo's. Patterns lie where the collectives keep data."""

    def __init__(self, rank: int, ranks: int, device: int) -> None:
        from sm120_sgl_kernel import installed_collectives

        torch.cuda.set_device(device)
        assert dist.group.WORLD is not None
        self.rank, self.group = rank, dist.group.WORLD
        self.device = torch.device("cuda", device)
        self.library = installed_collectives()
        maximum = max(4 * max(REDUCED_SIZES), 2 * ranks * 4 * PATTERN_WORDS)
        configs = [SizeRange(frozenset(), frozenset(), name, maximum, "") for name in _ALGORITHMS]
        self.workspaces = IpcWorkspaces(
            self.library, self.group, device, data_vectors_for(configs, ranks, self.library.ROW_VECTORS)
        )
        self.reducer = CustomAllReduce(self.library, self.workspaces, configs, DEADLINE_S)
        self.ways = (*_ALGORITHMS, LIBRARY)
        self.nccl: dist.ProcessGroup | None = None
        # Behind what all algorithms keep: the last vectors of both microbatches of the data.
        self._end = self.library.workspace_bytes(self.workspaces.data_vectors)

    def _place(self, owner: int, writer: int) -> int:
        return self.workspaces.addresses[owner] + self._end - 4 * PATTERN_WORDS * (writer + 1)

    def _copied(self, to: int, source: int) -> None:
        self.library.copy(to, source, 4 * PATTERN_WORDS, torch.cuda.current_stream().cuda_stream)
        event = torch.cuda.Event()
        event.record()
        limit = time.monotonic() + DEADLINE_S
        while not event.query():
            if time.monotonic() > limit:
                raise StalledPeer(f"a copy has not ended after {DEADLINE_S:.0f} s", self.rank)
            time.sleep(1e-4)

    def write(self, peer: int, words: torch.Tensor) -> None:
        """Writes `words` [PATTERN_WORDS] int32 to this rank's place in a peer's memory."""
        self._copied(self._place(peer, self.rank), words.to(self.device).data_ptr())

    def read(self, writer: int) -> torch.Tensor:
        """Returns the words [PATTERN_WORDS] int32 that a rank has written to this rank's memory, on the CPU."""
        words = torch.empty(PATTERN_WORDS, dtype=torch.int32, device=self.device)
        self._copied(words.data_ptr(), self._place(self.rank, writer))
        return words.cpu()

    def reduce(self, way: str, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `x` over the ranks, on the CPU. way: an algorithm of the reducer, or LIBRARY for NCCL.
        Raises StalledPeer."""
        x = x.to(self.device)
        if way != LIBRARY:
            total = self.reducer.all_reduce(x, way).cpu()
            self.reducer.raise_if_stalled()
            return total
        if self.nccl is None:
            self.nccl = dist.new_group(backend="nccl")
        dist.all_reduce(x, group=self.nccl)
        return x.cpu()

    def barrier(self) -> None:
        """Waits for all ranks, in host memory."""
        dist.barrier(group=self.group)

    def agree(self, ok: bool) -> bool:
        """Returns whether `ok` is true on all ranks."""
        return all(answer == b"1" for answer in exchange(self.group, b"1" if ok else b"0"))
