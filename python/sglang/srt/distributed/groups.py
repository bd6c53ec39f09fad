"""The groups of ranks that share something, and the collectives that layers need.

Code asks for a group by what its ranks share (`Groups`); the layout alone decides which ranks these are. With one rank
every collective returns its input.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from sglang.srt.distributed.partial_sums import DeferredAllReduce, PendingAllReduce
from sglang.srt.distributed.ping_pong import PingPong
from sglang.srt.distributed.quantized_sums import PeerSums, QuantizedSums
from sglang.srt.plan.ranks import RankLayout


class Reducer(Protocol):
    """An all-reduce that serves some tensors; its answers are the same on all ranks."""

    def can_serve_tensor(self, x: torch.Tensor) -> bool:
        """Returns whether the reducer sums tensors of this type and size."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the ranks. May reuse the storage of `x`."""

    def can_norm(self, x: torch.Tensor) -> bool:
        """Returns whether the reducer can sum `x` and compute the norm behind it in one kernel."""

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

    def _run_collective(self, what: str, x: torch.Tensor, collective: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns the collective's result. what, x: identify it to both microbatches, whose tensors differ in rows
        only."""
        if self._ping_pong is None or not self._ping_pong.active:
            return collective()
        return self._ping_pong.run_collective(self._named(what, x), collective)

    def _named(self, what: str, x: torch.Tensor) -> object:
        return what, self.size, x.dtype, x.shape[-1] if x.dim() > 1 else 1

    def begin_sum(self, x: torch.Tensor) -> DeferredAllReduce:
        """Returns an object that all-reduces the partial sums `x` when the total is needed: this group, or, if
        microbatches alternate block by block, an all-reduce that starts now. `x` must not change until then."""
        ping_pong = self._ping_pong
        if ping_pong is None or not ping_pong.by_block:
            return self
        return PendingAllReduce(ping_pong.start_collective(self._named("sum", x), lambda: self._summed(x, exact=False)))

    def _quantized_for(self, x: torch.Tensor, exact: bool = False) -> QuantizedSums | None:
        sums, ping_pong = self._quantized, self._ping_pong
        exact = exact or (ping_pong is not None and ping_pong.active and ping_pong.exact)
        return sums if sums is not None and not exact and sums.covers(x) else None

    def all_reduce(self, x: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """Returns the sum over the ranks. May reuse the storage of `x`, so use the result only. exact: never
        quantized."""
        return x if self.size == 1 else self._run_collective("sum", x, lambda: self._summed(x, exact))

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
        return x if self.size == 1 else self._run_collective("gather", x, lambda: self._gathered(x, dim % x.dim()))

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
        return self._run_collective("gather", x, lambda: quantized.all_gather(x))

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """All-to-all: sends part i of x [ranks, ...] to rank i, and returns the parts [ranks, ...] that the ranks sent
        here."""
        return x if self.size == 1 else self._run_collective("exchange", x, lambda: self._exchanged(x))

    def _exchanged(self, x: torch.Tensor) -> torch.Tensor:
        if (exchanger := self._exchanger_for(x[0])) is not None:
            return exchanger.exchange(x)
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=self.communicator())
        return received

    def reduce_scatter(self, x: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """Returns this rank's sum [N, ...] over the ranks' x [ranks, N, ...], which hold a partial sum for each rank.
        exact: never quantized."""
        return x[0] if self.size == 1 else self._run_collective("scatter", x, lambda: self._scattered(x, exact))

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
        self._keep_until_sent(work, x)

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
            self._keep_until_sent(work, x)
        else:
            work.wait()
        return x

    def _keep_until_sent(self, work: dist.Work, x: torch.Tensor) -> None:
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
    kind: type[Group] = Group,
) -> Groups:
    """Returns the groups of one rank. Process groups: `process_group` of its stage, `stages_group` and `tokens_group`
    of ranks with its place in all stages, `context_group` of its DCP ranks, `attention_group` of ranks that share
    heads, `requests_group` of ranks with its place in the attention groups; without them the groups cannot
    communicate, unless they are of a `kind` that need not."""
    tp_rank = ranks.tp_rank(rank)
    everyone = attention = kind(tp_rank, ranks.tp_size, process_group)
    if ranks.attn_dp_size > 1:
        attention = kind(ranks.attn_tp_rank(tp_rank), ranks.attn_tp_size, attention_group)
    return Groups(
        tp=everyone,
        vocabulary=attention if ranks.dp_lm_head else everyone,
        attention=attention,
        dp=kind(ranks.attn_dp_rank(tp_rank), ranks.attn_dp_size, requests_group),
        experts=everyone,
        ep=kind(ranks.ep_rank(tp_rank), ranks.ep_size),
        expert_tp=kind(ranks.expert_tp_rank(tp_rank), ranks.expert_tp_size),
        pp=kind(ranks.stage(rank), ranks.pp_size, stages_group),
        pp_tokens=kind(ranks.stage(rank), ranks.pp_size, tokens_group),
        context=kind(ranks.context_rank(tp_rank), ranks.dcp_size, context_group),
    )
