# SPDX-License-Identifier: Apache-2.0
"""Attention tiles for SM12x, compiled for sm_120 with 16-bit and float8 KV: each fits into 101,376 bytes.

With Triton 3.9 none spills but for causal masks with 64-wide heads (at most 96 bytes) and vision heads below 64 (8).
"""

from sglang.srt.sm120.hardware import use_sm120_tiles

USE_SM120_TILES = use_sm120_tiles()
"""Decided once: launchers are traced by torch.compile."""

_CAUSAL = (
    # head dim and value head dim up to, (BLOCK_M, BLOCK_N, num_warps)
    (64, (64, 64, 4)),
    (128, (64, 64, 8)),
    (288, (32, 64, 8)),
    (576, (16, 64, 8)),
)
_MASKED = (
    # the addresses of a mask take registers; half the rows leave them, and drafts are short
    (64, (64, 64, 4)),
    (192, (32, 64, 8)),
    (576, (16, 64, 8)),
)


def extend_tile(head_dim: int, v_head_dim: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps) for attention of new tokens over cached and new ones, one stage."""
    return _first(_CAUSAL, head_dim, v_head_dim)


def masked_extend_tile(head_dim: int, v_head_dim: int) -> tuple[int, int, int]:
    """The same with a mask for every pair of tokens, as for a tree of drafts."""
    return _first(_MASKED, head_dim, v_head_dim)


def _first(tiles, head_dim: int, v_head_dim: int) -> tuple[int, int, int]:
    widest = max(head_dim, v_head_dim)
    return next((tile for limit, tile in tiles if widest <= limit), (16, 16, 8))


def prefill_block(head_dim: int) -> int:
    """BLOCK_M = BLOCK_N for attention without a cache (vision towers, encoders); 4 warps up to head dim 64, else 8.

    Rows that are no multiple of 16 wide, such as 72, are read in small pieces, each with an address in registers.
    """
    return 64 if head_dim <= 256 and head_dim % 16 == 0 else 32
