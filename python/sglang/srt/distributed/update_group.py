"""A group of a trainer's process and this server's ranks, over which new weights are broadcast."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sglang.srt.errors import UserError

CONNECT_LIMIT = timedelta(seconds=300)
RECEIVE_LIMIT = timedelta(seconds=60)
"""How long the ranks, which serve nobody meanwhile, wait for a tensor that the trainer is to send."""
BACKENDS = ("nccl", "gloo")


class UpdateGroup:
    """A process group beside those of the server. The trainer is its rank 0."""

    def __init__(self, address: str, port: int, rank: int, world_size: int, name: str, backend: str) -> None:
        """Connects; returns when all ranks have. Raises UserError."""
        if backend not in BACKENDS:
            raise UserError(f"backend {backend!r} is not supported; supported: {', '.join(BACKENDS)}")
        if not 0 <= rank < world_size:
            raise UserError(f"rank {rank} is not one of the group's {world_size}")
        self.backend = backend
        try:
            store, _, _ = next(dist.rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=CONNECT_LIMIT))
            store.set_timeout(CONNECT_LIMIT)
            result: Any = (
                c10d._new_process_group_helper(  # the only way to a group that has other members than the default
                    world_size,
                    rank,
                    [],
                    backend,
                    dist.PrefixStore(name, store),
                    group_name=name,  # type: ignore[arg-type]  # a type for checkers only
                    timeout=CONNECT_LIMIT,
                )
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(f"the group {name} at {address}:{port} cannot be joined: {error}") from None
        self.group: Any = result[0] if isinstance(result, tuple) else result
        c10d._world.pg_group_ranks[self.group] = {i: i for i in range(world_size)}

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns the next tensor that the trainer broadcasts, in main memory unless the group is NCCL's. Raises
        UserError if it does not come; the group cannot be used then."""
        tensor = torch.empty(shape, dtype=dtype, device="cuda" if self.backend == "nccl" else "cpu")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if self.backend == "gloo":
            options.timeout = RECEIVE_LIMIT  # NCCL's would end the process
        try:
            self.group.broadcast([tensor], options).wait(RECEIVE_LIMIT + timedelta(seconds=1))
        except RuntimeError as error:
            said = str(error).partition("\n")[0]
            raise UserError(f"the trainer has ended, or has sent nothing for {RECEIVE_LIMIT}: {said}") from None
        return tensor

    def send(self, tensor: torch.Tensor) -> None:
        """Broadcasts a tensor, on the trainer."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self.group.broadcast([tensor.contiguous()], options).wait()

    def close(self) -> None:
        """Leaves the group."""
        dist.destroy_process_group(self.group)
