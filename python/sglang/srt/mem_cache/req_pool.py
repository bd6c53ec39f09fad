"""Request slots and the table that says where each position of a request lives in the KV cache."""

from __future__ import annotations

import numpy as np
import torch


class ReqToTokenPool:
    """Slots 1..max_reqs; row 0 belongs to padding and stays zero, which is the padding cache slot.

    `host` [max_reqs + 1, context_len] int32 is what the scheduler reads and writes; `device_table` is its copy on the
    device, brought up to date by the step that needs it.
    """

    def __init__(self, max_reqs: int, context_len: int, device: str | torch.device) -> None:
        self.max_reqs = max_reqs
        self.context_len = context_len
        self.host = np.zeros((max_reqs + 1, context_len), np.int32)
        self.device_table = torch.zeros((max_reqs + 1, context_len), dtype=torch.int32, device=device)
        self._free: list[int] = []
        self.clear()

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self) -> int | None:
        """A request slot, or None when all are taken."""
        return self._free.pop() if self._free else None

    def free(self, slot: int) -> None:
        if not 1 <= slot <= self.max_reqs or slot in self._free:
            raise AssertionError(f"request slot {slot} freed twice or never handed out")
        self._free.append(slot)

    def clear(self) -> None:
        self._free = list(range(self.max_reqs, 0, -1))
