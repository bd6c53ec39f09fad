"""Attention to selected blocks of tokens with this project's Triton kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.pooled_sparse.block_selection import BlockSelection
from sglang.srt.blocks.pooled_sparse.kernels import selected_blocks
from sglang.srt.kernels.launch import fallbacks_of
from sglang.srt.kernels.tile_configs import config_for

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan

OP = "selected_block_attention"


class TritonSelectedBlocks:
    """Implements `reference.attend_blocks` with the planned tile, or its fallbacks if a launch fails."""

    def __init__(self, plan: Plan) -> None:
        self._tile_configs = plan.tiles(OP)
        self._num_sms = plan.arch.num_sms

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        selection: BlockSelection,
        out: torch.Tensor,
        *,
        scale: float,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        fallbacks_of(OP, config_for(self._tile_configs, len(q)), selected_blocks.__name__).run(
            lambda tiles: selected_blocks.selected_block_attention_fwd(
                q,
                k_cache,
                v_cache,
                selection,
                out,
                scale=scale,
                k_scale=k_scale,
                v_scale=v_scale,
                tile=tiles[0],
                num_sms=self._num_sms,
            )
        )
