# SPDX-License-Identifier: Apache-2.0
"""Attention tiles for SM12x, compiled for sm_120 with 16-bit and float8 KV: each fits into 101,376 bytes.

Causal masks spill nothing but with 64-wide heads (at most 96 bytes) and 72-wide vision towers, tree masks 108 bytes.
"""

from sglang.srt.sm120.hardware import use_sm120_tiles

USE_SM120_TILES = use_sm120_tiles()
"""Decided once: launchers are traced by torch.compile."""

_EXTEND = (
    # head dim and value head dim up to, (BLOCK_M, BLOCK_N, num_warps)
    (64, (64, 64, 4)),
    (128, (64, 64, 8)),
    (288, (32, 64, 8)),
    (576, (16, 64, 8)),
)


def extend_tile(head_dim: int, v_head_dim: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps) for attention of new tokens over cached and new ones, one stage."""
    widest = max(head_dim, v_head_dim)
    return next((tile for limit, tile in _EXTEND if widest <= limit), (16, 16, 8))


def prefill_block(head_dim: int) -> int:
    """BLOCK_M = BLOCK_N for attention without a cache (vision towers, encoders); 4 warps up to head dim 64, else 8."""
    return 64 if head_dim <= 256 else 32
