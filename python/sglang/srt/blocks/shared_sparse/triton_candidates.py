"""Selection of runs of entries with the indexer's kernels. Reference: `candidates`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.shared_sparse.candidates import best_of_runs, runs_of
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.attention.sparse import LOGIT_MULTIPLE, logit_columns, rows_at_once
from sglang.srt.layers.attention.triton_ops.index_logits import index_logits
from sglang.srt.layers.attention.triton_ops.select_entries import select_entries

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan


class TritonCandidateBlocks:
    """Implements `candidates.candidate_blocks` for blocks that divide LOGIT_MULTIPLE. It scores as many tokens as
    memory allows, reduces and selects their runs, and repeats. It never reads from the device."""

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
        block: int,
        top: int,
    ) -> Selection:
        num_rows, runs = len(rows), runs_of(rows, block)
        slots = torch.empty((num_rows, top), dtype=torch.int32, device=q.device)
        chosen = torch.empty(num_rows, dtype=torch.int32, device=q.device)
        columns = logit_columns(rows.max_count)
        at_once = rows_at_once(num_rows, columns)
        logits = torch.empty((at_once, columns), dtype=torch.float32, device=q.device)
        best = torch.empty((at_once, logit_columns(runs.max_count)), dtype=torch.float32, device=q.device)
        for first in range(0, num_rows, at_once):
            part = slice(first, min(first + at_once, num_rows))
            some, count = rows.part(part), part.stop - part.start
            self._score(q[part], weights[part], keys, scales, some, logits)
            best[:count, : columns // block] = best_of_runs(logits[:count], some.counts, block)
            select_entries(best, runs.part(part), top, slots[part], chosen[part])
        return Selection(slots, chosen)

    def _score(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
        scales: torch.Tensor | None,
        rows: EntryRows,
        logits: torch.Tensor,
    ) -> None:
        self._ladder.run(
            lambda tile: index_logits(q, weights, keys, scales, rows, 0, logits, tile=tile, num_sms=self._num_sms)
        )


assert LOGIT_MULTIPLE % 8 == 0, "the published block"
