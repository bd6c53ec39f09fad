"""Schedulers of attention groups, each of which has its own requests (--attn-dp-size).

Every rank runs the schedulers of all groups over the same messages, so all know without messages how many rows each
group brings to a step, and what it samples: only a step's tokens, which the schedulers need anyway, travel between the
groups. A request belongs to one group from its arrival on; the groups share neither caches nor queues.

    messages ──> AttentionGroups ── owner ──> Scheduler of group 0 ─┐
                                              Scheduler of group 1 ─┼─ pick ──> one step of all groups ──> results
                                              ...                  ─┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang.srt.distributed import parallel_state
from sglang.srt.managers.front.replica_router import ReplicaLoad, ReplicaRouter
from sglang.srt.managers.scheduler.batch_builder import vocab_mask
from sglang.srt.managers.scheduler.intake import MAX_QUEUED_REQUESTS, RequestTotals
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_stats import Load, StatsLogger
from sglang.srt.managers.wire.io_struct import AbortReq, BatchTokenIDOut, FinishReason, TokenizedGenerateReq
from sglang.srt.mem_cache.cache_tier import CopyState, PageMoves
from sglang.srt.mem_cache.storage.other_group import OtherGroupStorage
from sglang.srt.model_executor.step import GroupSteps
from sglang.srt.sampling.sampling_table import takes_largest
from sglang.srt.server_args import ServerArgs

if TYPE_CHECKING:
    from sglang.srt.configs.storage_backend import StorageConfig
    from sglang.srt.constrained.grammar_manager import PendingGrammar
    from sglang.srt.drafts.depth import Depth
    from sglang.srt.mem_cache.host_tier import CopyEngine, HostTier
    from sglang.srt.mem_cache.storage.engine import StorageEngine, StorageJobs
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.step import StepInput


class _NoTable:
    """Stands for the sampling table of a group whose tokens other ranks sample."""

    def set(self, *request: object) -> None:
        pass

    def clear(self, slot: int) -> None:
        pass


class _OtherGroupCopies:
    """Stands for the copies of a group whose caches other ranks hold. Implements CopyEngine. Always reports success:
    the minimum over all ranks counts, so the ranks of the group decide."""

    ready = True
    broken = False
    loads_layers = False
    state = CopyState.DONE
    layers = None

    def __init__(self, page_bytes: Sequence[int]) -> None:
        self.page_bytes = page_bytes

    def start(self) -> None:
        pass

    def submit(self, moves: Sequence[PageMoves], to_host: bool) -> _OtherGroupCopies:
        return self

    def submit_layers(self, moves: Sequence[PageMoves]) -> _OtherGroupCopies:
        raise AssertionError("no rank loads layer by layer where one cannot")

    def pace(self, rate: float | None) -> None:
        pass


class _GroupRunner:
    """The runner as the scheduler of one group uses it. Only the ranks of the group compute its requests."""

    def __init__(self, runner: ModelRunner, is_own: bool) -> None:
        self.plan = runner.plan
        self.tokens_per_step, self.lookahead_slots = runner.tokens_per_step, runner.lookahead_slots
        self.next_tokens_read = runner.next_tokens_read
        self.decodes_in_graph, self.launches = runner.decodes_in_graph, runner.launches
        self.sampling_table: Any = runner.sampling_table if is_own else _NoTable()
        self.media = runner.media if is_own or runner.media is None else runner.media.empty_copy()
        self.copies: CopyEngine | None = runner.copies
        if runner.copies is not None and not is_own:
            self.copies = _OtherGroupCopies(runner.copies.page_bytes)
        self.storage: StorageJobs | None = runner.storage
        if runner.storage is not None and not is_own:
            self.storage = OtherGroupStorage(runner.storage)
        self._runner = runner if is_own else None

    def begin(self, slot: int, tokens: list[int], position_delta: int) -> None:
        if self._runner is not None:
            self._runner.begin(slot, tokens, position_delta)


class _OneDepth:
    """Replaces `AdaptiveDepth` for the schedulers of all groups, whose steps have the same width."""

    def __init__(self, depth: Depth) -> None:
        self.observe, self.expect = depth.observe, depth.expect
        self._depth, self._width = depth, 1

    def choose(self, num_requests: int) -> None:
        """Chooses the next step's depth for the group with most requests, which has `num_requests`."""
        self._width = self._depth.next_width(num_requests)

    def next_width(self, num_requests: int) -> int:
        return self._width

    @property
    def confidence_cuts(self) -> int:
        return self._depth.confidence_cuts


