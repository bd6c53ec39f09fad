"""The ranks that share a model: which groups this process belongs to, and the collectives that layers need.

Groups are asked for by what they share (`Groups`); which ranks these are follows from the layout alone. One process
group of the accelerator carries tensors; a gloo group carries bytes between the hosts of the ranks, so that scheduling
never waits for the device. With one rank nothing is created and every collective returns its input.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from sglang.srt.distributed.partial_sums import Summands, SumOnItsWay
from sglang.srt.distributed.ping_pong import PingPong
from sglang.srt.distributed.quantized_sums import PeerSums, QuantizedSums
from sglang.srt.environ import envs
from sglang.srt.errors import UserError
from sglang.srt.plan.ranks import ONE_RANK, RankLayout


class Reducer(Protocol):
    """An all-reduce for some of the tensors: alike on all ranks."""

    def can_serve_tensor(self, x: torch.Tensor) -> bool: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks. May reuse the storage of x."""

    def can_norm(self, x: torch.Tensor) -> bool: ...

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(norm of the total, the total) of the sum and the residual, which may be written over. None: nothing was
        done."""

    def raise_if_stalled(self) -> None:
        """Raises where a rank has not come to a sum in time."""


class Exchanger(Protocol):
    """Gathers and exchanges some of the tensors: alike on all ranks."""

    def can_exchange(self, part: torch.Tensor) -> bool:
        """Returns whether parts like this one may be gathered and exchanged."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [...] -> [ranks, ...]."""

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """As `Group.exchange`."""


DEFAULT_TIMEOUT_S = 300.0
"""The limit of a collective whose ranks have work: as --watchdog-timeout."""
JOIN_TIMEOUT_S = 120.0
"""The least time that ranks have to meet: they start at different speeds."""
LOOPBACK = "lo"
"""The network interface over which gloo's ranks talk: all of them are on this machine."""
_LENGTH_BYTES, _HEAD_BYTES = 8, 1024
_SIGNATURE_BYTES = hashlib.sha256().digest_size
# Ranks without work wait in `broadcast_bytes` for as long as nobody sends a request: that is no failure.
_IDLE_TIMEOUT = timedelta(days=3650)


