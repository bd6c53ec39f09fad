"""The attention call site of a model layer: its shape and its cache; the backend comes with the batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sglang.srt.plan.layer_spec import AttentionShape

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import CacheStore
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(slots=True)
class Attention:
    """Attention of one layer over its paged cache. Head counts are those of this rank."""

    cache: CacheStore
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    v_head_dim: int = 0
    """0: the same as head_dim."""
    sliding_window: int = 0
    """Each query sees itself and the `sliding_window - 1` tokens before it; 0: all."""
    logit_cap: float = 0.0
    sinks: torch.Tensor | None = None
    """[num_heads] fp32: an extra logit a head that takes part in the softmax and has no value."""
    shape: AttentionShape = field(init=False)

    def __post_init__(self) -> None:
        self.v_head_dim = self.v_head_dim or self.head_dim
        self.shape = AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, self.v_head_dim)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], stored already -> [T, Hq * Dv]."""
        out = torch.empty((q.shape[0], self.num_heads, self.v_head_dim), dtype=q.dtype, device=q.device)
        backend, decodes = batch.attn_backend, batch.decodes
        if batch.forward_mode.is_decode():
            backend.forward_decode(q, self, batch, out)
        else:
            if decodes is not None:  # first: its padding rows may lie over those of the prompts
                backend.forward_decode(q[: decodes.batch_size], self, decodes, out[: decodes.batch_size])
            backend.forward_extend(q, k, v, self, batch, out)
        return out.flatten(1)
