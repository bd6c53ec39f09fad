"""Choice of the prompts that a step computes: those that go on, then waiting requests that find room."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from sglang.srt.managers.scheduler.adapter_table import AdapterTable
from sglang.srt.managers.scheduler.media_steps import MediaSteps
from sglang.srt.managers.scheduler.queue_order import QueueOrder
from sglang.srt.managers.scheduler.running_batch import RunningBatch
from sglang.srt.managers.scheduler.schedule_batch import Req
from sglang.srt.managers.scheduler.schedule_policy import NewTokenRatio, PrefillBudget
from sglang.srt.managers.scheduler.waiting_queue import WaitingQueue
from sglang.srt.mem_cache.host_tier import Admission, HostTier
from sglang.srt.mem_cache.kv_table import KVTable
from sglang.srt.mem_cache.radix_node import Node

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

SHARED_PREFIX = 64
"""Two new requests that begin with this many equal, uncached tokens do not enter the same step: the second waits a step
and finds the first one's KV in the cache. If a model has states, it waits only if it begins with everything that the
first computes, because there is a state only at its end."""
MAX_EXAMINED = 128
"""Queued requests that a step examines, as some may wait for others, for their images or for a prefix."""
MAX_PLACED = 1 << 19
"""Tokens of cached prefixes beyond which no more requests enter a step: each gets its place in the tables, so many
samples of one long prompt would hold up all others."""


class PromptChoice:
    """Chooses the prompts of a step, and places the requests that enter."""

    def __init__(
        self,
        runner: ModelRunner,
        kv: KVTable,
        host_tier: HostTier | None,
        running: RunningBatch,
        waiting: WaitingQueue,
        order: QueueOrder,
        ratio: NewTokenRatio,
        num_groups: int,
        adapters: AdapterTable | None = None,
    ) -> None:
        """num_groups: attention groups, whose steps are computed together. adapters: None without LoRA adapters."""
        self.adapters = adapters
        self.runner, self.plan, self.kv, self.host_tier = runner, runner.plan, kv, host_tier
        self.running, self.waiting, self.order, self.ratio = running, waiting, order, ratio
        self.chunk = self.plan.chunked_prefill_size if self.plan.chunked_prefill_size > 0 else None
        """Tokens of a step with prompts; None: no limit but that of a step."""
        self.media = MediaSteps(runner.media, self._min_prompt_tokens, self.plan.page_size)
        self._num_groups = num_groups

    def admit(self, budget: PrefillBudget, chunked: Sequence[Req], steps_run: bool) -> list[tuple[Req, int]]:
        """Returns the requests of a prefill step with the number of tokens that each computes. Admitted ones have a
        request slot and hold a lock on their cached prefix. chunked: requests whose prompts are partly computed, which
        go first; steps_run: steps are in flight."""
        chosen: list[tuple[Req, int]] = []
        self.media.begin(len(self.running))
        if self.adapters is not None:
            self.adapters.begin_step((*self.running.reqs, *chunked))
        for req in chunked:
            take = budget.take(req, req.kv_len)
            take = self.media.ready(req, req.kv_len, take)
            if not take:
                return chosen
            chosen.append((req, take))
        entered: list[Req] = []
        placed = 0
        leave: defaultdict[tuple[str | None, bytes], list[np.ndarray]] = defaultdict(list)
        """Prefixes that requests which enter now leave in the cache for others, by namespace and first keys."""
        for req in islice(self.queue(), MAX_EXAMINED):
            if not self.kv.num_free_rows() or (chosen and budget.chunk is not None and budget.chunk <= 0):
                break
            if self.adapters is not None and not self.adapters.entering.may_enter(req):
                continue
            prefix = self.kv.match(req)
            start = (req.namespace, req.cache_keys(min(SHARED_PREFIX, len(req.tokens))).tobytes())
            if prefix.length < SHARED_PREFIX and any(map(req.may_reuse_prefix, leave[start])):
                continue
            self.kv.lock(prefix.node)
            if self.host_tier is not None:
                has_room = partial(budget.has_room_to_load, req, prefix.length)
                is_first, others_wait = (
                    self._num_groups == 1 and not chosen,
                    bool(self.running.reqs or steps_run),
                )
                admission = self.host_tier.admission(req, prefix.length, has_room, is_first, others_wait)
                if admission is not Admission.NOW:
                    self.kv.unlock(prefix.node)
                if admission is Admission.LATER:
                    continue
                if admission is Admission.LONGER:
                    prefix = self.kv.match(req)
                    self.kv.lock(prefix.node)
            take = budget.take(req, prefix.length)
            if not take:
                self.kv.unlock(prefix.node)
                break
            take = self.media.ready(req, prefix.length, take)
            if not take:
                self.kv.unlock(prefix.node)
                continue
            leave[start] += self._leaves(req, prefix.length + take)
            self._place(req, prefix.node)
            chosen.append((req, take))
            entered.append(req)
            placed += prefix.length
            if budget.short or placed >= MAX_PLACED:
                break
        self.waiting.remove(entered)
        return chosen

    def _min_prompt_tokens(self) -> int:
        """Returns how many tokens the first prompt of a step can always compute."""
        rooms = [window.max_solo_tokens() for window in self.kv.windows]
        chunk = [] if self.chunk is None else [-(-self.chunk // 2)]
        return min([*rooms, *chunk, self.plan.context_len])

    def queue(self) -> Iterable[Req]:
        """Returns the waiting requests in the order in which they enter."""
        return self.order.ordered(self.waiting)

    def _leaves(self, req: Req, end: int) -> list[np.ndarray]:
        """Returns the keys from which other requests can go on once a request is computed up to `end`: one entry, or
        none."""
        if self.kv.checkpoints is None:
            end = -(-SHARED_PREFIX // self.kv.page_size) * self.kv.page_size
        useful = self.kv.tree.enabled and SHARED_PREFIX <= end <= len(req.tokens) and end % self.kv.page_size == 0
        return [req.cache_keys(end)] if useful else []

    def budget(self, num_decodes: int) -> PrefillBudget:
        """Returns the tokens and slots that a step with `num_decodes` tokens of running requests has for prompts."""
        limits = self.plan.max_prefill_tokens, self.chunk, num_decodes
        return PrefillBudget(self.kv, self.running, self.ratio.value, *limits, self._num_groups)

    def fits(self, req: Req) -> bool:
        """Returns whether a waiting request could enter a step now."""
        if not self.kv.num_free_rows():
            return False
        prefix = self.kv.match(req)
        self.kv.lock(prefix.node)
        take = self.budget(0).take(req, prefix.length)
        self.kv.unlock(prefix.node)
        return take > 0

    def _place(self, req: Req, node: Node) -> None:
        self.kv.place(req, node)
        if self.host_tier is not None:
            self.host_tier.placed(req)
            if not req.admitted:
                req.host_len = min(req.num_loaded, req.num_cached)
                if self.host_tier.storage is not None:
                    req.stored_len = min(req.num_stored, req.host_len)
        if not req.admitted:
            req.hit_len, req.admitted = req.num_cached, True
            req.started_time = time.monotonic()
        self.runner.sampling_table.set(
            req.slot, req.params, req.seed, req.tokens[: req.prompt_len], req.tokens[req.prompt_len :], req.stop_ids
        )
        req.begin()
        self.runner.begin(req.slot, req.tokens, 0 if req.media is None else req.media.delta)
        if self.adapters is not None:
            self.adapters.place(req)
