"""MoonViT, the image and video encoder of Kimi K2.5, described by `spec`.

Source: the Kimi-VL report (arXiv 2504.07491), and the classes of transformers for Kimi K2.5 as the numeric reference.
The frames of a clip see one another, and the mean over them becomes the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from sglang.srt.towers.base.encoder import (
    Heads,
    PatchAttention,
    PatchPart,
    Pieces,
    VisionEncoder,
    cos_sin,
    gelu_,
    interpolation,
    rotate_interleaved,
)
from sglang.srt.towers.base.patch_places import (
    ROW_BY_ROW,
    Grid,
    clip_starts,
    cubic,
    frame_numbers,
    num_patches,
    squares,
)
from sglang.srt.towers.base.pieces import Cuts
from sglang.srt.towers.kimi_k25.spec import ROTARY_THETA, MoonViTTower


class MoonViTEncoder(VisionEncoder[MoonViTTower]):
    """The encoder; patches come row by row."""

    def places(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        positions = interpolation(cubic(grids, ROW_BY_ROW, self.tower.side))
        rows, columns = self._angles(grids, ROW_BY_ROW, ROTARY_THETA)
        # Even pairs turn by the column, odd ones by the row.
        rotation = cos_sin(np.stack((columns, rows), axis=-1).reshape(len(rows), -1))
        order = {"squares": squares(grids, self.tower.merge), "starts": clip_starts(grids)}
        frames = {"frames": frame_numbers(grids)} if any(frames > 1 for frames, _, _ in grids) else {}
        return positions | rotation | order | frames

    def _encoded(self, part: PatchPart, cuts: Cuts) -> Pieces[torch.Tensor]:
        tower, (prefix, projector), places = self.tower, self.tower.prefixes, part.places
        x = self._linear(prefix + "patch_embed.proj", part.pixels.to(self.dtype))
        positions = self._weight(prefix + "patch_embed.pos_emb", "weight").flatten(0, 1)
        x = x + self._interpolated(positions, places)
        if "frames" in places:
            x = x + self._times()[places["frames"]]
        rotate = partial(rotate_interleaved, cos=places["cos"], sin=places["sin"])
        sight = PatchAttention(rotate, places["starts"], max(num_patches([grid]) for grid in part.grids), cuts)
        yield
        for i in range(tower.num_layers):
            x = yield from self._block(f"{prefix}encoder.blocks.{i}.", x, sight)
            yield
        x = self._norm(prefix + "encoder.final_layernorm", x, tower.norm_eps)
        x = _pooled(x[places["squares"]], part.grids)
        x = self._norm(projector + "pre_norm", x, tower.projector_eps)
        x = self._linear(projector + "proj.0", x.view(-1, tower.hidden_size * tower.merge**2))
        return self._linear(projector + "proj.2", gelu_(x))

    def _times(self) -> torch.Tensor:
        """Returns the time embeddings that are added to the patches of a frame by its number, [pooled_frames + 1,
        hidden]; zero for 0."""
        half = self.tower.hidden_size // 2
        angles = np.arange(self.tower.pooled_frames)[:, None] / ROTARY_THETA ** (np.arange(half) / half)
        table = np.concatenate((np.sin(angles), np.cos(angles)), axis=1).astype(np.float32)
        return self._on_device(np.concatenate((np.zeros_like(table[:1]), table))).to(self.dtype)

    def _block(self, name: str, x: torch.Tensor, sight: PatchAttention) -> Pieces[torch.Tensor]:
        def project(rows: slice) -> Heads:
            return self._split(
                self._linear(name + "wqkv", self._norm(name + "norm0", x[rows], self.tower.norm_eps)), sight, rows
            )

        def rest(rows: slice) -> None:
            patches = x[rows]
            patches += self._linear(name + "wo", attended[rows])
            wide = self._linear(name + "mlp.fc0", self._norm(name + "norm1", patches, self.tower.norm_eps))
            patches += self._linear(name + "mlp.fc1", gelu_(wide, approximate="tanh"))

        attended = yield from self._attended(project, len(x), sight)
        yield from self._row_by_row(rest, len(x), sight)
        return x


def _pooled(x: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
    """Returns the mean over frames, [patches of one frame of each grid, hidden], of x [P, hidden]."""
    if all(frames == 1 for frames, _, _ in grids):
        return x
    parts = x.split([frames * rows * columns for frames, rows, columns in grids])
    return torch.cat([part.unflatten(0, (grid[0], -1)).mean(0) for part, grid in zip(parts, grids, strict=True)])
