"""Dense attention of ragged sequences without a cache: causal, or bidirectional for vision and embedding models.

It is the extend kernel with the prefix compiled out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sglang.srt.hardware.arch import current_arch
from sglang.srt.kernels.tiles import attention_tiles
from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd


def context_attention_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    start_loc: torch.Tensor,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    sliding_window: int = 0,
    tile: Mapping[str, int] | None = None,
) -> None:
    """Fill o [T, Hq, Dv] for q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] (bf16/fp16) of B sequences with rows
    start_loc[i] .. start_loc[i + 1] (int32, [B + 1], on the device). `scale` defaults to D ** -0.5, `tile` to the first
    one of the table for this GPU. A sliding window limits how far back a query sees and needs `is_causal`."""
    head_dim, v_head_dim = q.shape[2], v.shape[2]
    if sliding_window > 0 and not is_causal:
        raise ValueError("a sliding window without causality is not defined here")
    if tile is None:
        candidates = attention_tiles("prefill_attention", head_dim, v_head_dim, "bfloat16", current_arch().features)
        if not candidates:
            raise ValueError(f"prefill attention has no tile for head dims {head_dim}/{v_head_dim}")
        tile = candidates[0]
    extend_attention_fwd(
        q, k, v, o, k, v, start_loc, start_loc, start_loc, start_loc, scale=scale or head_dim**-0.5, tile=tile,
        causal=is_causal, sliding_window=sliding_window, has_prefix=False,
    )  # fmt: skip
