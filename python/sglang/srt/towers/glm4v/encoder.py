"""The image and video encoder of GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-5.3-Flash, described by `spec`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from sglang.srt.towers.base.encoder import Heads, PatchAttention, PatchPart, Pieces, VisionEncoder, interpolation
from sglang.srt.towers.base.patch_places import Grid, cubic, frame_starts, longest_frame
from sglang.srt.towers.base.pieces import Cuts
from sglang.srt.towers.glm4v.spec import Glm4vTower

_LAYER_NORM_EPS = 1e-5
"""Epsilon of the merger's norm in every published model."""


class Glm4vEncoder(VisionEncoder[Glm4vTower]):
    """The encoder; patches come in squares of the merge, one after the other."""

    def places(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        side, merge = self.tower.side, self.tower.merge
        positions = interpolation(cubic(grids, merge, side)) if side else {}
        return positions | self._neox_tables(grids, merge, self.tower.theta) | {"starts": frame_starts(grids)}

    def _encoded(self, part: PatchPart, cuts: Cuts) -> Pieces[torch.Tensor]:
        tower, prefix = self.tower, self.tower.prefixes[0]
        x = self._linear(prefix + "patch_embed.proj", part.pixels.to(self.dtype))
        if tower.side:
            x = self._rms_norm(prefix + "post_conv_layernorm", x, tower.norm_eps)
            positions = self._weight(prefix + "embeddings.position_embedding", "weight")
            x = x + self._interpolated(positions, part.places)
        sight = PatchAttention(self._rotate(part.places), part.places["starts"], longest_frame(part.grids), cuts)
        yield
        for i in range(tower.num_layers):
            x = yield from self._block(f"{prefix}blocks.{i}.", x, sight)
            yield
        return self._merged(prefix, self._rms_norm(prefix + "post_layernorm", x, tower.norm_eps))

    def _block(self, name: str, x: torch.Tensor, sight: PatchAttention) -> Pieces[torch.Tensor]:
        def project(rows: slice) -> Heads:
            qkv = self._linear(name + "attn.qkv", self._rms_norm(name + "norm1", x[rows], self.tower.norm_eps))
            if self.tower.head_norms:
                for i, which in enumerate(("q_norm", "k_norm")):
                    heads = qkv.view(-1, 3, self.tower.rank_heads, self.tower.head_dim)[:, i]
                    heads.copy_(self._rms_norm(f"{name}attn.{which}", heads, self.tower.norm_eps))
            return self._split(qkv, sight, rows)

        def rest(rows: slice) -> None:
            patches = x[rows]
            patches += self._linear(name + "attn.proj", attended[rows])
            normed = self._rms_norm(name + "norm2", patches, self.tower.norm_eps)
            patches += self._gated(name + "mlp.", normed, self.tower.limit)

        attended = yield from self._attended(project, len(x), sight)
        yield from self._row_by_row(rest, len(x), sight)
        return x

    def _merged(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        """Returns tokens [tokens, out_size] of x [P, hidden]; the convolution over a square of the merge is a matrix
        product."""
        kernel = self._weight(prefix + "downsample", "weight")  # [out_size, hidden, merge, merge]
        squares = x.view(-1, self.tower.merge**2, self.tower.hidden_size).transpose(1, 2).flatten(1)
        x = F.linear(squares, kernel.flatten(1), self._weight(prefix + "downsample", "bias"))
        x = self._linear(prefix + "merger.proj", x)
        x = F.gelu(self._norm(prefix + "merger.post_projection_norm", x, _LAYER_NORM_EPS))
        return self._gated(prefix + "merger.", x, self.tower.limit)
