"""Dense attention of ragged sequences without a cache: causal, or bidirectional for vision and embedding models.

It is the extend kernel with the prefix compiled out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd


def context_attention_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    start_loc: torch.Tensor,
    *,
    longest: int = 0,
    is_causal: bool = True,
    scale: float | None = None,
    sliding_window: int = 0,
    share: tuple[int, int] = (0, 1),
    tile: Mapping[str, int],
) -> None:
    """Fills o [T, Hq, Dv] for q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] (bf16/fp16) of B sequences with rows
    start_loc[i] .. start_loc[i + 1] (int32, [B + 1], on the device). `scale` defaults to D ** -0.5. A sliding window
    limits how far back a query sees; without `is_causal` it raises ValueError. `longest` (rows of the longest sequence)
    is for kernels that plan on the host and is not read here. share (i, n): fills only the i-th of n ranges of rows;
    together they give bitwise the result of one call."""
    if sliding_window > 0 and not is_causal:
        raise ValueError("a sliding window without causality is not defined here")
    extend_attention_fwd(
        q, k, v, o, k, v, start_loc, start_loc, start_loc, start_loc, scale=scale or q.shape[2] ** -0.5, tile=tile,
        causal=is_causal, sliding_window=sliding_window, has_prefix=False, share=share,
    )  # fmt: skip
