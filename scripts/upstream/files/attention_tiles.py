# SPDX-License-Identifier: Apache-2.0
"""Attention tiles for SM12x, compiled for sm_120 with 16-bit and float8 KV: each fits into 101,376 bytes.

With Triton 3.9 none spills but for causal masks with 64-wide heads (at most 96 bytes) and vision heads below 64 (8).
A tile that SGLang chose and that spills nothing stays.
"""

import triton

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

_CLEAN = (
    # head dims from, to, bytes of a cached element, a tile of SGLang's without spills, Triton from
    (64, 64, (1,), (64, 128, 4), (3, 6)),
    (80, 128, (1,), (64, 128, 8), (3, 9)),  # 32 bytes with 3.6
    (80, 128, (1,), (128, 64, 8), (3, 6)),
    (256, 256, (2,), (64, 64, 8), (3, 9)),  # 8 to 40 bytes with 3.6
    (288, 288, (1, 2), (32, 32, 8), (3, 6)),
    (512, 512, (2,), (32, 32, 8), (3, 6)),
)
_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])


def extend_tile(
    theirs: tuple[int, int, int], head_dim: int, v_head_dim: int, kv_bytes: int, plain: bool, version=_TRITON
) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps) for attention of new tokens over cached and new ones, one stage.

    theirs     what SGLang chose; it stays where it was measured without spills
    kv_bytes   of one element of the KV cache
    plain      a causal mask and nothing else: see `is_plain`
    version    of Triton
    """
    widest = max(head_dim, v_head_dim)
    for least, most, sizes, tile, since in _CLEAN:
        if plain and tile == theirs and least <= widest <= most and kv_bytes in sizes and version >= since:
            return theirs
    return _first(_CAUSAL, head_dim, v_head_dim)


def is_plain(*features) -> bool:
    """Whether windows, caps, masks and the like are off: each None, or a number that is not above zero."""
    return all(feature is None or (isinstance(feature, (int, float)) and feature <= 0) for feature in features)


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