class AttentionGroups:
    """One scheduler for each group, with the interface of a single `Scheduler`."""

    def __init__(
        self, args: ServerArgs, runner: ModelRunner, stop_checker: StopChecker, depth: Depth | None = None
    ) -> None:
        """depth: as for a `Scheduler`."""
        self.depth = None if depth is None else _OneDepth(depth)
        self.args, self.runner, self.plan = args, runner, runner.plan
        self.group = runner.groups.dp.rank
        count = runner.groups.dp.size
        queued = args.max_queued_requests or MAX_QUEUED_REQUESTS
        args = replace(args, max_queued_requests=-(-queued // count))
        totals = RequestTotals()
        self.schedulers = [
            Scheduler(args, _GroupRunner(runner, group == self.group), stop_checker, self.depth, totals)  # type: ignore[arg-type]
            for group in range(count)
        ]
        caches = self.plan.caches_prefixes and not args.disable_radix_cache
        self.router = ReplicaRouter(args.load_balance_method, count, caches, args.prefix_affinity_fallback)
        for group, scheduler in enumerate(self.schedulers):
            self.router.set_cache_size(group, scheduler.kv.size)
        self.stats = StatsLogger(
            args.decode_log_interval, self.load, args.speculative_algorithm, self.host_tiers, runner.launches
        )
        self.interval = self.schedulers[0].interval
        for scheduler in self.schedulers:
            scheduler.stats, scheduler.interval = self.stats, self.interval
        self._launched: deque[list[bool]] = deque(maxlen=args.steps_in_flight)
        """Which groups had a batch in each of the last steps, whose results are not read back yet."""

    # --- the step ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Launches the next batches of all groups as one step, then reads back those of the step before."""
        if self.depth is not None:
            self.depth.choose(max(len(scheduler.running.microbatch_reqs) for scheduler in self.schedulers))
        for scheduler in self.schedulers:
            scheduler.end_copies()
        self.interval.begin(max(len(scheduler.running) for scheduler in self.schedulers))
        batches = [None if scheduler.paused else scheduler.pick() for scheduler in self.schedulers]
        if any(batch is not None for batch in batches):
            self.launch(batches)
            self._launched.append([batch is not None for batch in batches])
        else:
            self._launched.clear()
        idles = not self._launched and not any(each.in_flight for each in self.schedulers)
        for group, (scheduler, batch) in enumerate(zip(self.schedulers, batches, strict=True)):
            scheduler.read_back(batch, sum(step[group] for step in self._launched))
        if idles:
            next(
                (scheduler for scheduler in self.schedulers if scheduler.copying), self.schedulers[0]
            ).wait_for_copies()

    def launch(self, batches: list[ScheduleBatch | None]) -> None:
        """Launches a step like `Scheduler.launch`. The ranks of a group fill its masks; all ranks read back the tokens
        that a mask needs, so that all know the same."""
        there = [batch for batch in batches if batch is not None]
        plain = all(not batch.needs_mask and all(map(_takes_largest, batch.sampled)) for batch in there)
        steps = GroupSteps.of([None if batch is None else batch.step for batch in batches], plain)
        step: StepInput = steps.steps[self.group]
        step.groups = steps
        forward = self.runner.forward(step)
        mask: np.ndarray | None = None
        for group, (scheduler, batch) in enumerate(zip(self.schedulers, batches, strict=True)):
            if batch is None or not batch.needs_mask:
                continue
            scheduler.sync(set(batch.limited))
            if group == self.group:
                mask = vocab_mask(batch, self.plan.model.vocab_size, scheduler.masks)
        self._share_mask_times(batches)
        results = self.runner.sample_groups(forward, mask)
        for scheduler, batch, result in zip(self.schedulers, batches, results, strict=True):
            if batch is not None:
                batch.result = result
                scheduler.in_flight.append(batch)

    def _share_mask_times(self, batches: list[ScheduleBatch | None]) -> None:
        """Tells all ranks what the masks of the step have cost the ranks that filled them: the leader, which decides
        about slow grammars, fills those of its own group alone. A collective if any group has grammars."""
        grammars = [
            (req.grammar, group == self.group)
            for group, batch in enumerate(batches)
            if batch is not None and batch.needs_mask
            for req in batch.limited
            if req.grammar is not None
        ]
        spent = [int(grammar.mask_s * 1e9) if is_own else 0 for grammar, is_own in grammars]
        left = [int(grammar.allowance.left_s * 1e9) if is_own else 1 << 62 for grammar, is_own in grammars]
        agreed = parallel_state.all_reduce_min([*(-each for each in spent), *left])
        for (grammar, is_own), negated, left_ns in zip(grammars, agreed, agreed[len(spent) :], strict=False):
            if not is_own:
                grammar.note_mask_time(-negated / 1e9)
                grammar.allowance.left_s = left_ns / 1e9

    def sync(self) -> None:
        for scheduler in self.schedulers:
            scheduler.sync()

    @property
    def idle(self) -> bool:
        return all(scheduler.idle for scheduler in self.schedulers)

    # --- requests ----------------------------------------------------------------------------------------------------

    def add(self, msg: TokenizedGenerateReq, seed: int, stop_ids: frozenset[int]) -> Req | None:
        """Queues a request in the group with most of its prompt in its cache, or with the least load."""
        owner = self._owner(msg.rid)
        if owner is None:  # a group that has the id already refuses it
            owner = self.schedulers[
                self.router.choose(self.loads(), msg.input_ids, msg.cache_namespace, msg.media or (), msg.session)
            ]
        return owner.add(msg, seed, stop_ids)

    def loads(self) -> list[ReplicaLoad]:
        """Returns the load of each group."""
        return [
            ReplicaLoad(group, len(scheduler.reqs), scheduler.held_tokens)
            for group, scheduler in enumerate(self.schedulers)
        ]

    def _owner(self, rid: str) -> Scheduler | None:
        return next((scheduler for scheduler in self.schedulers if rid in scheduler.reqs), None)

    def _owner_of(self, req: Req) -> Scheduler:
        owner = self._owner(req.rid)
        assert owner is not None, "the request has not ended"
        return owner

    def end(self, req: Req, reason: FinishReason) -> None:
        self._owner_of(req).end(req, reason)

    def end_named(self, rid: str, reason: FinishReason) -> None:
        if (owner := self._owner(rid)) is not None:
            owner.end_named(rid, reason)

    def note_slow_mask(self, rid: str, milliseconds: int) -> None:
        if (owner := self._owner(rid)) is not None:
            owner.note_slow_mask(rid, milliseconds)

    def hold(self, req: Req, pending: PendingGrammar) -> None:
        self._owner_of(req).hold(req, pending)

    def compiling_of(self, rid: str) -> tuple[Req, PendingGrammar] | None:
        owner = self._owner(rid)
        return None if owner is None else owner.compiling_of(rid)

    def oldest_pending(self) -> PendingGrammar | None:
        """Returns the pending grammar with the earliest deadline; None without any."""
        pending = (scheduler.oldest_pending() for scheduler in self.schedulers)
        return min((each for each in pending if each is not None), key=lambda each: each.deadline, default=None)

    @property
    def num_compiling(self) -> int:
        return sum(scheduler.num_compiling for scheduler in self.schedulers)

    def release_hold(self, req: Req) -> None:
        self._owner_of(req).release_hold(req)

    def abort(self, msg: AbortReq) -> None:
        for scheduler in self.schedulers:
            scheduler.abort(msg)

    def pause(self, mode: str) -> None:
        for scheduler in self.schedulers:
            scheduler.pause(mode)

    @property
    def paused(self) -> bool:
        """Returns whether generation is paused, which is so in all groups or in none."""
        return self.schedulers[0].paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        """Returns whether generation is paused, which is so in all groups or in none."""
        for scheduler in self.schedulers:
            scheduler.paused = paused

    def flush_cache(self, keeps_host: bool = False) -> bool:
        """Empties the caches of all groups, or of none. keeps_host: as of `Scheduler`."""
        self.sync()
        reqs = self.reqs.values()
        if any(req.slot for req in reqs) or (reqs and not self.paused):
            return False
        self.router.forget_prefixes()
        return all(scheduler.flush_cache(keeps_host) for scheduler in self.schedulers)  # all groups can be flushed

    @property
    def reqs(self) -> dict[str, Req]:
        """Returns all requests, the oldest of each group first."""
        return {rid: req for scheduler in self.schedulers for rid, req in scheduler.reqs.items()}

    @property
    def waiting(self) -> Iterator[Req]:
        """Yields the waiting requests of all groups."""
        return (req for scheduler in self.schedulers for req in scheduler.waiting)

    @property
    def compiling(self) -> dict[str, tuple[Req, PendingGrammar]]:
        """Returns the requests of all groups that wait for a grammar, by request id: a new dict of them all."""
        return {rid: entry for scheduler in self.schedulers for rid, entry in scheduler.compiling.items()}

    @property
    def outbox(self) -> list[BatchTokenIDOut]:
        """The messages of all groups since it was set."""
        first, *others = self.schedulers
        for scheduler in others:
            first.outbox += scheduler.outbox
            scheduler.outbox = []
        return first.outbox

    @outbox.setter
    def outbox(self, messages: list[BatchTokenIDOut]) -> None:
        """Returns the messages of all groups since it was last set."""
        self.schedulers[0].outbox = messages

    # --- the tier in main memory -------------------------------------------------------------------------------------

    @property
    def host_tiers(self) -> list[HostTier]:
        """Returns the main memory tier of each group, or an empty list."""
        return [scheduler.host_tier for scheduler in self.schedulers if scheduler.host_tier is not None]

    def attach_storage(self, config: StorageConfig, storage: StorageEngine) -> None:
        """Attaches a store to the tiers of all groups. storage: jobs of this rank's group."""
        for group, tier in enumerate(self.host_tiers):
            tier.attach(config, storage if group == self.group else OtherGroupStorage(storage))

    # --- sizes -------------------------------------------------------------------------------------------------------

    def load(self) -> Load:
        loads = [scheduler.load() for scheduler in self.schedulers]
        return Load(
            sum(load.num_running for load in loads),
            sum(load.num_waiting for load in loads),
            sum(load.used_tokens for load in loads),
            sum(load.pool_tokens for load in loads),
        )

    @property
    def num_free_rows(self) -> int:
        return sum(scheduler.kv.num_free_rows() for scheduler in self.schedulers)

    @property
    def num_slots(self) -> int:
        """Returns the tokens that the caches of all groups hold."""
        return sum(scheduler.kv.size for scheduler in self.schedulers)

    def check_memory(self) -> dict[str, Any]:
        """Returns slot counts like a scheduler, summed over the groups; `groups` has each group's."""
        each = [scheduler.check_memory() for scheduler in self.schedulers]
        summed = {name: sum(memory[name] for memory in each) for name in ("free", "cached", "total", "held")}
        return {**summed, "groups": each}


def _takes_largest(req: Req) -> bool:
    return takes_largest(req.params)
