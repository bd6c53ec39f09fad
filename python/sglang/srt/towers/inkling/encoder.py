"""The image encoder of Inkling, described by `spec`.

Source: the classes of transformers for Inkling as the numeric reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang.srt.towers.base.encoder import PatchPart, Pieces, VisionEncoder, gelu_
from sglang.srt.towers.base.patch_places import Grid
from sglang.srt.towers.base.pieces import Cuts, shares
from sglang.srt.towers.inkling.spec import NORM_EPS, PATCHES_AT_ONCE, Fold, InklingTower


class InklingEncoder(VisionEncoder[InklingTower]):
    """The encoder; patches have no positions, and each becomes a token by itself."""

    def places(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        return {}

    def _encoded(self, part: PatchPart, cuts: Cuts) -> Pieces[torch.Tensor]:
        """Its one layer of pieces, without attention, is all there is: cut by patches."""
        features = torch.empty((len(part.pixels), self.tower.out_size), dtype=self.dtype, device=self.device)
        yield
        for number, rows in enumerate(shares(len(features), 2 * cuts.rows)):
            if number == cuts.rows:
                yield  # in the place of attention
            for pixels, out in zip(
                part.pixels[rows].split(PATCHES_AT_ONCE), features[rows].split(PATCHES_AT_ONCE), strict=True
            ):
                out.copy_(self._folded(pixels.to(self.dtype)))
            yield
        return features

    def _folded(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns tokens [N, out_size] of pixels [N, values per patch]."""
        channels, frames, rows, columns = self.tower.patch_shape
        (prefix,) = self.tower.prefixes
        x = pixels.view(-1, frames, rows, columns, channels)
        for i, fold in enumerate(self.tower.folds):
            x = self._linear(f"{prefix}layers.linear_{i}", boxes(x, fold))
            if i < len(self.tower.folds) - 1:
                x = gelu_(self._rms_norm(f"{prefix}layers.norm_{i}", x, NORM_EPS))
        return self._rms_norm(f"{prefix}final_norm", x.flatten(1), NORM_EPS)


def boxes(x: torch.Tensor, fold: Fold) -> torch.Tensor:
    """Splits x [N, T, H, W, C] into boxes, [N, T / frames, H / side, W / side, frames * side * side * C]."""
    x = x.unflatten(3, (-1, fold.side)).unflatten(2, (-1, fold.side)).unflatten(1, (-1, fold.frames))
    return x.permute(0, 1, 3, 5, 2, 4, 6, 7).flatten(4)
