"""The decoding requests, and the arrays of their next step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np
import numpy.typing as npt

from sglang.srt.managers.scheduler.counters import Counters
from sglang.srt.managers.scheduler.schedule_batch import Req
from sglang.srt.mem_cache.kv_table import Lengths

MAX_MASK_MS = 10
"""Milliseconds of a step for the masks of grammars that are slow to follow."""


class RunningBatch:
    """Decoding requests in the order of their arrival.

    With pipeline parallelism they are divided into as many microbatches as steps are in flight, and a step brings
    tokens of one microbatch (`now`): the last tokens of the others are still being computed. The microbatch of a
    request changes none of its tokens, only how long its step waits. A step brings up to `tokens_per_step` tokens of a
    request: where that is more than one, all lengths are upper bounds, and `Counters.verified` subtracts rejected
    tokens.
    """

    def __init__(self, counters: Counters, tokens_per_step: int, lookahead_slots: int, num_microbatches: int) -> None:
        """lookahead_slots: positions after a request's tokens that need a cache slot (`Drafter.lookahead_slots`)."""
        self.counters = counters
        self.tokens_per_step, self.lookahead_slots, self.num_microbatches = (
            tokens_per_step,
            lookahead_slots,
            num_microbatches,
        )
        self.microbatch = 0
        self._sits_out: npt.NDArray[np.bool_] | None = None
        """By slot, the requests that bring no token to the next step because others with slow masks do. None: all may
        bring some."""
        self.clear()

    def __len__(self) -> int:
        return len(self.reqs)

    def clear(self) -> None:
        """Removes all requests."""
        self.reqs: list[Req] = []
        self.slots = np.empty(0, np.int64)
        self.limits, self.max_widths = np.empty(0, np.int32), np.empty(0, np.int32)
        self._select()

    def add(self, reqs: list[Req]) -> None:
        """Adds requests after a step that computed their prompts. Each joins the smallest microbatch; among equals, the
        one that runs last."""
        counts = self._counts(self.reqs)
        for req in reqs:
            req.microbatch = min(
                range(self.num_microbatches),
                key=lambda i: (counts[i], (i - self.microbatch) % self.num_microbatches),
            )
            counts[req.microbatch] += 1
        self.reqs = self.reqs + reqs
        self.slots = np.append(self.slots, np.array([r.slot for r in reqs], np.int64))
        self.limits = np.append(self.limits, _int32([r.limit for r in reqs]))
        self.max_widths = np.append(self.max_widths, _int32([r.max_width(self.tokens_per_step) for r in reqs]))
        self._level()
        self._select()

    def next_microbatch(self) -> None:
        """Changes to the next microbatch that has requests."""
        if self.num_microbatches > 1:
            self.microbatch = (self.microbatch + 1) % self.num_microbatches
            self._select()

    def drop_finished(self) -> None:
        """Drops requests that ended, which have no tokens any more, and those whose last token is certainly being
        computed. Call it before slots are reassigned."""
        self.keep((self.seq_lens > 0) & (self.planned_lens - self.slack < self.limits))

    def remove(self, reqs: Sequence[Req]) -> None:
        """Drops those of these requests that are running. Call it while they have their slots."""
        self.keep(~np.isin(self.slots, [req.slot for req in reqs]))

    def keep(self, which: npt.NDArray[np.bool_]) -> None:
        """Drops all requests but those that `which` [R] marks."""
        if which.all():
            return
        self.reqs = list(compress(self.reqs, which.tolist()))
        self.slots, self.limits, self.max_widths = self.slots[which], self.limits[which], self.max_widths[which]
        self._level()
        self._select()

    def _counts(self, reqs: list[Req]) -> list[int]:
        """Returns the number of requests in each microbatch."""
        microbatches = np.fromiter((r.microbatch for r in reqs), np.int64, len(reqs))
        counts: list[int] = np.bincount(microbatches, minlength=self.num_microbatches).tolist()
        return counts

    def _level(self) -> None:
        """Fills empty microbatches from those with several requests, since an empty one would leave a pipeline stage
        idle. A moved request may wait once for tokens that its old microbatch would already have."""
        if self.num_microbatches == 1:
            return
        counts = self._counts(self.reqs)
        while not min(counts) and max(counts) > 1:
            longest, empty = counts.index(max(counts)), counts.index(0)
            moving = [r for r in self.reqs if r.microbatch == longest][counts[longest] // 2 :]
            for req in moving:
                req.microbatch = empty
            counts[longest], counts[empty] = counts[longest] - len(moving), len(moving)

    def _select(self) -> None:
        self.microbatch_reqs: list[Req] = self.reqs
        """Requests whose turn it is; `in_microbatch` says which of all requests they are."""
        self.in_microbatch = np.ones(len(self.reqs), np.bool_)
        if self.num_microbatches == 1 or not self.reqs:
            return
        counts = self._counts(self.reqs)
        while not counts[self.microbatch]:
            self.microbatch = (self.microbatch + 1) % self.num_microbatches
        self.in_microbatch = np.fromiter((r.microbatch == self.microbatch for r in self.reqs), np.bool_, len(self.reqs))
        self.microbatch_reqs = [r for r in self.reqs if r.microbatch == self.microbatch]

    # --- lengths, an entry a request ----------------------------------------------------------------------------------

    @property
    def seq_lens(self) -> Lengths:
        """Returns the tokens whose KV is launched."""
        return self.counters.kv_len[self.slots]

    @property
    def slack(self) -> Lengths:
        """Returns how many of `seq_lens` may be rejected."""
        return self.counters.slack[self.slots]

    @property
    def planned_lens(self) -> Lengths:
        """Returns the tokens that exist once every launched step has sampled."""
        return self.counters.planned_len[self.slots]

    @property
    def reserved_lens(self) -> Lengths:
        """Returns the positions that have a cache slot."""
        reserved: Lengths = np.maximum(self.seq_lens, self.counters.reserved_len[self.slots])
        return reserved

    @property
    def certain_lens(self) -> Lengths:
        """Returns the tokens that are certainly computed."""
        certain: Lengths = self.seq_lens - self.slack
        return certain

    def widths(self, at_most: int) -> Lengths:
        """Returns [R] tokens that each request brings to the next step; 0: it waits for its microbatch, or for results
        that decide whether it may have another token, or for others with slow masks."""
        there = np.minimum(self.counters.num_speculative_tokens[self.slots] + 1, self.limits - self.planned_lens)
        widths: Lengths = np.minimum(np.minimum(there, self.max_widths), at_most)
        widths *= self.in_microbatch
        return widths if self._sits_out is None else widths * ~self._sits_out[self.slots]

    def take_turns(self) -> None:
        """Chooses which of the requests with slow masks bring tokens to the next step: those that brought none for
        longest, as many as take MAX_MASK_MS together, and at least one. The others wait, instead of all who are in the
        step."""
        self._sits_out = None
        if not self.counters.mask_ms.any():
            return
        costs = self.counters.mask_ms[self.slots] * self.widths(self.tokens_per_step)  # each of its tokens has a mask
        slow = np.flatnonzero(costs)
        if costs.sum() <= MAX_MASK_MS:
            return
        slow = slow[np.argsort(self.counters.last_turn[self.slots[slow]], kind="stable")]
        count = max(1, int(np.searchsorted(np.cumsum(costs[slow]), MAX_MASK_MS, "right")))
        self._sits_out = np.zeros(len(self.counters.mask_ms), np.bool_)
        self._sits_out[self.slots[slow[count:]]] = True

    def reserved_by(self, widths: Lengths) -> Lengths:
        """Returns the positions that have a cache slot after a step with `widths` tokens of each request."""
        needed = np.minimum(self.seq_lens + widths + np.int32(self.lookahead_slots) * (widths > 0), self.limits)
        reserved: Lengths = np.maximum(self.reserved_lens, needed)
        return reserved

    def launched(self, widths: Lengths, num_speculative_tokens: int) -> None:
        """Counts a step with `widths` tokens of each request, which makes `num_speculative_tokens` draft tokens for the
        next one."""
        self.counters.launched(self.slots, widths, self.reserved_by(widths), num_speculative_tokens)


def _int32(values: list[int]) -> Lengths:
    return np.array(values, np.int32)
