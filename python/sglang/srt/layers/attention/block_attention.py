"""Attention to selected blocks of tokens with this project's Triton kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.kernels.launch import fallbacks_of
from sglang.srt.kernels.tile_configs import config_for
from sglang.srt.layers.attention.selection import Selection
from sglang.srt.layers.attention.triton_ops import block_attention

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan


class TritonBlockAttention:
    """Implements `native_sparse_ops.attend_blocks` with the tile that the plan has for the number of tokens, or with
    that tile's fallbacks if a launch fails."""

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
