"""The image encoder of Step-3.7, described by `spec`.

Source: the classes of transformers 5.23 for Step-3.7 as the numeric reference; earlier versions rotate by the row
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from sglang.srt.towers.base.encoder import (
    Heads,
    PatchAttention,
    PatchPart,
    Pieces,
    VisionEncoder,
    cos_sin,
    interpolation,
    rotate_interleaved,
)
from sglang.srt.towers.base.patch_places import ROW_BY_ROW, Grid, bilinear, frame_starts, longest_frame, num_patches
from sglang.srt.towers.base.pieces import Cuts
from sglang.srt.towers.base.spec import Cut
from sglang.srt.towers.step3p7.spec import Step3Tower


class Step3Encoder(VisionEncoder[Step3Tower]):
    """The encoder. Patches come row by row. The frames of a grid are views of one image, which do not attend to one
    another."""

    def places(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        positions = interpolation(bilinear(grids, ROW_BY_ROW, self.tower.side))
        rows, columns = self._angles(grids, ROW_BY_ROW, self.tower.theta)
        rotation = cos_sin(np.concatenate((columns, rows), axis=1))
        return positions | rotation | {"starts": frame_starts(grids)}

    def _encoded(self, part: PatchPart, cuts: Cuts) -> Pieces[torch.Tensor]:
        tower, (prefix, projector), places = self.tower, self.tower.prefixes, part.places
        x = self._linear(prefix + "conv1", part.pixels.to(self.dtype))
        x = x + self._interpolated(self.params[prefix + "positional_embedding"].tensor, places)
        x = self._norm(prefix + "ln_pre", x, tower.norm_eps)
        rotate = partial(rotate_interleaved, cos=places["cos"], sin=places["sin"])
        sight = PatchAttention(rotate, places["starts"], longest_frame(part.grids), cuts)
        yield
        for i in range(tower.num_layers):
            x = yield from self._block(f"{prefix}transformer.resblocks.{i}.", x, sight)
            yield
        frames = zip(x.split([num_patches([grid]) for grid in part.grids]), part.grids, strict=True)
        sampled = torch.cat([self._sampled(patches, grid) for patches, grid in frames])
        return self._linear(projector.removesuffix("."), sampled)

    def _sampled(self, patches: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Returns [tokens, 4 hidden] of a grid's patches [P, hidden]: rows and columns are halved twice."""
        x = patches.view(*grid, -1).permute(0, 3, 1, 2)
        for number in (1, 2):
            name = f"{self.tower.prefixes[0]}vit_downsampler{number}"
            adds_up = self.tower.cut_of(f"{name}.weight") is Cut.COLUMNS
            bias = None if adds_up and self.group.rank > 0 else self._weight(name, "bias")
            x = F.conv2d(x, self._weight(name, "weight"), bias, stride=2, padding=1)
            x = self.group.all_reduce(x.contiguous()) if adds_up else x
        return x.flatten(2).transpose(1, 2).flatten(0, 1)

    def _block(self, name: str, x: torch.Tensor, sight: PatchAttention) -> Pieces[torch.Tensor]:
        eps, attention = self.tower.norm_eps, name + "attn"

        def project(rows: slice) -> Heads:
            normed = self._norm(name + "ln_1", x[rows], eps)
            weight, bias = (self._weight(attention, f"in_proj_{leaf}") for leaf in ("weight", "bias"))
            heads = F.linear(normed, weight, bias).view(-1, 3, self.tower.rank_heads, self.tower.head_dim)
            q, k, v = heads.unbind(1)
            sight.rotate(q, rows)
            sight.rotate(k, rows)
            return q, k, v

        def rest(rows: slice) -> None:
            patches = x[rows]
            out = self._linear(attention + ".out_proj", attended[rows])
            patches += out.mul_(self._weight(name + "ls_1", "gamma"))
            wide = self._linear(name + "mlp.c_fc", self._norm(name + "ln_2", patches, eps))
            out = self._linear(name + "mlp.c_proj", wide.mul_(torch.sigmoid(1.702 * wide)))
            patches += out.mul_(self._weight(name + "ls_2", "gamma"))

        attended = yield from self._attended(project, len(x), sight)
        yield from self._row_by_row(rest, len(x), sight)
        return x
