"""Priorities of requests, and the budget of a prefill step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from sglang.srt.managers.scheduler.running_batch import RunningBatch
from sglang.srt.managers.scheduler.schedule_batch import Req
from sglang.srt.mem_cache.kv_table import KVTable
from sglang.srt.plan.decode_interval import IntervalRule
from sglang.srt.server_args import ServerArgs

ESTIMATED_NEW_TOKENS = 4096
"""Most tokens that a request is expected to decode when memory is reserved for it."""


@dataclass(frozen=True, slots=True)
class Priorities:
    """Order of waiting requests by their priorities."""

    low_first: bool = False
    threshold: int | None = 10
    """A waiting request replaces running ones whose priority is lower by more than this; None: it replaces none."""

    @classmethod
    def from_args(cls, args: ServerArgs) -> Priorities | None:
        """Returns the policy of the --priority flags; None without --enable-priority-scheduling."""
        if not args.enable_priority_scheduling:
            return None
        preempts = not args.disable_priority_preemption
        threshold = args.priority_scheduling_preemption_threshold if preempts else None
        return cls(args.schedule_low_priority_values_first, threshold)

    def rank(self, req: Req) -> int:
        """Returns a sort key: a smaller one is more important."""
        return req.priority if self.low_first else -req.priority

    def may_replace(self, running: list[Req], waiting: Req) -> bool:
        """Returns whether `waiting` is so important that a running request should make room for it."""
        if self.threshold is None or not running:
            return False
        worst = (max if self.low_first else min)(map(attrgetter("priority"), running))
        return self._lead(waiting, worst) > self.threshold

    def victims(self, running: list[Req], waiting: Req) -> list[Req]:
        """Returns the running requests that should make room for `waiting`, one after the other: the least important
        first, and of equal ones the one that loses least."""
        if self.threshold is None:
            return []
        below = [req for req in running if self._lead(waiting, req.priority) > self.threshold]
        return sorted(below, key=lambda req: (-self.rank(req), req.output_len))

    def _lead(self, waiting: Req, priority: int) -> int:
        """Returns by how much a request is more important than one with `priority`."""
        return priority - waiting.priority if self.low_first else waiting.priority - priority


MAX_PROMPT_LOGPROBS = 1 << 16
"""Log probabilities of prompts that a step computes. Each costs 0.2 us in the step's thread and more in the processes
behind it, which read those of a step at once; a prompt may ask for millions."""


class NewTokenRatio:
    """Share of their possible output that running requests are expected to use: it starts high, sinks while decoding
    goes well, and rises when a request had to be retracted."""

    START, FLOOR, DECAY, PENALTY = 0.7, 0.1, 0.001, 0.2

    def __init__(self, conservativeness: float) -> None:
        self.value = min(1.0, self.START * conservativeness)
        self.floor = min(self.value, self.FLOOR * conservativeness)

    def step(self) -> None:
        """Lowers the ratio after a decode step."""
        self.value = max(self.floor, self.value - self.DECAY)

    def retracted(self) -> None:
        """Raises the ratio after a retraction."""
        self.value = min(1.0, self.value + self.PENALTY)


def leaves_room_for_prompts(chunk: int | None, page: int, num_decodes: int) -> bool:
    """Returns whether decoding tokens leave half of a step's chunk, in whole pages, to prompts."""
    return chunk is None or 2 * ((chunk - num_decodes) // page * page) >= chunk


class DecodeInterval:
    """Steps without prompts after a step with prompts (--prefill-decode-interval), while enough requests run. Decoding
    requests wait for the prompts of their step; grouping prompts in fewer steps makes fewer decode steps wait.

    Attention groups share it, because they share their steps.
    """

    def __init__(self, rule: IntervalRule, num_microbatches: int = 1) -> None:
        """The rule applies to the group with most requests. num_microbatches: as for a `RunningBatch`; each microbatch
        gets the rule's steps."""
        self._rule, self._steps = rule, rule.steps * num_microbatches
        self._left = 0
        self.prompts_wait = False
        """True if the step must not have prompts."""

    def begin(self, num_running: int) -> None:
        """Begins a step with `num_running` running requests."""
        if num_running < self._rule.least_running:
            self._left = 0
        self.prompts_wait = self._left > 0
        self._left = max(0, self._left - 1)

    def launched_prompts(self) -> None:
        """Notes that the step has prompts."""
        self._left = self._steps


class PrefillBudget:
    """The cache slots, new tokens and chunk that one prefill step may still take."""

    def __init__(
        self,
        kv: KVTable,
        running: RunningBatch,
        ratio: float,
        max_tokens: int,
        chunk: int | None,
        used: int,
        num_groups: int = 1,
    ) -> None:
        """num_groups: attention groups, which compute prompts in the same step."""
        self.kv = kv
        left = np.minimum(running.limits - running.seq_lens, ESTIMATED_NEW_TOKENS)
        page = kv.page_size
        self.reserved = int(left.sum() * ratio) + page * len(running)
        self.window_room = [w.room(running.slots, running.reserved_lens, running.limits) for w in kv.windows]
        self.tokens = max_tokens - used
        self.chunk = chunk - used if chunk is not None else None
        self.alone = len(running) == 0
        self.lookahead_slots = running.lookahead_slots
        self.logprobs = MAX_PROMPT_LOGPROBS // num_groups
        self.first = True
        self.short = False
        """True if the last request got less than it could use."""

    def free(self) -> int:
        """Returns the slots that can still be reserved. Matched prefixes are locked first, so it shrinks as requests
        match."""
        return self.kv.available_size() - self.reserved

    def has_room_to_load(self, req: Req, prefix_len: int, windows: Sequence[int]) -> bool:
        """Returns whether a request with `prefix_len` cached and locked tokens could enter this step while a load takes
        `windows` tokens of each window, which are then reserved for it. The slots that the load takes for its tokens
        are already counted as used."""
        want, output = len(req.tokens) - prefix_len, min(req.limit - len(req.tokens), ESTIMATED_NEW_TOKENS)
        needed = want + self.kv.page_size + (0 if self.alone else output)
        if needed > self.free() or any(room < n for room, n in zip(self.window_room, windows, strict=True)):
            return False
        self.window_room = [room - n for room, n in zip(self.window_room, windows, strict=True)]
        return True

    def take(self, req: Req, prefix_len: int) -> int:
        """Returns how many new tokens of a request with `prefix_len` cached and locked tokens this step computes, and
        reserves slots for them and for its expected output; 0: none fit."""
        page = self.kv.page_size
        want = len(req.tokens) - prefix_len
        output = min(req.limit - len(req.tokens), ESTIMATED_NEW_TOKENS)
        needed = want + output + page
        if self.alone:  # its limit keeps it in the pool: no reserve for its output
            end = prefix_len + want + min(output, self.lookahead_slots)
            needed = (-(-end // page) - -(-prefix_len // page)) * page
        if needed > self.free():
            return 0
        take = want
        if self.chunk is not None and take > self.chunk:
            take = self.chunk // page * page
        elif take > self.tokens and not self.first:  # the first may exceed the limit, as it would never fit otherwise
            take = 0
        take = self._take_of_windows(req, self._take_of_logprobs(req, prefix_len, take))
        self.short = take < want
        if take == want:
            take = self._pause(req, prefix_len) - prefix_len
        if take > 0:
            self.alone = self.first = False
            self.reserved += (want if self.short else want + output) + page
            self.tokens -= take
            if self.chunk is not None:
                self.chunk -= take
            self.logprobs -= len(req.prompt_logprobs_in(prefix_len, take)) * req.logprob_width
        return take

    def _pause(self, req: Req, begin: int) -> int:
        """Returns where a prompt's last chunk pauses so that its state is kept: at a whole page outside of runs of
        image tokens that must not be cut; at its end if there is none."""
        end, page = self.kv.chunk_end(begin, len(req.tokens)), self.kv.page_size
        while req.media is not None and (uncut := req.media.uncut_end(begin, end)) < end:
            end = uncut // page * page  # may lie within the run before, if runs touch
        return end if end > begin else len(req.tokens)

    def _take_of_logprobs(self, req: Req, prefix_len: int, take: int) -> int:
        """Returns how many of `take` tokens have few enough log probabilities; for the first request at least a page or
        a run of image tokens that must not be cut, and all where prompts must not be chunked or none are wanted."""
        wanted = req.prompt_logprobs_in(prefix_len, take)
        if self.chunk is None or not wanted or len(wanted) * req.logprob_width <= self.logprobs:
            return take
        end = wanted.start + max(0, self.logprobs) // req.logprob_width - 1
        page = self.kv.page_size
        fewer = max(page if self.first else 0, (end - prefix_len) // page * page)
        if self.first and req.media is not None and req.media.uncut_end(prefix_len, prefix_len + fewer) == prefix_len:
            fewer = req.media.run_end(prefix_len) - prefix_len
        return min(take, fewer)  # less than a page may be left of the prompt

    def _take_of_windows(self, req: Req, take: int) -> int:
        """Returns how many of `take` tokens every window table has room for beside the window; 0 if that is not enough
        and prompts must not be chunked."""
        page = self.kv.page_size
        longest = -(-req.limit // page) * page
        for i, window in enumerate(self.kv.windows):
            if req.slot:  # a prompt that continues: its window's slots count as free
                self.window_room[i] += -(-req.kv_len // page) * page - int(window.start[req.slot])
            room = self.window_room[i]
            if min(window.max_prompt_tokens(take), longest) > room:
                fits = (room - window.max_prompt_tokens(0)) // page * page - page
                take = min(take, max(0, fits)) if self.chunk is not None else 0
        if take > 0:
            for i, window in enumerate(self.kv.windows):
                self.window_room[i] -= min(window.max_prompt_tokens(take), longest)
        return take
