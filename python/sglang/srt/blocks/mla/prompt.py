"""Prompt attention over expanded latent keys and values with this project's Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.blocks.mla.kernels.latent_prompt import latent_prompt_attention
from sglang.srt.plan.layer_spec import AttentionShape

if TYPE_CHECKING:
    import torch

    from sglang.srt.kernels.launch import FallbackTiles
    from sglang.srt.kernels.spec import Tile
    from sglang.srt.layers.attention.latent_chunks import LatentChunk
    from sglang.srt.plan.latent_record import LatentRecord
    from sglang.srt.plan.plan import Plan


class TritonLatentPrompt:
    """Runs `latent_prompt_attention` with the tile planned for the head dims, or its fallbacks if a launch fails.
    Implements `reference.expanded_latent_attention`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ladders: dict[str, FallbackTiles[Tile]] = {}

    def __call__(
        self,
        q: torch.Tensor,
        entries: torch.Tensor,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        out: torch.Tensor,
        start_loc: torch.Tensor,
        cache: torch.Tensor,
        chunks: Sequence[LatentChunk],
        *,
        scale: float,
        cache_scale: float = 1.0,
        record: LatentRecord | None = None,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        _, heads, dim = q.shape
        key = self._plan.attention_op("latent_prompt_attention", AttentionShape(heads, heads, dim, out.shape[2]))
        if key not in self._ladders:
            self._ladders[key] = self._plan.fallbacks(key)
        self._ladders[key].run(
            lambda tile: latent_prompt_attention(
                q,
                entries,
                w_uk,
                w_uv,
                out,
                start_loc,
                cache,
                chunks,
                scale=scale,
                cache_scale=cache_scale,
                record=record,
                window=window,
                sinks=sinks,
                tile=tile,
            )
        )
