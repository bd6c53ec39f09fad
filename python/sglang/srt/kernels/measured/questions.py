"""What is measured for which needs: the questions of a need, and the names of candidates. No torch, no Triton."""

from __future__ import annotations

from collections.abc import Iterator

from sglang.srt.kernels.measured.records import Question
from sglang.srt.kernels.spec import Need, Tile
from sglang.srt.kernels.tile_configs import Shape, TileConfig, Tiles

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens of a step for which products are timed; each stands for the steps down to the one before it."""
ATTENTION = ("decode_attention", "extend_attention")
"""Ops of attention whose tiles are timed."""
KERNELS = {"linear": ("triton_gemv", "cublas")}
"""By op: kernels of 16-bit weights that are timed beside each other."""


def candidate_name(variant: str, tiles: Tiles = ()) -> str:
    """Returns the name of a candidate, with all launch parameters of its tiles: "tiles: BLOCK_M 16, ..."."""
    return ": ".join([variant, *([" / ".join(map(_all_of, tiles))] if tiles else [])])


def _all_of(tile: Tile) -> str:
    return ", ".join(f"{name} {value}" for name, value in tile.items())


def name_of_config(config: TileConfig) -> str:
    """Returns the name of the candidate that a tile config launches."""
    return candidate_name(config.variant, config.tiles if config.candidates else ())


def bucket_ranges() -> Iterator[tuple[int, int]]:
    """Yields (the fewest tokens, the most tokens) of each bucket."""
    yield from zip((1, *(tokens + 1 for tokens in BUCKETS)), BUCKETS, strict=False)


def product_question(need: Need, shape: Shape | None, tokens: int) -> Question:
    """Returns the question of a quantized linear layer's weight, or (shape None) of experts."""
    scheme = need.quant or need.q_dtype
    if shape is not None:
        return Question(need.op, scheme, f"{shape[0]}x{shape[1]}", tokens)
    (rows, hidden, bias), (_, inter, _) = need.shapes
    experts, top_k, groups = need.experts
    sizes = f"{experts} experts, {top_k} of a token, {groups} groups, {rows}x{hidden} and {hidden}x{inter}"
    return Question(need.op, scheme, sizes + ", bias" * bias, tokens)


def attention_question(need: Need) -> Question:
    """Returns the question of attention's tile, which is one for steps of any size."""
    dims = f"{need.head_dim}x{need.v_head_dim}, {need.heads[0]} / {need.heads[1]} heads"
    return Question(need.op, f"{need.q_dtype}/{need.kv_dtype}", dims)


def kernel_question(need: Need) -> Question:
    """Returns the question of the kernel of 16-bit weights, which is one for all of a model's."""
    shapes = sorted({(rows, cols) for rows, cols, _ in need.shapes})
    return Question(need.op, need.q_dtype, ", ".join(f"{rows}x{cols}" for rows, cols in shapes))
