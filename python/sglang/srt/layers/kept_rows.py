"""Keeps the rows of a step's tokens in the states of their requests: at once, or after a verify step those of the
accepted tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.compressed_step import TokenRequests

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch

Keep = Callable[..., None]
"""Called with tensors of rows and the TokenRequests of their tokens: puts rows before `stops` into the states."""


@dataclass(frozen=True, slots=True)
class RowRecord:
    """Implements StateRecord: k tokens of each of B requests that the states do not include yet."""

    keep: Keep
    rows: tuple[torch.Tensor, ...]  # each [B k, ...]
    requests: TokenRequests
    width: int
    """k."""

    def commit(self, counts: torch.Tensor) -> None:
        requests = self.requests.accepted(counts, self.width)
        self.keep(*(rows[: len(requests.slots)] for rows in self.rows), requests)

    def copy(self) -> RowRecord:
        return replace(self, rows=tuple(rows.clone() for rows in self.rows), requests=self.requests.copy())


def record_rows(batch: ForwardBatch, keep: Keep, requests: TokenRequests, *rows: torch.Tensor) -> None:
    """Records rows of a verify step, which `keep` takes when it is known which tokens stand."""
    assert batch.state_records is not None and batch.extend is not None
    batch.state_records.append(RowRecord(keep, rows, requests, len(rows[0]) // len(batch.extend)))


def keep_rows(batch: ForwardBatch, keep: Keep, requests: TokenRequests, *rows: torch.Tensor) -> None:
    """Keeps the rows of all tokens, or in a verify step records them."""
    if batch.state_records is None:
        keep(*rows, requests)
    else:
        record_rows(batch, keep, requests, *rows)
