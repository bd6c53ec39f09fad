"""The attention call site of model layers; the backend's metadata comes with the batch."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.layers.attention.attention_layer import AttentionLayer
from sglang.srt.layers.forward_batch import ForwardBatch


class Attention(AttentionLayer):
    """The attention layer that models call."""

    __slots__ = ()

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: ForwardBatch,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the attention output [T, Hq * Dv]. q [T, Hq, D]; k [T, Hkv, D], v [T, Hkv, Dv], which are already in
        the cache; bias [T, Hq, bias_extent]: score biases by distance, for layers that have them."""

        def biases(count: int) -> dict[str, Any]:
            return {} if bias is None else {"bias": bias[:count]}

        out = torch.empty((q.shape[0], self.num_heads, self.v_head_dim), dtype=q.dtype, device=q.device)
        metadata = batch.metadata[self.site]
        if metadata.decode is not None:  # first: its padding rows may lie over those of the prompts
            count = batch.num_decodes
            metadata.decode.attend(q[:count], self, out[:count], **biases(count))
        if metadata.extend is not None:
            metadata.extend.attend(q, k, v, self, out, **biases(len(q)))
        if metadata.sparse is not None:
            tokens = metadata.sparse.tokens
            metadata.sparse.attend(q[tokens], self, out[tokens])
        return out.flatten(1)
