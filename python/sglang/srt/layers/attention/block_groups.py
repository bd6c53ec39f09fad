"""Block-sparse attention with this project's Triton kernels: block selection, and attention to the selected blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.kernels.launch import fallbacks_of
from sglang.srt.kernels.tile_configs import config_for
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.attention.sparse import logit_columns, rows_at_once
from sglang.srt.layers.attention.triton_ops import block_attention
from sglang.srt.layers.attention.triton_ops.block_scores import block_scores
from sglang.srt.layers.attention.triton_ops.select_entries import select_entries

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan


class TritonBlockIndexer:
    """Implements BlockIndexerOp. It scores as many tokens as the memory for scores allows, selects their blocks, and
    repeats. It never reads from the device, so it may be captured. If no context can have more blocks than are
    selected, no scores are computed."""

    def __init__(self, plan: Plan) -> None:
        self._ladder = plan.fallbacks("block_indexer")
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
        num_tokens, num_heads, _ = q.shape
        slots = torch.empty((len(blocks), top_blocks), dtype=torch.int32, device=q.device)
        chosen = torch.empty(len(blocks), dtype=torch.int32, device=q.device)
        scored = blocks.max_count > top_blocks
        columns = logit_columns(blocks.max_count if scored else 1)
        at_once = rows_at_once(num_tokens, num_heads * columns) if scored else num_tokens
        scores = torch.empty((at_once if scored else 1, num_heads, columns), dtype=torch.float32, device=q.device)
        for first in range(0, num_tokens, at_once):
            part = slice(first, min(first + at_once, num_tokens))
            lines = slice(part.start * num_heads, part.stop * num_heads)
            if scored:
                self._score(q[part], keys, rows.part(part), (blocks.rate, top_blocks, local_blocks), scores)
            select_entries(scores.flatten(0, 1), blocks.part(lines), top_blocks, slots[lines], chosen[lines])
        return Selection(slots, chosen)

    def _score(
        self, q: torch.Tensor, keys: torch.Tensor, rows: EntryRows, sizes: tuple[int, int, int], scores: torch.Tensor
    ) -> None:
        self._ladder.run(lambda tile: block_scores(q, keys, rows, *sizes, scores, tile=tile, num_sms=self._num_sms))


class TritonBlockAttention:
    """Implements BlockAttentionOp with the tile planned for the number of tokens, or its fallbacks if a launch
    fails."""

    def __init__(self, plan: Plan) -> None:
        self._tile_configs = plan.tiles("block_attention")
        self._num_sms = plan.arch.num_sms

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        selection: Selection,
        lens: torch.Tensor,
        block: int,
        out: torch.Tensor,
        *,
        scale: float,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        fallbacks_of("block_attention", config_for(self._tile_configs, len(q)), block_attention.__name__).run(
            lambda tiles: block_attention.block_attention_fwd(
                q,
                k_cache,
                v_cache,
                selection,
                lens,
                block,
                out,
                scale=scale,
                tile=tiles[0],
                num_sms=self._num_sms,
                k_scale=k_scale,
                v_scale=v_scale,
            )
        )