class Group:
    """Ranks that share something. `rank`: this process's place among its `size`."""

    def __init__(self, rank: int = 0, size: int = 1, process_group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size = rank, size
        self._process_group = process_group
        self._reducer: Reducer | None = None
        self._exchanger: Exchanger | None = None
        self._quantized: QuantizedSums | None = None
        self.peers: PeerSums | None = None
        """What can add up quantized values in peers' memory."""
        self._ping_pong: PingPong | None = None
        self._under_way: deque[tuple[dist.Work, torch.Tensor]] = deque()
        """Sends of this rank that have not been waited for; the oldest first."""

    def __repr__(self) -> str:
        return f"Group({self.rank} of {self.size})"

    def reduce_with(self, reducer: Reducer) -> None:
        """Use this before the library's all-reduce from now on; before the first graph is captured."""
        self._reducer = reducer

    def exchange_with(self, exchanger: Exchanger) -> None:
        """Use this before the library's all-gather and all-to-all from now on; before the first graph is captured."""
        self._exchanger = exchanger

    def _exchanger_for(self, part: torch.Tensor) -> Exchanger | None:
        """None where the library gathers and exchanges such parts: also while another half of the step computes."""
        travels = self._ping_pong is not None and self._ping_pong.active
        exchanger = self._exchanger
        return exchanger if exchanger is not None and not travels and exchanger.can_exchange(part) else None

    def quantize_with(self, sums: QuantizedSums) -> None:
        """Use this before anything else for what it covers, from now on; before the first graph is captured."""
        self._quantized = sums

    def alternate_in(self, ping_pong: PingPong) -> None:
        """Let collectives between its halves travel beside what is computed, from now on."""
        self._ping_pong = ping_pong

    def _travel(self, what: str, x: torch.Tensor, collective: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The collective's result. what, x: tell it from others; the microbatches of a step differ in rows alone."""
        if self._ping_pong is None or not self._ping_pong.active:
            return collective()
        return self._ping_pong.travel(self._named(what, x), collective)

    def _named(self, what: str, x: torch.Tensor) -> object:
        return what, self.size, x.dtype, x.shape[-1] if x.dim() > 1 else 1

    def begin_sum(self, x: torch.Tensor) -> Summands:
        """What adds up `x`, of which each rank has a summand, where the sum is needed: this group, or where
        microbatches of a step alternate block by block a sum that travels from now on. `x` stays as it is until
        then."""
        ping_pong = self._ping_pong
        if ping_pong is None or not ping_pong.by_block:
            return self
        return SumOnItsWay(ping_pong.start(self._named("sum", x), lambda: self._summed(x, exact=False)))

    def _quantized_for(self, x: torch.Tensor, exact: bool = False) -> QuantizedSums | None:
        sums, ping_pong = self._quantized, self._ping_pong
        exact = exact or (ping_pong is not None and ping_pong.active and ping_pong.exact)
        return sums if sums is not None and not exact and sums.covers(x) else None

    def all_reduce(self, x: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """Sum over the ranks. May reuse the storage of `x`; use the result only. exact: never quantized."""
        return x if self.size == 1 else self._travel("sum", x, lambda: self._summed(x, exact))

    def _summed(self, x: torch.Tensor, exact: bool) -> torch.Tensor:
        if (quantized := self._quantized_for(x, exact)) is not None:
            return quantized.all_reduce(x)
        if self._reducer is not None and self._reducer.can_serve_tensor(x):
            return self._reducer.all_reduce(x)
        return self.library_all_reduce(x)

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Reduces and normalizes in one kernel, if a Reducer is there that serves `x`; returns None if nothing was
        done: also where the sum is to travel while another half of the step computes."""
        reducer = self._reducer
        if (
            (self._ping_pong is not None and self._ping_pong.active)
            or self._quantized_for(x) is not None
            or reducer is None
            or not reducer.can_norm(x)
            or not (residual is None or residual.is_contiguous())
        ):
            return None
        return reducer.all_reduce_add_rms_norm(x, residual, weight, eps)

    def raise_if_stalled(self) -> None:
        """Raises where a sum so far ended because a rank did not come. Waits for nothing."""
        if self._reducer is not None:
            self._reducer.raise_if_stalled()

    def library_all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks like `all_reduce`, always by NCCL or gloo."""
        dist.all_reduce(x, group=self.communicator())
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors, which have one shape, along `dim` in the order of the ranks."""
        return x if self.size == 1 else self._travel("gather", x, lambda: self._gathered(x, dim % x.dim()))

    def _gathered(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if (exchanger := self._exchanger_for(x)) is not None:
            by_rank = exchanger.gather(x)
        else:
            by_rank = x.new_empty((self.size, *x.shape))
            dist.all_gather_into_tensor(by_rank.flatten(0, 1), x.contiguous(), group=self.communicator())
        return by_rank.movedim(0, dim).flatten(dim, dim + 1)

    def all_gather_rows(self, x: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """Rows [T, ...] of each rank -> [ranks * T, ...], as `all_gather` along dim 0; unless `exact` quantized where a
        sum of as many is: then also this rank's own."""
        quantized = self._quantized_for(x, exact)
        if quantized is None or self.size == 1:
            return self.all_gather(x, dim=0)
        return self._travel("gather", x, lambda: quantized.all_gather(x))

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """x [ranks, ...], of which part i goes to rank i -> [ranks, ...], the parts that the ranks sent to this one."""
        return x if self.size == 1 else self._travel("exchange", x, lambda: self._exchanged(x))

    def _exchanged(self, x: torch.Tensor) -> torch.Tensor:
        if (exchanger := self._exchanger_for(x[0])) is not None:
            return exchanger.exchange(x)
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=self.communicator())
        return received

    def reduce_scatter(self, x: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """x [ranks, N, ...]: a summand for each rank -> [N, ...], the sum of those for this one. exact: never
        quantized."""
        return x[0] if self.size == 1 else self._travel("scatter", x, lambda: self._scattered(x, exact))

    def _scattered(self, x: torch.Tensor, exact: bool) -> torch.Tensor:
        if (quantized := self._quantized_for(x[0], exact)) is not None:
            return quantized.reduce_scatter(x)
        if (exchanger := self._exchanger_for(x[0])) is not None:
            return exchanger.exchange(x).sum(0, dtype=x.dtype)
        total = torch.empty_like(x[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter_tensor(total, x.contiguous().flatten(0, 1), group=self.communicator())
        return total

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """The tensor of rank `source` of the group, whose shape and type all know; written over theirs."""
        if self.size > 1:
            dist.broadcast(x, group=self.communicator(), group_src=source)
        return x

    def send_to_next(self, x: torch.Tensor) -> None:
        """Send to the rank behind this one, which receives it. Goes on at once: `x` stays as it is from now on."""
        x = x.contiguous()
        work = dist.isend(x, group=self.communicator(), group_dst=self.rank + 1)
        assert work is not None, "this rank is in the group"
        self._let_go(work, x)

    def receive_from_previous(self, x: torch.Tensor) -> torch.Tensor:
        """Receive the tensor that the rank before this one sends, into `x`."""
        dist.recv(x, group=self.communicator(), group_src=self.rank - 1)
        return x

    def from_last(self, x: torch.Tensor) -> torch.Tensor:
        """The last rank's `x`, whose shape the others know; written over theirs. The last one goes on at once: its `x`
        stays as it is from now on."""
        if self.size == 1:
            return x
        work = dist.broadcast(x, group=self.communicator(), group_src=self.size - 1, async_op=True)
        assert work is not None, "this rank is in the group"
        if self.rank == self.size - 1:
            self._let_go(work, x)
        else:
            work.wait()
        return x

    def _let_go(self, work: dist.Work, x: torch.Tensor) -> None:
        """Keep what is under way in memory; so much at a time as there are ranks, and one step more."""
        self._under_way.append((work, x))
        if len(self._under_way) > self.size + 1:
            self._under_way.popleft()[0].wait()

    def communicator(self) -> dist.ProcessGroup:
        """The library's, of this group."""
        assert self._process_group is not None, f"no tensors travel in {self}"
        return self._process_group


ALONE = Group()


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups, by what their ranks share. Layers get them from their scope.

    `experts`: those whose experts' outputs add up to the layer's, which are all. `ep` and `expert_tp` divide the
    weights of experts and exchange nothing themselves. `pp`: the ranks of all stages that have the same place in
    theirs; `pp_tokens`: the same ones, so that tokens on their way back never wait for hidden states on their way on.
    `dp`: the ranks with the same place in the groups of `attention`, each of which has requests of its own. `context`:
    those that share out the tokens of caches which all of them would hold.
    """

    tp: Group = ALONE  # dense layers
    vocabulary: Group = ALONE
    attention: Group = ALONE  # heads
    experts: Group = ALONE
    ep: Group = ALONE  # whole experts
    expert_tp: Group = ALONE  # intermediate dims of each expert
    pp: Group = ALONE  # layers
    pp_tokens: Group = ALONE  # what the last stage samples
    dp: Group = ALONE  # requests
    context: Group = ALONE  # tokens

    @property
    def draft_groups(self) -> Groups:
        """The groups that the layers of a draft see: what computes for the requests of an attention group alone is
        shared by the ranks of the group alone."""
        if self.dp.size == 1:
            return self
        shared = self.attention
        dims = Group(shared.rank, shared.size)
        return replace(self, tp=shared, vocabulary=shared, experts=shared, ep=ALONE, expert_tp=dims, dp=ALONE)

    @property
    def layer_groups(self) -> tuple[Group, ...]:
        """The groups over which layers exchange something, each once."""
        groups = (self.tp, self.vocabulary, self.attention, self.experts, self.dp, self.context)
        return tuple({id(group): group for group in groups if group.size > 1}.values())

    def quantize_with(self, create: Callable[[Group], QuantizedSums]) -> None:
        """Quantize large sums of hidden states over `tp`, `attention` and `dp`, where they have several ranks; `create`
        makes what a group takes for them. Before the first graph is captured."""
        for group in {id(group): group for group in (self.tp, self.attention, self.dp)}.values():
            if group.size > 1:
                group.quantize_with(create(group))


def groups_of(
    ranks: RankLayout,
    rank: int,
    process_group: dist.ProcessGroup | None = None,
    stages_group: dist.ProcessGroup | None = None,
    tokens_group: dist.ProcessGroup | None = None,
    context_group: dist.ProcessGroup | None = None,
    attention_group: dist.ProcessGroup | None = None,
    requests_group: dist.ProcessGroup | None = None,
) -> Groups:
    """The groups of one rank. `process_group`: of the ranks of its stage, `stages_group` and `tokens_group`: of the
    ranks of all stages that have its place, `context_group`: of those that share out tokens, `attention_group`: of
    those that share heads, `requests_group`: of those with its place among these; without them nothing can be sent."""
    tp_rank = ranks.tp_rank(rank)
    everyone = attention = Group(tp_rank, ranks.tp_size, process_group)
    if ranks.attn_dp_size > 1:
        attention = Group(ranks.attn_tp_rank(tp_rank), ranks.attn_tp_size, attention_group)
    return Groups(
        tp=everyone,
        vocabulary=attention if ranks.dp_lm_head else everyone,
        attention=attention,
        dp=Group(ranks.attn_dp_rank(tp_rank), ranks.attn_dp_size, requests_group),
        experts=everyone,
        ep=Group(ranks.ep_rank(tp_rank), ranks.ep_size),
        expert_tp=Group(ranks.expert_tp_rank(tp_rank), ranks.expert_tp_size),
        pp=Group(ranks.stage(rank), ranks.pp_size, stages_group),
        pp_tokens=Group(ranks.stage(rank), ranks.pp_size, tokens_group),
        context=Group(ranks.context_rank(tp_rank), ranks.dcp_size, context_group),
    )


@dataclass(frozen=True, slots=True)
class _State:
    groups: Groups
    host_group: dist.ProcessGroup | None
    ranks: RankLayout = ONE_RANK
    rank: int = 0
    beat_group: dist.ProcessGroup | None = None
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
    """Join the other ranks; collective. `backend`: nccl (the current CUDA device is this rank's) or gloo; `init_method`
    as in torch.distributed, e.g. tcp://127.0.0.1:29500. Does nothing for one rank.

    The leader's machine has the store of a tcp:// address, and listens there alone. `timeout_s`: of collectives over
    tensors; `join_timeout_s`: of the meeting of several machines. Raises what torch.distributed raises when a rank of
    this machine does not come, and UserError for one of another, or an address that cannot be had."""
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
        store = _store(address, rank == ranks.leader, timedelta(seconds=join_timeout_s))
        _meet(store, address, rank, ranks.world_size, join_timeout_s, backend)
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


def _store(address: str, here: bool, limit: timedelta) -> dist.TCPStore:
    """The store at HOST:PORT in which ranks of several machines meet. here: this rank has it."""
    host, _, port = address.rpartition(":")
    if not here:
        try:
            return dist.TCPStore(host.strip("[]"), int(port), is_master=False, timeout=limit, wait_for_workers=False)
        except dist.DistError as error:
            raise UserError(
                f"--dist-init-addr {address}: no server answers there within {limit.total_seconds():g} s"
                f" ({str(error).splitlines()[0]}). Is machine 0 started, is this an address of it, and the port open?"
            ) from error
    listener = _listener(host.strip("[]"), int(port))
    return dist.TCPStore(
        host.strip("[]"), int(port), is_master=True, timeout=limit, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def _meet(store: dist.Store, address: str, rank: int, count: int, limit_s: float, backend: str) -> None:
    """Waits until all ranks have come to the store. Raises UserError, which names those that have not, or that compute
    on another kind of device."""
    keys = [f"here/{other}" for other in range(count)]
    store.set(keys[rank], backend)
    try:
        store.wait(keys, timedelta(seconds=limit_s))
        backends = [store.get(key).decode() for key in keys]
    except dist.DistError as error:
        try:
            absent = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        except dist.DistError:  # machine 0 has given up before this one
            absent = ["others"]
        raise UserError(
            f"--dist-init-addr {address}: of {count} ranks, {', '.join(absent)} did not come within {limit_s:g} s."
            " Start the same command on every machine, each with its own --node-rank; --dist-timeout says how long they"
            " wait."
        ) from error
    if len(set(backends)) > 1:
        on_gpu, on_cpu = backends.index("nccl"), backends.index("gloo")
        raise UserError(
            f"rank {on_gpu} computes on a GPU and rank {on_cpu} on a CPU. Where nvidia-smi shows GPUs, torch must see"
            " them (torch.cuda.is_available()); or give --device cpu on all machines."
        )


def _listener(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at that address alone. Raises UserError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(1024)
    except OSError as error:
        raise UserError(
            f"--dist-init-addr {host}:{port}: {error.strerror}. It must be an address of machine 0, with a port that"
            " nothing uses."
        ) from error
    return opened


def _group_alike(
    ranks: RankLayout, rank: int, key: Callable[[int], Hashable], backend: str, limit: timedelta
) -> dist.ProcessGroup | None:
    """Make the group of the ranks with this one's `key`. All ranks make the groups of all."""
    everyone = range(ranks.world_size)
    mine: dist.ProcessGroup | None = None
    for place in dict.fromkeys(map(key, everyone)):
        members = [other for other in everyone if key(other) == place]
        group = dist.new_group(members, backend=backend, timeout=limit)
        if rank in members:
            mine = group
    return mine


def shutdown() -> None:
    """Leave the groups. Harmless when there are none."""
    global _state
    if _state is not _ONE_PROCESS:
        dist.destroy_process_group()
        _state = _ONE_PROCESS


def groups() -> Groups:
    """The groups of this process."""
    return _state.groups


def host_group() -> dist.ProcessGroup:
    """All ranks, for what stays in host memory: gloo, without a time limit. There is none for one rank."""
    assert _state.host_group is not None, "one rank has nobody to talk to"
    return _state.host_group


def num_ranks() -> int:
    """The number of ranks of all stages."""
    return _state.ranks.world_size


def rank() -> int:
    """The rank of this process among all."""
    return _state.rank


def is_leader() -> bool:
    """Returns whether this process answers requests and decides what a clock decides."""
    return _state.rank == _state.ranks.leader


def tp_rank() -> int:
    return _state.groups.tp.rank


def tp_size() -> int:
    return _state.groups.tp.size


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Sum over all ranks, by NCCL or gloo."""
    return _state.groups.tp.library_all_reduce(x)


def meet() -> None:
    """Wait for the other ranks without a time limit: behind what takes each its own time."""
    least(0)


def answer_beat() -> None:
    """Meets the ranks of all machines. Raises what torch.distributed raises when one does not come in time."""
    dist.all_reduce(torch.zeros(1), group=_state.beat_group)


def least(value: int) -> int:
    """The smallest of the ranks' values."""
    return all_reduce_min([value])[0]


def all_ranks_say(yes: bool) -> bool:
    """Whether all ranks say so."""
    return least(int(yes)) == 1


def all_reduce_min(values: Sequence[int]) -> list[int]:
    """The smallest of the ranks' values at each position; all ranks give the same number of them. Host memory only."""
    if num_ranks() == 1 or not values:
        return list(values)
    smallest = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=_state.host_group)
    return [int(value) for value in smallest.tolist()]


def all_reduce_max(values: Sequence[int]) -> list[int]:
    """The greatest of the ranks' values at each position, as `all_reduce_min`."""
    return [-value for value in all_reduce_min([-value for value in values])]


_num_broadcasts = 0


def broadcast_bytes(data: bytes | None) -> bytes:
    """The leader's `data` on every rank; the others pass None. Host memory only. Blocks until the leader calls. Between
    machines with a secret it is signed together with its number; raises ConnectionError for what is signed otherwise.
    """
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
    """Sends the leader's bytes to all ranks. Short data travels with its length in one message: every step waits for
    this."""
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
