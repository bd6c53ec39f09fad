"""The image and video encoder of Qwen3-VL and Qwen3.5, described by `spec`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang.srt.towers.base.encoder import (
    Heads,
    PatchAttention,
    PatchPart,
    Pieces,
    VisionEncoder,
    gelu_,
    interpolation,
)
from sglang.srt.towers.base.patch_places import Grid, frame_starts, interpolated, longest_frame
from sglang.srt.towers.base.pieces import Cuts
from sglang.srt.towers.qwen3_vl.spec import NORM_EPS, Qwen3VLTower


class Qwen3VLEncoder(VisionEncoder[Qwen3VLTower]):
    """The encoder; patches come in squares of the merge, one after the other."""

    def places(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        positions = interpolation(interpolated(grids, self.tower.merge, self.tower.side))
        rotation = self._neox_tables(grids, self.tower.merge, self.tower.theta)
        return positions | rotation | {"starts": frame_starts(grids)}

    def _encoded(self, part: PatchPart, cuts: Cuts) -> Pieces[torch.Tensor]:
        tower, prefix = self.tower, self.tower.prefixes[0]
        x = self._linear(prefix + "patch_embed.proj", part.pixels.to(self.dtype))
        x = x + self._interpolated(self._weight(prefix + "pos_embed", "weight"), part.places)
        sight = PatchAttention(self._rotate(part.places), part.places["starts"], longest_frame(part.grids), cuts)
        features = []
        yield
        for i in range(tower.num_layers):
            x = yield from self._block(f"{prefix}blocks.{i}.", x, sight)
            if i in tower.deepstack:
                merger = f"{prefix}deepstack_merger_list.{tower.deepstack.index(i)}."
                features.append(self._merged(merger, x, wide_norm=True))
            yield
        return torch.cat((self._merged(prefix + "merger.", x, wide_norm=False), *features), dim=-1)

    def _block(self, name: str, x: torch.Tensor, sight: PatchAttention) -> Pieces[torch.Tensor]:
        def project(rows: slice) -> Heads:
            return self._split(
                self._linear(name + "attn.qkv", self._norm(name + "norm1", x[rows], NORM_EPS)), sight, rows
            )

        def rest(rows: slice) -> None:
            patches = x[rows]
            patches += self._linear(name + "attn.proj", attended[rows])
            wide = self._linear(name + "mlp.linear_fc1", self._norm(name + "norm2", patches, NORM_EPS))
            patches += self._linear(name + "mlp.linear_fc2", gelu_(wide, approximate="tanh"))

        attended = yield from self._attended(project, len(x), sight)
        yield from self._row_by_row(rest, len(x), sight)
        return x

    def _merged(self, name: str, x: torch.Tensor, wide_norm: bool) -> torch.Tensor:
        """Returns tokens [tokens, out_size] of x [P, hidden]: neighbours side by side, normalized after (`wide_norm`)
        or before that."""
        size = self.tower.hidden_size * self.tower.merge**2
        x = self._norm(name + "norm", x.view(-1, size) if wide_norm else x, NORM_EPS).view(-1, size)
        return self._linear(name + "linear_fc2", gelu_(self._linear(name + "linear_fc1", x)))
