"""Sparse attention with this project's Triton kernels: entry selection, and attention to the selected entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.kernels.launch import fallbacks_of
from sglang.srt.kernels.tile_configs import config_for
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.attention.triton_ops import sparse_records
from sglang.srt.layers.attention.triton_ops.index_logits import index_logits
from sglang.srt.layers.attention.triton_ops.select_entries import select_entries
from sglang.srt.plan.latent_record import LatentRecord

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan

LOGIT_BYTES = 256 << 20
"""Limit in bytes of the indexer logits in memory at once, unless a single row has more. Larger steps are scored in
parts."""
LOGIT_MULTIPLE = 16
"""The number of columns is padded to a multiple of this, so that rows begin at multiples of 64 bytes."""


class TritonSparseIndexer:
    """Implements `native_sparse_ops.sparse_indexer`. It computes the logits of as many tokens as memory allows, selects
    their entries, and repeats. It never reads from the device, so it may be captured. If no context can be longer than
    `top_k`, no logits are computed."""

    def __init__(self, plan: Plan) -> None:
        self._ladder = plan.fallbacks("sparse_indexer")
        self._num_sms = plan.arch.num_sms

    def __call__(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
        scales: torch.Tensor | None,
        rows: EntryRows,
        top_k: int,
    ) -> Selection:
        num_rows, scored = len(rows), rows.max_count > top_k
        slots = torch.empty((num_rows, top_k), dtype=torch.int32, device=q.device)
        chosen = torch.empty(num_rows, dtype=torch.int32, device=q.device)
        columns = logit_columns(rows.max_count) if scored else LOGIT_MULTIPLE
        at_once = rows_at_once(num_rows, columns) if scored else num_rows
        logits = torch.empty((at_once if scored else 1, columns), dtype=torch.float32, device=q.device)
        for first in range(0, num_rows, at_once):
            part = slice(first, min(first + at_once, num_rows))
            some = rows.part(part)
            if scored:
                self._score(q[part], weights[part], keys, scales, some, top_k, logits)
            select_entries(logits, some, top_k, slots[part], chosen[part])
        return Selection(slots, chosen)

    def _score(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
        scales: torch.Tensor | None,
        rows: EntryRows,
        top_k: int,
        logits: torch.Tensor,
    ) -> None:
        self._ladder.run(
            lambda tile: index_logits(q, weights, keys, scales, rows, top_k, logits, tile=tile, num_sms=self._num_sms)
        )


def logit_columns(max_count: int) -> int:
    """Returns the number of columns of a row of logits, padding included."""
    return -(-max_count // LOGIT_MULTIPLE) * LOGIT_MULTIPLE


def rows_at_once(num_rows: int, columns: int) -> int:
    """Returns the number of tokens whose logits are in memory at once: up to LOGIT_BYTES of them, at least one row."""
    return max(1, min(num_rows, LOGIT_BYTES // (4 * columns)))


class TritonSparseAttention:
    """Implements `native_sparse_ops.attend_selected` with the tile planned for the number of tokens, or its fallbacks
    if a launch fails."""

    def __init__(self, plan: Plan) -> None:
        self._tile_configs = plan.tiles("sparse_attention")
        self._num_sms = plan.arch.num_sms

    def __call__(
        self,
        q: torch.Tensor,
        sources: Sequence[tuple[torch.Tensor, Selection]],
        out: torch.Tensor,
        *,
        scale: float,
        sinks: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        record: LatentRecord | None = None,
        record_scale: float = 1.0,
    ) -> None:
        fallbacks_of("sparse_attention", config_for(self._tile_configs, len(q)), sparse_records.__name__).run(
            lambda tiles: sparse_records.attention_fwd(
                q,
                sources,
                out,
                scale=scale,
                tile=tiles[0],
                num_sms=self._num_sms,
                sinks=sinks,
                lse=lse,
                record=record,
                record_scale=record_scale,
            )
        )
