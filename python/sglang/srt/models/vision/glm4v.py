"""The encoder of images and videos of GLM-4.1V, GLM-4.5V and GLM-4.6V: `plan.towers.glm4v` describes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from sglang.srt.models.vision.encoder import Heads, PatchPart, Pieces, Sight, VisionEncoder, interpolation
from sglang.srt.models.vision.patch_places import Grid, cubic, frame_starts, longest_frame
from sglang.srt.models.vision.pieces import Cuts
from sglang.srt.plan.towers.glm4v import ROTARY_THETA, Glm4vTower

_LAYER_NORM_EPS = 1e-5
"""Of the merger, in every published model."""


class Glm4vEncoder(VisionEncoder[Glm4vTower]):
    """Patches come in squares of the merge, one after the other."""

    def places(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        positions = interpolation(cubic(grids, self.tower.merge, self.tower.side))
        turned = self._halves(grids, self.tower.merge, ROTARY_THETA)
        return positions | turned | {"starts": frame_starts(grids)}

    def _encoded(self, part: PatchPart, cuts: Cuts) -> Pieces[torch.Tensor]:
        tower, prefix = self.tower, self.tower.prefixes[0]
        x = self._linear(prefix + "patch_embed.proj", part.pixels.to(self.dtype))
        x = self._rms_norm(prefix + "post_conv_layernorm", x, tower.norm_eps)
        positions = self._weight(prefix + "embeddings.position_embedding", "weight")
        x = x + self._interpolated(positions, part.places)
        sight = Sight(self._turn(part.places), part.places["starts"], longest_frame(part.grids), cuts)
        yield
        for i in range(tower.num_layers):
            x = yield from self._block(f"{prefix}blocks.{i}.", x, sight)
            yield
        return self._merged(prefix, self._rms_norm(prefix + "post_layernorm", x, tower.norm_eps))

    def _block(self, name: str, x: torch.Tensor, sight: Sight) -> Pieces[torch.Tensor]:
        def project(rows: slice) -> Heads:
            return self._split(
                self._linear(name + "attn.qkv", self._rms_norm(name + "norm1", x[rows], self.tower.norm_eps)),
                sight,
                rows,
            )

        def rest(rows: slice) -> None:
            patches = x[rows]
            patches += self._linear(name + "attn.proj", attended[rows])
            patches += self._gated(name + "mlp.", self._rms_norm(name + "norm2", patches, self.tower.norm_eps))

        attended = yield from self._attended(project, len(x), sight)
        yield from self._row_by_row(rest, len(x), sight)
        return x

    def _merged(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        """[P, hidden] -> [tokens, out_size]: the convolution over a square of the merge is a product."""
        kernel = self._weight(prefix + "downsample", "weight")  # [out_size, hidden, merge, merge]
        squares = x.view(-1, self.tower.merge**2, self.tower.hidden_size).transpose(1, 2).flatten(1)
        x = F.linear(squares, kernel.flatten(1), self._weight(prefix + "downsample", "bias"))
        x = self._linear(prefix + "merger.proj", x)
        x = F.gelu(self._norm(prefix + "merger.post_projection_norm", x, _LAYER_NORM_EPS))
        return self._gated(prefix + "merger.", x)
