"""The attention call site of a model layer; the backend that computes it comes with the batch."""

from __future__ import annotations

import torch

from sglang.srt.layers.attention.attention_layer import AttentionLayer
from sglang.srt.layers.forward_batch import ForwardBatch


class Attention(AttentionLayer):
    """An attention layer that models call."""

    __slots__ = ()

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
