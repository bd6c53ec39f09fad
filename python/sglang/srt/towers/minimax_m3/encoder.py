"""The image and video encoder of MiniMax-M3, described by `spec`.

Source: the classes of transformers for MiniMax-M3 as the numeric reference. The frames of a clip see one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from sglang.srt.towers.base.encoder import (
    BlockNames,
    PatchAttention,
    PatchPart,
    Pieces,
    VisionEncoder,
    cos_sin,
    gelu_,
    rotate_pairs,
)
from sglang.srt.towers.base.patch_places import Grid, clip_starts, frame_indices, num_patches, rows_and_columns
from sglang.srt.towers.base.pieces import Cuts
from sglang.srt.towers.minimax_m3.spec import MiniMaxM3Tower

_BLOCK = BlockNames(("layer_norm1", "layer_norm2"), "self_attn.{}_proj", "self_attn.out_proj")


class MiniMaxM3Encoder(VisionEncoder[MiniMaxM3Tower]):
    """The encoder; patches come in squares of the merge, one after the other."""

    def places(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        pairs = self.tower.axis_pairs
        frequencies = (1.0 / self.tower.theta ** (np.arange(pairs) / pairs)).astype(np.float32)
        axes = (frame_indices(grids), *rows_and_columns(grids, self.tower.merge))
        angles = np.concatenate([axis[:, None].astype(np.float32) * frequencies for axis in axes], axis=1)
        return cos_sin(angles) | {"starts": clip_starts(grids)}

    def _encoded(self, part: PatchPart, cuts: Cuts) -> Pieces[torch.Tensor]:
        tower, (prefix, projector, merger), places = self.tower, self.tower.prefixes, part.places
        x = self._linear(prefix + "embeddings.patch_embedding", part.pixels.to(self.dtype))
        x = self._norm(prefix + "pre_layrnorm", x, tower.norm_eps)
        rotate = partial(_rotate_front, cos=places["cos"], sin=places["sin"])
        sight = PatchAttention(rotate, places["starts"], max(num_patches([grid]) for grid in part.grids), cuts)
        yield
        for i in range(tower.num_layers):
            x = yield from self._plain_block(_BLOCK, f"{prefix}encoder.layers.{i}.", x, sight, tower.norm_eps)
            yield
        x = self._projected(projector, x)
        return self._projected(merger, x.view(-1, tower.out_size * tower.merge**2))

    def _projected(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        return self._linear(prefix + "linear_2", gelu_(self._linear(prefix + "linear_1", x)))


def _rotate_front(x: torch.Tensor, rows: slice, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates the first dims of x [N, heads, head_dim] in two halves; cos, sin [P, 1, pairs] float32: a third of the
    pairs each by time, row and column."""
    first, second = x[..., : 2 * cos.shape[-1]].chunk(2, dim=-1)
    rotate_pairs(first, second, cos[rows], sin[rows])
