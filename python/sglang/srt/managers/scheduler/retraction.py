"""Running requests that go back to the queue, because memory runs out or a more important request waits. Their tokens
are kept, and their KV as long as it is not evicted."""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np

from sglang.srt.managers.scheduler.prompt_choice import PromptChoice
from sglang.srt.managers.scheduler.running_batch import RunningBatch
from sglang.srt.managers.scheduler.schedule_batch import Req
from sglang.srt.managers.scheduler.schedule_policy import NewTokenRatio, Priorities
from sglang.srt.managers.scheduler.scheduler_stats import StatsLogger
from sglang.srt.managers.scheduler.waiting_queue import WaitingQueue
from sglang.srt.mem_cache.kv_table import KVTable, Lengths
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


class Scheduler(Protocol):
    """The part of `scheduler.Scheduler`, whose module imports this one, that retraction uses."""

    args: ServerArgs
    kv: KVTable
    running: RunningBatch
    waiting: WaitingQueue
    choice: PromptChoice
    priorities: Priorities | None
    ratio: NewTokenRatio
    stats: StatsLogger

    def sync(self) -> None:
        """Reads back steps in flight."""

    def can_grow(self, widths: Lengths) -> bool:
        """Returns whether there is room for a step with `widths` tokens of each running request."""

    def requeue(self, req: Req) -> None:
        """Gives up a request's slots and puts it at the head of the queue."""


def preempt(scheduler: Scheduler, priorities: Priorities) -> None:
    """Sends running requests back to the queue until the next waiting one fits."""
    running, choice = scheduler.running, scheduler.choice
    running.drop_finished()
    if not priorities.may_replace(running.reqs, scheduler.waiting[0]):
        return
    first = next(iter(choice.queue()))  # the policy orders requests of equal importance
    if choice.fits(first):
        return
    scheduler.sync()
    running.drop_finished()
    for victim in priorities.victims(running.reqs, first):
        if choice.fits(first):
            break
        running.remove([victim])
        scheduler.requeue(victim)
        logger.info("Request %s makes room for %s, which has a higher priority", victim.rid, first.rid)


def retract_until_it_fits(scheduler: Scheduler, width: int) -> None:
    """Sends the requests that lose least back to the queue until the others can have `width` tokens each."""
    running = scheduler.running
    while running.reqs and not scheduler.can_grow(running.widths(width)):
        _retract_some(scheduler, width)  # in a pipeline, others may then have their turn


def _retract_some(scheduler: Scheduler, width: int) -> None:
    """Retracts requests until the others that have their turn fit, and drops them from the batch together."""
    running, kv = scheduler.running, scheduler.kv
    priorities = None if scheduler.args.retraction_policy == "length" else scheduler.priorities
    ranks = [0 if priorities is None else -priorities.rank(req) for req in running.reqs]
    keys = [(rank, req.output_len, -req.prompt_len) for rank, req in zip(ranks, running.reqs, strict=True)]
    old, stays = running.reserved_lens, np.ones(len(running), np.bool_)
    new = running.reserved_by(running.widths(width))
    for i in sorted(range(len(keys)), key=keys.__getitem__):
        victim, stays[i] = running.reqs[i], False
        scheduler.requeue(victim)
        scheduler.ratio.retracted()
        scheduler.stats.retracted(victim)
        if kv.can_grow(old[stays], new[stays], 0):
            break
    running.keep(stays)
