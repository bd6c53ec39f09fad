"""Attention to selected blocks of tokens in plain torch: the CPU kernel, and the reference for tests. Math is done in
fp32, or in fp64 for fp64 queries."""

from __future__ import annotations

import torch

from sglang.srt.blocks.pooled_sparse.block_selection import BlockSelection
from sglang.srt.kernels.op import Op
from sglang.srt.layers.native_ops import load_cache

_MOST_ELEMENTS = 1 << 24
"""Most key elements gathered at once, unless a single token has more."""


def attend_blocks(
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
    """Fills out [T, Hq, Dv] with the attention of q [T, Hq, D] over the tokens of the selected blocks and of the
    unfinished one; caches [S, Hkv, D] and [S, Hkv, Dv] hold real values divided by k_scale and v_scale. A token that
    sees nothing gets zeros."""
    math_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    num_kv = k_cache.shape[1]
    width = selection.blocks.shape[1] * selection.block + selection.block - 1
    step = max(1, _MOST_ELEMENTS // max(1, width * num_kv * q.shape[2]))
    for first in range(0, len(q), step):
        piece = slice(first, first + step)
        slots = selection.token_slots(piece)
        kept = slots >= 0
        at = slots.clamp(min=0)
        keys, values = (  # [t, Hkv, K, D]
            load_cache(cache, at, factor).to(math_dtype).transpose(1, 2)
            for cache, factor in ((k_cache, k_scale), (v_cache, v_scale))
        )
        queries = q[piece].to(math_dtype).unflatten(1, (num_kv, -1))
        scores = (queries @ keys.transpose(2, 3)) * scale  # [t, Hkv, group, K]
        scores = scores.masked_fill(~kept[:, None, None], float("-inf"))
        weights = (scores - scores.logsumexp(-1, keepdim=True)).exp().nan_to_num(0.0)
        out[piece] = (weights @ values).flatten(1, 2).to(out.dtype)


SELECTED_BLOCK_ATTENTION = Op("selected_block_attention", attend_blocks)
