"""The ranks that share a model: the groups of this process, and the collectives that layers need.

Code asks for a group by what its ranks share (`Groups`); the layout alone decides which ranks these are. A process
group of the accelerator carries tensors; a gloo group carries bytes between the hosts, so that scheduling never waits
for the device. With one rank nothing is created and every collective returns its input.
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
    """An all-reduce that serves some tensors; its answers are the same on all ranks."""

    def can_serve_tensor(self, x: torch.Tensor) -> bool: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the ranks. May reuse the storage of `x`."""

    def can_norm(self, x: torch.Tensor) -> bool: ...

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns (RMS norm of the total, the total), where total = sum of `x` over the ranks + residual. May overwrite
        the residual. Returns None if nothing was done."""

    def raise_if_stalled(self) -> None:
        """Raises if a rank did not come to a past all-reduce in time."""


class Exchanger(Protocol):
    """An all-gather and all-to-all that serve some tensors; its answers are the same on all ranks."""

    def can_exchange(self, part: torch.Tensor) -> bool:
        """Returns whether parts like this one may be gathered and exchanged."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the tensors x [...] of all ranks, [ranks, ...]."""

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Exchanges parts as `Group.exchange` does."""


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


class Group:
    """Ranks that share something, with their collectives. `rank`: this process's index among the `size` ranks."""

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
        """Tries this reducer before the library's all-reduce from now on. Call before the first graph is captured."""
        self._reducer = reducer

    def exchange_with(self, exchanger: Exchanger) -> None:
        """Tries this exchanger before the library's all-gather and all-to-all from now on. Call before the first graph
        is captured."""
        self._exchanger = exchanger

    def _exchanger_for(self, part: torch.Tensor) -> Exchanger | None:
        """Returns the exchanger that serves such parts. None: the library does; always so while another microbatch
        computes."""
        travels = self._ping_pong is not None and self._ping_pong.active
        exchanger = self._exchanger
        return exchanger if exchanger is not None and not travels and exchanger.can_exchange(part) else None

    def quantize_with(self, sums: QuantizedSums) -> None:
        """Uses quantized collectives for the tensors they cover, before any other. Call before the first graph is
        captured."""
        self._quantized = sums

    def alternate_in(self, ping_pong: PingPong) -> None:
        """Lets collectives inside a two-batch overlap travel while the other microbatch computes, from now on."""
        self._ping_pong = ping_pong

    def _travel(self, what: str, x: torch.Tensor, collective: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns the collective's result. what, x: identify it to both microbatches, whose tensors differ in rows
        only."""
        if self._ping_pong is None or not self._ping_pong.active:
            return collective()
        return self._ping_pong.travel(self._named(what, x), collective)

    def _named(self, what: str, x: torch.Tensor) -> object:
        return what, self.size, x.dtype, x.shape[-1] if x.dim() > 1 else 1

    def begin_sum(self, x: torch.Tensor) -> Summands:
        """Returns an object that all-reduces the partial sums `x` when the total is needed: this group, or, if
        microbatches alternate block by block, an all-reduce that starts now. `x` must not change until then."""
        ping_pong = self._ping_pong
        if ping_pong is None or not ping_pong.by_block:
            return self
        return SumOnItsWay(ping_pong.start(self._named("sum", x), lambda: self._summed(x, exact=False)))

    def _quantized_for(self, x: torch.Tensor, exact: bool = False) -> QuantizedSums | None:
        sums, ping_pong = self._quantized, self._ping_pong
        exact = exact or (ping_pong is not None and ping_pong.active and ping_pong.exact)
        return sums if sums is not None and not exact and sums.covers(x) else None

    def all_reduce(self, x: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """Returns the sum over the ranks. May reuse the storage of `x`, so use the result only. exact: never
        quantized."""
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
        """Runs the all-reduce, residual addition and norm as one kernel if a reducer serves `x`. Returns None if
        nothing was done, always so if the all-reduce travels while another microbatch computes."""
        reducer = self._reducer
        if (
            (self._ping_pong is not None and self._ping_pong.active)
            or self._quantized_for(x) is not None
            or reducer is None
            or not reducer.can_norm(x)
            or not (residual is None or (residual.is_contiguous() and residual.dtype == x.dtype))
        ):
            return None
        return reducer.all_reduce_add_rms_norm(x, residual, weight, eps)

    def raise_if_stalled(self) -> None:
        """Raises if a past all-reduce ended because a rank did not come. Waits for nothing."""
        if self._reducer is not None:
            self._reducer.raise_if_stalled()

    def library_all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the ranks like `all_reduce`, always by NCCL or gloo."""
        dist.all_reduce(x, group=self.communicator())
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenates the ranks' tensors of equal shape along `dim`, in rank order."""
        return x if self.size == 1 else self._travel("gather", x, lambda: self._gathered(x, dim % x.dim()))

    def _gathered(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if (exchanger := self._exchanger_for(x)) is not None:
            by_rank = exchanger.gather(x)
        else:
            by_rank = x.new_empty((self.size, *x.shape))
            dist.all_gather_into_tensor(by_rank.flatten(0, 1), x.contiguous(), group=self.communicator())
        return by_rank.movedim(0, dim).flatten(dim, dim + 1)

    def all_gather_rows(self, x: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """Gathers rows [T, ...] of each rank into [ranks * T, ...], like `all_gather` along dim 0. Unless `exact`,
        values are quantized when an all-reduce of the same shape would be, this rank's own included."""
        quantized = self._quantized_for(x, exact)
        if quantized is None or self.size == 1:
            return self.all_gather(x, dim=0)
        return self._travel("gather", x, lambda: quantized.all_gather(x))

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """All-to-all: sends part i of x [ranks, ...] to rank i, and returns the parts [ranks, ...] that the ranks sent
        here."""
        return x if self.size == 1 else self._travel("exchange", x, lambda: self._exchanged(x))

    def _exchanged(self, x: torch.Tensor) -> torch.Tensor:
        if (exchanger := self._exchanger_for(x[0])) is not None:
            return exchanger.exchange(x)
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=self.communicator())
        return received

    def reduce_scatter(self, x: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """Returns this rank's sum [N, ...] over the ranks' x [ranks, N, ...], which hold a partial sum for each rank.
        exact: never quantized."""
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
        """Overwrites `x` on all ranks with that of rank `source` of the group. All must pass the same shape and
        dtype."""
        if self.size > 1:
            dist.broadcast(x, group=self.communicator(), group_src=source)
        return x

    def send_to_next(self, x: torch.Tensor) -> None:
        """Sends `x` to the next rank without waiting; `x` must not change any more."""
        x = x.contiguous()
        work = dist.isend(x, group=self.communicator(), group_dst=self.rank + 1)
        assert work is not None, "this rank is in the group"
        self._let_go(work, x)

    def receive_from_previous(self, x: torch.Tensor) -> torch.Tensor:
        """Receives the tensor that the previous rank sends, into `x`."""
        dist.recv(x, group=self.communicator(), group_src=self.rank - 1)
        return x

    def from_last(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrites `x` with that of the last rank; all pass the same shape. The last rank does not wait, and its `x`
        must not change any more."""
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
        """Keeps tensors of running sends alive: for up to one step more than there are ranks."""
        self._under_way.append((work, x))
        if len(self._under_way) > self.size + 1:
            self._under_way.popleft()[0].wait()

    def communicator(self) -> dist.ProcessGroup:
        """Returns this group's torch.distributed process group."""
        assert self._process_group is not None, f"no tensors travel in {self}"
        return self._process_group


ALONE = Group()


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of this rank, named by what their ranks share. Layers get them from their scope.

    `experts`: ranks whose expert outputs sum to the layer's, i.e. all. `ep` and `expert_tp` only divide expert weights
    and exchange nothing themselves. `pp`: ranks with the same place in all pipeline stages; `pp_tokens`: the same ranks
    in a second group, so that tokens on their way back never wait for hidden states. `dp`: ranks with the same place in
    the attention groups, each of which has requests of its own. `context`: DCP ranks, which shard the tokens of caches
    that all of them would otherwise hold.
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
        """Returns the groups for the layers of a draft model. It computes for one attention group's requests, so only
        that group's ranks share its layers."""
        if self.dp.size == 1:
            return self
        shared = self.attention
        dims = Group(shared.rank, shared.size)
        return replace(self, tp=shared, vocabulary=shared, experts=shared, ep=ALONE, expert_tp=dims, dp=ALONE)

    @property
    def layer_groups(self) -> tuple[Group, ...]:
        """Returns the groups over which layers communicate, each once."""
        groups = (self.tp, self.vocabulary, self.attention, self.experts, self.dp, self.context)
        return tuple({id(group): group for group in groups if group.size > 1}.values())

    def quantize_with(self, create: Callable[[Group], QuantizedSums]) -> None:
        """Quantizes large all-reduces of hidden states over `tp`, `attention` and `dp` if they have several ranks;
        `create` makes a group's quantized collectives. Call before the first graph is captured."""
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
    """Returns the groups of one rank. Process groups: `process_group` of its stage, `stages_group` and `tokens_group`
    of ranks with its place in all stages, `context_group` of its DCP ranks, `attention_group` of ranks that share
    heads, `requests_group` of ranks with its place in the attention groups; without them the groups cannot
    communicate."""
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
    """Returns the store at HOST:PORT in which ranks of several machines meet. here: this rank serves it."""
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
    """Waits until all ranks have come to the store. Raises UserError that names those missing, or those on another
    backend."""
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
    """Returns a socket that listens on this address only. Raises UserError."""
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


def meet() -> None:
    """Waits for all ranks without a time limit, after work that takes each a different time."""
    least(0)


def answer_beat() -> None:
    """Meets the ranks of all machines. Raises what torch.distributed raises if one does not come in time."""
    dist.all_reduce(torch.zeros(1), group=_state.beat_group)


def least(value: int) -> int:
    """Returns the smallest of the ranks' values."""
    return all_reduce_min([value])[0]


def all_ranks_say(yes: bool) -> bool:
    """Returns whether `yes` is true on all ranks."""
    return least(int(yes)) == 1


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
