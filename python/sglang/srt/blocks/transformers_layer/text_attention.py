"""Attention of a class's layer within the texts of a step, which it computes whole: over no cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.ops import PREFILL_ATTENTION
from sglang.srt.plan.layer_spec import AttentionShape

if TYPE_CHECKING:
    from sglang.srt.blocks.transformers_layer.layer import CurrentStep
    from sglang.srt.blocks.transformers_layer.spec import TransformersLayer
    from sglang.srt.layers.parameter import Scope


class TextAttention:
    """The attention of a class's layer."""

    def __init__(self, scope: Scope, spec: TransformersLayer, step: CurrentStep) -> None:
        assert spec.attention is not None
        self.fact, self.step, self.dtype = spec.attention, step, scope.dtype
        plan, shape = scope.plan, AttentionShape(0, 0, spec.head_dim, spec.v_head_dim)
        key = plan.attention_op(PREFILL_ATTENTION.name, shape)
        self.kernel = plan.entry(PREFILL_ATTENTION, key)
        self.fallbacks = plan.fallbacks(key) if plan.tiles(key) else None

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Returns [1, T, Hq, Dv] for query [1, Hq, T, D], key [1, Hkv, T, D] and value [1, Hkv, T, Dv]."""
        batch = self.step.batch
        assert batch is not None and batch.extend is not None, "a step of whole texts is being computed"
        # Kernels want the elements of a head one after the other.
        q, k, v = (heads[0].transpose(0, 1).to(self.dtype).contiguous() for heads in (query, key, value))
        out = torch.empty((*q.shape[:2], v.shape[-1]), dtype=q.dtype, device=q.device)
        rows = batch.extend

        def attend(tile: Mapping[str, int]) -> None:
            self.kernel(
                q,
                k,
                v,
                out,
                rows.start_loc,
                longest=max(rows.new_lens_cpu),
                is_causal=self.fact.causal,
                scale=self.fact.scale,
                sliding_window=self.fact.window,
                tile=tile,
            )

        if self.fallbacks is None:
            attend({})
        else:
            self.fallbacks.run(attend)
        return out[None]
