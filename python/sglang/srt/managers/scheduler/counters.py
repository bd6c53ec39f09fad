"""How far the steps of each request that has a slot have come, as arrays by slot: a step counts for all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sglang.srt.mem_cache.kv_table import Lengths

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.schedule_batch import Req

Slots = npt.NDArray[np.int64]


class Counters:
    """Arrays [max_requests + 1] int32 of what `Req` draws. Row 0 is that of requests without a slot, and stays zero."""

    def __init__(self, max_requests: int) -> None:
        self.kv_len, self.planned_len, self.slack, self.reserved_len, self.num_speculative_tokens = np.zeros(
            (5, max_requests + 1), np.int32
        )

    def launched(self, slots: Slots, widths: Lengths, reserved_lens: Lengths, num_speculative_tokens: int) -> None:
        """Counts a step that brings `widths` tokens of each request (some perhaps none), behind which so many positions
        have a cache slot, and which makes `num_speculative_tokens` draft tokens behind the tokens of those that it
        brings any of."""
        self.kv_len[slots] += widths
        self.planned_len[slots] += widths
        self.slack[slots] += np.maximum(widths - 1, 0)
        self.reserved_len[slots] = reserved_lens
        self.num_speculative_tokens[slots[widths > 0]] = num_speculative_tokens

    def verified(self, slots: Slots, widths: Lengths, counts: Lengths) -> None:
        """Counts its result: `counts` of the `widths` tokens stand."""
        self.kv_len[slots] -= widths - counts
        self.planned_len[slots] -= widths - counts
        self.slack[slots] -= widths - 1


class BySlot:
    """The field of a request whose value lies in the array of that name, at its slot."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, req: Req, owner: type) -> int:
        return int(getattr(req.counters, self._name)[req.slot])

    def __set__(self, req: Req, value: int) -> None:
        assert req.slot or not value, "a request without a slot has computed nothing"
        getattr(req.counters, self._name)[req.slot] = value
