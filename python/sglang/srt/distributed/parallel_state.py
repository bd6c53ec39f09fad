"""The ranks that share a model: the groups of this process, and collectives between the hosts.

A process group of the accelerator carries tensors; a gloo group carries bytes between the hosts, so that scheduling
never waits for the device. With one rank nothing is created.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from sglang.srt.distributed.groups import Groups, groups_of
from sglang.srt.distributed.rendezvous import open_store, wait_for_ranks
from sglang.srt.distributed.silent_groups import SilentGroup
from sglang.srt.environ import envs
from sglang.srt.plan.ranks import ONE_RANK, RankLayout

DEFAULT_TIMEOUT_S = 300.0
"""Time limit of a collective over tensors, equal to the default of --watchdog-timeout."""
JOIN_TIMEOUT_S = 120.0
"""Minimum time for ranks to meet, since they start at different speeds."""
LOOPBACK = "lo"
"""Network interface of gloo when all ranks are on this machine."""
_LENGTH_BYTES, _HEAD_BYTES = 8, 1024
_SIGNATURE_BYTES = hashlib.sha256().digest_size
# Ranks without work wait in `broadcast_bytes` for as long as nobody sends a request: that is no failure.
_IDLE_TIMEOUT = timedelta(days=3650)


@dataclass(frozen=True, slots=True)
class _State:
    groups: Groups
    host_group: dist.ProcessGroup | None
    ranks: RankLayout = ONE_RANK
    rank: int = 0
    heartbeat_group: dist.ProcessGroup | None = None
    """All ranks of several machines, with the time limit of collectives over tensors."""
    secret: bytes = b""
    """Secret of the ranks on several machines; the leader signs with it what it broadcasts."""


_ONE_PROCESS = _State(Groups(), None)
_state = _ONE_PROCESS


def init(
    ranks: RankLayout,
    rank: int,
    backend: str,
    init_method: str,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    join_timeout_s: float = JOIN_TIMEOUT_S,
) -> Groups:
    """Joins the other ranks; collective. `backend`: nccl (the current CUDA device is this rank's) or gloo;
    `init_method` as in torch.distributed, e.g. tcp://127.0.0.1:29500. Does nothing for one rank.

    The leader's machine serves the store of a tcp:// address, and listens on that address only. `timeout_s`: of
    collectives over tensors; `join_timeout_s`: for the machines to meet. Raises what torch.distributed raises if a rank
    of this machine does not come, and UserError for one of another machine or for an address that cannot be used.
    """
    global _state, _num_broadcasts
    if not 0 <= rank < ranks.world_size:
        raise ValueError(f"rank {rank} is not in 0..{ranks.world_size - 1}")
    if _state is not _ONE_PROCESS:
        raise RuntimeError("the groups are initialized already; call shutdown() first")
    if ranks == ONE_RANK:
        return _state.groups
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    # Otherwise gloo listens, without a key, on the address that the host's name stands for, which others may reach.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    join_limit, limit = timedelta(seconds=max(timeout_s, JOIN_TIMEOUT_S)), timedelta(seconds=timeout_s)
    store = None
    if init_method.startswith("tcp://"):
        address = init_method.removeprefix("tcp://")
        store = open_store(address, rank == ranks.leader, timedelta(seconds=join_timeout_s))
        wait_for_ranks(store, address, rank, ranks.world_size, join_timeout_s, backend)
    dist.init_process_group(
        backend,
        init_method=init_method if store is None else None,
        store=store,
        rank=rank,
        world_size=ranks.world_size,
        timeout=join_limit,
        device_id=device,
    )
    tensors = stages = tokens = dist.group.WORLD
    if ranks.pp_size > 1:
        tensors, stages, tokens = (
            _group_alike(ranks, rank, key, backend, limit) for key in (ranks.stage, ranks.tp_rank, ranks.tp_rank)
        )
    elif join_limit != limit:
        tensors = dist.new_group(backend=backend, timeout=limit)
    context = tensors
    if 1 < ranks.dcp_size < ranks.tp_size:
        context = _group_alike(ranks, rank, lambda other: other // ranks.dcp_size, backend, limit)
    attention = requests = tensors
    if 1 < ranks.attn_dp_size:
        attention, requests = (
            _group_alike(ranks, rank, key, backend, limit)
            for key in (
                lambda other: other // ranks.attn_tp_size,
                lambda other: (ranks.stage(other), ranks.attn_tp_rank(other)),
            )
        )
    host_group = dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
    key = envs.SGLANG_DIST_SECRET.encode() if store is not None else b""
    _num_broadcasts = 0
    beats = dist.new_group(backend="gloo", timeout=limit) if store is not None else None
    groups = groups_of(ranks, rank, tensors, stages, tokens, context, attention, requests)
    _state = _State(groups, host_group, ranks, rank, beats, key)
    return _state.groups


def _group_alike(
    ranks: RankLayout, rank: int, key: Callable[[int], Hashable], backend: str, limit: timedelta
) -> dist.ProcessGroup | None:
    """Creates the group of ranks with this one's `key`. All ranks create all groups, as torch.distributed requires."""
    everyone = range(ranks.world_size)
    mine: dist.ProcessGroup | None = None
    for place in dict.fromkeys(map(key, everyone)):
        members = [other for other in everyone if key(other) == place]
        group = dist.new_group(members, backend=backend, timeout=limit)
        if rank in members:
            mine = group
    return mine


def shutdown() -> None:
    """Leaves the groups; does nothing if there are none."""
    global _state
    if _state is not _ONE_PROCESS:
        dist.destroy_process_group()
        _state = _ONE_PROCESS


def rehearse(ranks: RankLayout, rank: int) -> None:
    """Takes the part of one rank from now on, though there are no others: collectives return what has the right
    shape."""
    global _state
    _state = _State(groups_of(ranks, rank, kind=SilentGroup), None)


def groups() -> Groups:
    """Returns the groups of this process."""
    return _state.groups


def host_group() -> dist.ProcessGroup:
    """Returns the gloo group of all ranks for host memory, which has no time limit. Fails with one rank."""
    assert _state.host_group is not None, "one rank has nobody to talk to"
    return _state.host_group


def num_ranks() -> int:
    """Returns the number of ranks in all stages."""
    return _state.ranks.world_size


def rank() -> int:
    """Returns the rank of this process among all."""
    return _state.rank


def is_leader() -> bool:
    """Returns whether this process answers requests and makes time-dependent decisions."""
    return _state.rank == _state.ranks.leader


def tp_rank() -> int:
    """Returns this process's tensor parallel rank."""
    return _state.groups.tp.rank


def tp_size() -> int:
    """Returns the tensor parallel size."""
    return _state.groups.tp.size


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Returns the sum over the tensor parallel ranks, by NCCL or gloo."""
    return _state.groups.tp.library_all_reduce(x)


def wait_for_all_ranks() -> None:
    """Waits for all ranks without a time limit, after work that takes each a different time."""
    min_over_ranks(0)


def answer_heartbeat() -> None:
    """Meets the ranks of all machines. Raises what torch.distributed raises if one does not come in time."""
    dist.all_reduce(torch.zeros(1), group=_state.heartbeat_group)


def min_over_ranks(value: int) -> int:
    """Returns the smallest of the ranks' values."""
    return all_reduce_min([value])[0]


def all_ranks_agree(yes: bool) -> bool:
    """Returns whether `yes` is true on all ranks."""
    return min_over_ranks(int(yes)) == 1


def all_reduce_min(values: Sequence[int]) -> list[int]:
    """Returns the minimum over the ranks at each position; all ranks pass the same number of values. Host memory
    only."""
    if num_ranks() == 1 or not values:
        return list(values)
    smallest = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=_state.host_group)
    return [int(value) for value in smallest.tolist()]


