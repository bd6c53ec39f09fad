"""An indexer's selection shared by the passes of a draft model: the first pass makes it for the rows of a step; later
passes, with one row per request, reuse it and also see the tokens since.

Models trained this way set `index_share_for_mtp_iteration` in config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.attention.selection import EntryRows, Selection

if TYPE_CHECKING:
    from sglang.srt.layers.attention.sparse_rows import SparseRows
    from sglang.srt.layers.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class KeptSelection:
    """A layer's selection for R requests, kept for later passes."""

    chosen: Selection  # of the R requests
    since: torch.Tensor  # [R] int32, positions from here on are always seen
    width: int  # maximum number of these positions


class SharedSelection:
    """The selections that layers with an indexer keep for later passes of a draft, by layer.

    rows [R] int64: the row of the first pass from which each request's next draft token comes; slots [R] int64: its
    request slot; room: maximum number of later passes.
    """

    def __init__(self, rows: torch.Tensor, slots: torch.Tensor, room: int) -> None:
        self.rows, self.slots, self.room = rows, slots, room
        self.by_layer: dict[int, KeptSelection] = {}

    def __contains__(self, layer_id: int) -> bool:
        """Returns whether the layer has made its selection, so that this pass reuses it."""
        return layer_id in self.by_layer

    def keep(self, layer_id: int, chosen: Selection, since: torch.Tensor, beside: int = 0) -> None:
        """Keeps the first pass's selection. since [T]: first position that a token sees besides; `beside`: number of
        such positions up to the token itself."""
        rows = self.rows
        of_requests = Selection(chosen.slots[rows], chosen.counts[rows])
        self.by_layer[layer_id] = KeptSelection(of_requests, since[rows].to(torch.int32), beside + self.room)

    def keep_tokens(self, layer_id: int, batch: ForwardBatch, sparse: SparseRows | None, top_k: int) -> None:
        """Keeps the token-wise selection of at most `top_k` tokens of a step's rows; a request with dense attention
        keeps all of its tokens."""
        after = batch.positions[self.rows].to(torch.int32) + 1
        selection = None if sparse is None else sparse.selection
        if sparse is None or selection is None:
            chosen = self._all(batch, after, top_k)
        else:
            row = self.rows - sparse.first
            inside = (row >= 0) & (row < len(sparse.entries))
            row = row.clamp(0, len(sparse.entries) - 1)
            chosen = Selection(_padded(selection.slots[row], top_k), selection.counts[row])
            if len(sparse.entries) < len(batch.positions):
                everything = self._all(batch, after, top_k)
                chosen = Selection(
                    torch.where(inside[:, None], chosen.slots, everything.slots),
                    torch.where(inside, chosen.counts, everything.counts),
                )
        self.by_layer[layer_id] = KeptSelection(chosen, after, self.room)

    def _all(self, batch: ForwardBatch, counts: torch.Tensor, top_k: int) -> Selection:
        table = batch.token_slots[0].req_to_token
        return EntryRows(table, self.slots, counts, table.shape[1]).since(torch.zeros_like(counts), top_k)

    def again(self, layer_id: int, entries: EntryRows) -> tuple[Selection, Selection]:
        """Returns the kept selection, and the tokens since. entries: the tokens that each row of a later pass sees."""
        kept = self.by_layer[layer_id]
        since = entries.since(kept.since, kept.width)
        return kept.chosen, Selection(since.slots, since.counts.clamp(min=0, max=kept.width))

    def joined(self, layer_id: int, entries: EntryRows) -> Selection:
        """Returns both as one selection."""
        chosen, since = self.again(layer_id, entries)
        slots = torch.cat((since.slots, chosen.slots), dim=1)
        return Selection(slots, chosen.counts + since.slots.shape[1])


def _padded(slots: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - slots.shape[1]
    return torch.nn.functional.pad(slots, (0, missing), value=-1) if missing > 0 else slots
