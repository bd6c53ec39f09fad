"""The image and video encoder of Qwen2.5-VL, described by `spec`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sglang.srt.towers.base.encoder import Heads, PatchAttention, PatchPart, Pieces, VisionEncoder, gelu_
from sglang.srt.towers.base.patch_places import Grid, frame_starts, longest_frame, windows
from sglang.srt.towers.base.pieces import Cuts
from sglang.srt.towers.qwen2_5_vl.spec import NORM_EPS, ROTARY_THETA, Qwen2_5VLTower


class Qwen2_5VLEncoder(VisionEncoder[Qwen2_5VLTower]):
    """The encoder. Patches come in squares of the merge, one after the other, and are reordered by attention window."""

    def places(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        order, starts = windows(grids, self.tower.merge, self.tower.window)
        rotation = self._neox_tables(grids, self.tower.merge, ROTARY_THETA)
        rotation = {name: self._squares(array, order) for name, array in rotation.items()}
        return rotation | {"order": order, "window_starts": starts, "starts": frame_starts(grids)}

    def _encoded(self, part: PatchPart, cuts: Cuts) -> Pieces[torch.Tensor]:
        tower, prefix, places = self.tower, self.tower.prefixes[0], part.places
        by_window = places["order"]
        x = self._linear(prefix + "patch_embed.proj", self._squares(part.pixels.to(self.dtype), by_window))
        rotate = self._rotate(places)
        of_windows, of_frames = (
            PatchAttention(
                rotate, places["window_starts"], (tower.window * tower.merge) ** 2, replace(cuts, queries=1)
            ),
            PatchAttention(rotate, places["starts"], longest_frame(part.grids), cuts),
        )
        yield
        for i in range(tower.num_layers):
            sight = of_frames if tower.sees_whole_clips(i) else of_windows
            x = yield from self._block(f"{prefix}blocks.{i}.", x, sight)
            yield
        x = self._rms_norm(prefix + "merger.ln_q", x, NORM_EPS).view(-1, tower.hidden_size * tower.merge**2)
        x = self._linear(prefix + "merger.mlp.2", gelu_(self._linear(prefix + "merger.mlp.0", x)))
        merged = torch.empty_like(x)
        merged[by_window] = x
        return merged

    def _block(self, name: str, x: torch.Tensor, sight: PatchAttention) -> Pieces[torch.Tensor]:
        def project(rows: slice) -> Heads:
            return self._split(
                self._linear(name + "attn.qkv", self._rms_norm(name + "norm1", x[rows], NORM_EPS)), sight, rows
            )

        def rest(rows: slice) -> None:
            patches = x[rows]
            patches += self._linear(name + "attn.proj", attended[rows])
            patches += self._gated(name + "mlp.", self._rms_norm(name + "norm2", patches, NORM_EPS))

        attended = yield from self._attended(project, len(x), sight)
        yield from self._row_by_row(rest, len(x), sight)
        return x

    def _squares(self, x: Any, order: Any) -> Any:
        """Returns an array or tensor x [P, ...] with its squares of the merge in the order [P / merge^2]."""
        squares = x.reshape(-1, self.tower.merge**2, *x.shape[1:])[order]
        return squares.reshape(x.shape)
