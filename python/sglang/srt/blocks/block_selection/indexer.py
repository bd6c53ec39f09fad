"""Selection of blocks of tokens for each token and head with this project's Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.block_selection.kernels.block_scores import block_scores
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.attention.sparse import logit_columns, rows_at_once
from sglang.srt.layers.attention.triton_ops.select_entries import select_entries

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan


class TritonBlockIndexer:
    """Implements `reference.block_indexer`. It computes the scores of as many tokens as their memory allows,
    selects blocks for these tokens, and repeats. The host reads nothing from the device, so a CUDA graph may capture
    it. If no token can see more than `top_blocks` blocks, it selects all of them without scores."""

    def __init__(self, plan: Plan) -> None:
        self._tiles = plan.fallbacks("block_indexer")
        self._num_sms = plan.arch.num_sms

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        rows: EntryRows,
        blocks: EntryRows,
        top_blocks: int,
        local_blocks: int,
    ) -> Selection:
        """Returns the block numbers that are selected for each token and head, [T * H] rows. q [T, H, D]; keys
        [S, 1, D]; rows: the tokens that each of the T tokens sees; blocks: `rows.blocks(...)` for the H heads."""
        num_tokens, num_heads, _ = q.shape
        slots = torch.empty((len(blocks), top_blocks), dtype=torch.int32, device=q.device)
        counts = torch.empty(len(blocks), dtype=torch.int32, device=q.device)
        needs_scores = blocks.max_count > top_blocks
        columns = logit_columns(blocks.max_count if needs_scores else 1)
        at_once = rows_at_once(num_tokens, num_heads * columns) if needs_scores else num_tokens
        scores = torch.empty((at_once if needs_scores else 1, num_heads, columns), dtype=torch.float32, device=q.device)
        for first in range(0, num_tokens, at_once):
            tokens = slice(first, min(first + at_once, num_tokens))
            head_rows = slice(tokens.start * num_heads, tokens.stop * num_heads)
            if needs_scores:
                self._score(q[tokens], keys, rows.part(tokens), (blocks.rate, top_blocks, local_blocks), scores)
            select_entries(
                scores.flatten(0, 1), blocks.part(head_rows), top_blocks, slots[head_rows], counts[head_rows]
            )
        return Selection(slots, counts)

    def _score(
        self, q: torch.Tensor, keys: torch.Tensor, rows: EntryRows, sizes: tuple[int, int, int], scores: torch.Tensor
    ) -> None:
        """Fills scores [at least T, H, blocks]. sizes: tokens of a block, `top_blocks`, `local_blocks`."""
        self._tiles.run(lambda tile: block_scores(q, keys, rows, *sizes, scores, tile=tile, num_sms=self._num_sms))
