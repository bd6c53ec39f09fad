"""Predicted times of candidates that the tables do not choose: other tiles of products and of attention."""

from __future__ import annotations

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.spec import Tile
from sglang.srt.kernels.tile_configs import TileConfig
from sglang.srt.layers.triton_ops.linear_tiles import LIBRARY
from sglang.tuning.cost_model import Constants
from sglang.tuning.ops import DecodeAttention, Experts, ExtendAttention, Linear, Op
from sglang.tuning.predicted_times import (
    Predicted,
    decode_with,
    experts_with,
    extend_with,
    linear_with,
    predicted,
)


def predicted_with(
    op: Op,
    arch: ArchTraits,
    config: TileConfig | None,
    tile: Tile | None,
    constants: Constants | None = None,
) -> Predicted | None:
    """Returns the prediction for a tile config of a product or a tile of attention, or (both None) for the tables'
    choice; None if nothing predicts it. constants: of the cost model of products; None: the GPU's. Raises as
    `predicted`."""
    if config is None and tile is None:
        return predicted(op, arch)
    if config is not None and config.variant == LIBRARY:
        return None
    if isinstance(op, Linear) and config is not None:
        return linear_with(op, arch, config, constants)
    if isinstance(op, Experts) and config is not None:
        return experts_with(op, arch, config, constants)
    if isinstance(op, DecodeAttention):
        return decode_with(op, arch, tile)
    return extend_with(op, arch, tile) if isinstance(op, ExtendAttention) else None