def all_reduce_max(values: Sequence[int]) -> list[int]:
    """Returns the maximum over the ranks at each position, as `all_reduce_min`."""
    return [-value for value in all_reduce_min([-value for value in values])]


_num_broadcasts = 0


def broadcast_bytes(data: bytes | None) -> bytes:
    """Returns the leader's `data` on every rank; the others pass None. Host memory only. Blocks until the leader calls.
    With a secret, messages between machines are signed with a running number; raises ConnectionError for a wrong
    signature."""
    global _num_broadcasts
    if num_ranks() == 1:
        assert data is not None
        return data
    key = _state.secret
    if not key:
        return _broadcast(data)
    _num_broadcasts += 1
    signed = _broadcast(None if data is None else data + _signature(key, _num_broadcasts, data))
    data, given = signed[:-_SIGNATURE_BYTES], signed[-_SIGNATURE_BYTES:]
    if not hmac.compare_digest(given, _signature(key, _num_broadcasts, data)):
        raise ConnectionError("a message between the machines is signed with another SGLANG_DIST_SECRET, or with none")
    return data


def _signature(key: bytes, number: int, data: bytes) -> bytes:
    return hmac.new(key, number.to_bytes(8, "little") + data, hashlib.sha256).digest()


def _broadcast(data: bytes | None) -> bytes:
    """Sends the leader's bytes to all ranks. Every step waits for this, so short data travels in the same message as
    its length."""
    head = np.zeros(_HEAD_BYTES, np.uint8)
    if data is not None:
        head[:_LENGTH_BYTES] = np.frombuffer(len(data).to_bytes(_LENGTH_BYTES, "little"), np.uint8)
        first = np.frombuffer(data[: _HEAD_BYTES - _LENGTH_BYTES], np.uint8)
        head[_LENGTH_BYTES : _LENGTH_BYTES + len(first)] = first
    dist.broadcast(torch.from_numpy(head), src=_state.ranks.leader, group=host_group())
    size = int.from_bytes(head[:_LENGTH_BYTES].tobytes(), "little")
    begin = head[_LENGTH_BYTES : _LENGTH_BYTES + size].tobytes()
    if size == len(begin):
        return begin
    rest = np.empty(size - len(begin), np.uint8) if data is None else np.frombuffer(data, np.uint8)[len(begin) :].copy()
    dist.broadcast(torch.from_numpy(rest), src=_state.ranks.leader, group=host_group())
    return begin + rest.tobytes()
