"""Data-parallel attention: gathers the rows of all attention groups for layers that all ranks compute together.

Each group has rows of its own: its requests' tokens, or the last one of each. Dense layers, experts and the vocabulary
take the rows of all groups:

    own rows [T, H] -> padded to `each`, gathered [A * each, H] -> without padding [N, H] -> block
    summands [N, H] of all ranks -> [A * each, H] -> reduce-scatter, sum over the group -> own rows [T, H]

Every rank runs the scheduler of every group, so all know `each` before the step without communication. In CUDA graphs
it is the graph's number of tokens, and padding stays behind the valid rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from sglang.srt.distributed.groups import Groups
from sglang.srt.utils.device_arrays import to_device


def valid_rows(counts: Sequence[int], each: int) -> np.ndarray:
    """Returns [sum of counts] int64: the places of the groups' valid rows among the gathered rows."""
    return np.concatenate([np.arange(count, dtype=np.int64) + i * each for i, count in enumerate(counts)])


def padded_order(counts: Sequence[int], each: int) -> np.ndarray:
    """Returns [groups * each] int64: the places of the valid rows, then those of padding."""
    valid = valid_rows(counts, each)
    return np.concatenate((valid, np.setdiff1d(np.arange(len(counts) * each, dtype=np.int64), valid)))


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Gathers and scatters the rows of a step. `each`: rows per group, padding included. `order` [N] int64: the
    gathered rows that are computed, in this order; None: all. `num_valid` [1] int32: number of valid rows, which come
    first; None: all are valid. `exact`: rows and sums are never quantized. Collective."""

    groups: Groups
    each: int
    order: torch.Tensor | None = None
    num_valid: torch.Tensor | None = None
    exact: bool = False

    @classmethod
    def of_step(cls, groups: Groups, counts: Sequence[int], device: torch.device | str) -> RowExchange:
        """Returns the exchange of a step launched kernel by kernel: padding is sent but not computed. counts: rows of
        each group."""
        each = max(counts)
        return cls(groups, each, None if min(counts) == each else to_device(valid_rows(counts, each), device))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers own rows [T, ...] into [N, ...] of all groups."""
        missing = self.each - len(x)
        assert missing >= 0, f"{len(x)} rows of a group that has {self.each}"
        padded = F.pad(x, (*(0, 0) * (x.dim() - 1), 0, missing)) if missing else x
        rows = self.groups.dp.all_gather_rows(padded, self.exact)
        return rows if self.order is None else rows[self.order]

    def scatter(self, partial_sum: torch.Tensor, count: int) -> torch.Tensor:
        """Sums partial sums [N, H] over all ranks and returns the first `count` own rows."""
        rows = self._spread(partial_sum)
        for_each = rows.view(self.groups.dp.size, self.each, *rows.shape[1:])
        summed = self.groups.dp.reduce_scatter(for_each, self.exact)
        return self.groups.attention.all_reduce(summed, self.exact)[:count]

    def local_rows(self, total: torch.Tensor, count: int) -> torch.Tensor:
        """Returns the first `count` own rows of [N, H], which is equal on every rank."""
        first = self.groups.dp.rank * self.each
        return self._spread(total)[first : first + count]

    def _spread(self, x: torch.Tensor) -> torch.Tensor:
        if self.order is None:
            return x
        size = self.groups.dp.size * self.each
        rows = x.new_zeros((size, *x.shape[1:])) if len(x) < size else torch.empty_like(x)
        return rows.index_copy_(0, self.order, x)
