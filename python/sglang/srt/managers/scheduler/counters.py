"""Progress of all requests with a slot, as arrays by slot, so that one array operation counts a step for all."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from sglang.srt.managers.wire.io_struct import DraftCounts
from sglang.srt.mem_cache.kv_table import Lengths

Slots = npt.NDArray[np.int64]
CHECKED, APPENDED, STREAMED = 0, 1, 2
"""What a step does with a request's tokens: it looks at each; or, unless one of them may end the request, only appends
them; or appends them and sends them at once."""


class Counters:
    """Arrays [max_requests + 1] int32; `Req` explains each. Row 0 belongs to requests without a slot and stays zero."""

    def __init__(self, max_requests: int, max_width: int = 1) -> None:
        """max_width: most tokens that a step may bring of a request."""
        self.kv_len, self.planned_len, self.slack, self.reserved_len, self.num_speculative_tokens = np.zeros(
            (5, max_requests + 1), np.int32
        )
        self.handling = np.zeros(max_requests + 1, np.int8)
        self.mask_ms = np.zeros(max_requests + 1, np.int32)
        """Milliseconds that a token's mask takes; 0: less than matters."""
        self.last_turn, self._num_turns = np.zeros(max_requests + 1, np.int64), 0
        """Number of the latest step that brought tokens, counted while any masks are slow."""
        self.drafts = np.zeros((max_requests + 1, 3), np.int32)
        """Steps, proposed and correct of `DraftCounts`."""
        self.draft_histogram = np.zeros((max_requests + 1, max_width), np.int32)

    def launched(self, slots: Slots, widths: Lengths, reserved_lens: Lengths, num_speculative_tokens: int) -> None:
        """Counts a step that brings `widths` tokens of each request (0 for some), after which `reserved_lens` positions
        have a cache slot. The requests with tokens get `num_speculative_tokens` draft tokens for their next step."""
        self.kv_len[slots] += widths
        self.planned_len[slots] += widths
        self.slack[slots] += np.maximum(widths - 1, 0)
        self.reserved_len[slots] = reserved_lens
        self.num_speculative_tokens[slots[widths > 0]] = num_speculative_tokens
        if self.mask_ms.any():
            self._num_turns += 1
            self.last_turn[slots[widths > 0]] = self._num_turns

    def verified(self, slots: Slots, widths: Lengths, counts: Lengths) -> None:
        """Counts a step's result: `counts` of the `widths` tokens were accepted."""
        self.kv_len[slots] -= widths - counts
        self.planned_len[slots] -= widths - counts
        self.slack[slots] -= widths - 1
        drafted = widths > 1
        slots, proposed, correct = slots[drafted], widths[drafted] - 1, counts[drafted] - 1
        totals = self.drafts[slots]
        totals[:, 0] += 1
        totals[:, 1] += proposed
        totals[:, 2] += correct
        self.drafts[slots] = totals
        self.draft_histogram[slots, correct] += 1

    def begin(self, slot: int, drafts: DraftCounts) -> None:
        """Takes over what was counted of a request that gets a slot."""
        self.drafts[slot] = drafts.steps, drafts.proposed, drafts.correct
        self.draft_histogram[slot] = 0
        self.draft_histogram[slot, : len(drafts.histogram)] = drafts.histogram

    def drafts_of(self, slot: int) -> DraftCounts:
        """Returns what was counted of the request with a slot."""
        steps, proposed, correct = self.drafts[slot].tolist()
        return DraftCounts(steps, proposed, correct, np.trim_zeros(self.draft_histogram[slot], "b").tolist())


class Counted(Protocol):
    """A request: its counters, and its slot; 0: it has none."""

    slot: int
    counters: Counters


class BySlot:
    """A field of a request, stored in the counters' array of the same name at the request's slot."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, req: Counted, owner: type) -> int:
        return int(getattr(req.counters, self._name)[req.slot])

    def __set__(self, req: Counted, value: int) -> None:
        assert req.slot or not value, "a request without a slot has computed nothing"
        getattr(req.counters, self._name)[req.slot] = value
