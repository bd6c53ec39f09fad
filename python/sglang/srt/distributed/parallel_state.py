"""Tensor parallelism of this process: who it is, and the collectives that layers need.

One process group of the accelerator carries tensors; a gloo group carries bytes between the hosts of the ranks, so that
scheduling never waits for the device. With one rank nothing is created and every collective returns its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

# Ranks without work wait in `broadcast_bytes` for as long as nobody sends a request: that is no failure.
_IDLE_TIMEOUT = timedelta(days=3650)


@dataclass(frozen=True, slots=True)
class _TensorParallel:
    rank: int
    size: int
    device_group: dist.ProcessGroup | None
    cpu_group: dist.ProcessGroup | None


_ALONE = _TensorParallel(0, 1, None, None)
_state = _ALONE


def init(tp_rank: int, tp_size: int, backend: str, init_method: str) -> None:
    """Join the other ranks; collective. `backend`: nccl (the current CUDA device is this rank's) or gloo; `init_method`
    as in torch.distributed, e.g. tcp://127.0.0.1:29500. Does nothing when `tp_size` is 1."""
    global _state
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank {tp_rank} is not in 0..{tp_size - 1}")
    if _state is not _ALONE:
        raise RuntimeError("tensor parallelism is initialized already; call shutdown() first")
    if tp_size == 1:
        return
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    dist.init_process_group(
        backend, init_method=init_method, rank=tp_rank, world_size=tp_size, timeout=_IDLE_TIMEOUT, device_id=device
    )
    world = dist.group.WORLD
    cpu_group = world if backend == "gloo" else dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
    _state = _TensorParallel(tp_rank, tp_size, world, cpu_group)


def shutdown() -> None:
    """Leave the group. Harmless when there is none."""
    global _state
    if _state is not _ALONE:
        dist.destroy_process_group()
        _state = _ALONE


def tp_rank() -> int:
    return _state.rank


def tp_size() -> int:
    return _state.size


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks. May reuse the storage of `x`; use the result only."""
    if _state.size > 1:
        dist.all_reduce(x, group=_state.device_group)
    return x


def all_gather(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Concatenate the ranks' tensors, which have one shape, along `dim` in the order of the ranks."""
    if _state.size == 1:
        return x
    dim %= x.dim()
    gathered = x.new_empty((_state.size * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=_state.device_group)
    if dim == 0:
        return gathered
    by_rank = gathered.view(_state.size, *x.shape).movedim(0, dim)
    return by_rank.reshape(*x.shape[:dim], _state.size * x.shape[dim], *x.shape[dim + 1 :])


def least(value: int) -> int:
    """The smallest of the ranks' values."""
    return least_each([value])[0]


def least_each(values: Sequence[int]) -> list[int]:
    """The smallest of the ranks' values at each position; all ranks give the same number of them. Host memory only."""
    if _state.size == 1 or not values:
        return list(values)
    smallest = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=_state.cpu_group)
    return [int(value) for value in smallest.tolist()]


def broadcast_bytes(data: bytes | None) -> bytes:
    """Rank 0's `data` on every rank; the other ranks pass None. Host memory only. Blocks until rank 0 calls."""
    if _state.size == 1:
        assert data is not None
        return data
    header = torch.tensor([0 if data is None else len(data)], dtype=torch.int64)
    dist.broadcast(header, src=0, group=_state.cpu_group)
    size = int(header.item())
    if size == 0:
        return b""
    if _state.rank == 0:
        assert data is not None
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        payload = torch.empty(size, dtype=torch.uint8)
    dist.broadcast(payload, src=0, group=_state.cpu_group)
    return payload.numpy().tobytes()
