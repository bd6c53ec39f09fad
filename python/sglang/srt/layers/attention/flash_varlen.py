"""Attention over image patches and whole texts with torch's flash kernels, which are built for every GPU that torch
supports.

Encoders run outside of graphs and have no cache, so a library kernel suffices. Heads of 72 elements are no multiple of
32 bytes, which splits Triton's loads into small ones; the library pads them while loading.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from sglang.srt.kernels.spec import Need

PROBE_LENGTHS = (130, 1, 65)
PROBE_LIMIT = 1e-2


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    start_loc: torch.Tensor,
    *,
    longest: int,
    is_causal: bool,
    scale: float | None = None,
    sliding_window: int = 0,
    share: tuple[int, int] = (0, 1),
    tile: Mapping[str, int] | None = None,
) -> None:
    """Fills o [T, H, D] for q, k, v [T, H, D] (bf16/fp16; elements of a head contiguous, D a multiple of 8). Sequence i
    has rows start_loc[i] to start_loc[i + 1] (int32, on the device); the longest has `longest` rows. sliding_window:
    as in `native_ops.context_attention`. share (i, n), without causality and windows: fills only the i-th of n equal
    ranges of rows."""
    assert not (is_causal or sliding_window) or share == (0, 1)
    first, last = (len(q) * (share[0] + i) // share[1] for i in (0, 1))
    if first == last:
        return
    of_queries = start_loc if share == (0, 1) else (start_loc - first).clamp_(0, last - first)
    behind = sliding_window - 1 if sliding_window else None
    result = torch.ops.aten._flash_attention_forward(
        q[first:last], k, v, of_queries, start_loc, min(longest, last - first), longest, 0.0, is_causal, False,
        scale=scale, window_size_left=behind, window_size_right=0 if is_causal and sliding_window else behind,
    )  # fmt: skip
    o[first:last] = result[0]


def problem_of(need: Need) -> str:
    """Returns why torch's kernel cannot serve the need on this process's GPU; "" if it can."""
    return _problem(need.head_dim, getattr(torch, need.q_dtype))


@functools.cache
def _problem(head_dim: int, dtype: torch.dtype) -> str:
    try:
        error = probe_error(head_dim, dtype)
    except Exception as failure:  # whatever a library raises, the server starts without it
        return f"torch's flash attention fails here: {(str(failure).strip().splitlines() or ['?'])[0][:200]}"
    return "" if error < PROBE_LIMIT else f"torch's flash attention is wrong here: {error:.1e} of the result's norm"


def probe_error(head_dim: int, dtype: torch.dtype) -> float:
    """Returns the relative error on sequences of several lengths, computed in two ranges of rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(PROBE_LENGTHS), 3, 2, head_dim, generator=generator).to("cuda", dtype)
    q, k, v = x.unbind(1)
    starts = torch.tensor((0, *PROBE_LENGTHS), device="cuda").cumsum(0).int()
    got = torch.empty_like(v)
    for i in range(2):
        flash_attention(q, k, v, got, starts, longest=max(PROBE_LENGTHS), is_causal=False, share=(i, 2))
    parts = zip(*(heads.float().split(PROBE_LENGTHS) for heads in (q, k, v)), strict=True)
    want = torch.cat(
        [F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part)).transpose(0, 1) for part in parts]
    )
    return float((got.float() - want).norm() / want.norm())
