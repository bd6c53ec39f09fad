"""The image encoder of DeepSeek-V4.1, described by `spec`.

Source: the inference code beside the checkpoint of V4.1-Flash, as vLLM, TensorRT-LLM and transformers describe it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from sglang.srt.towers.base.encoder import Heads, PatchAttention, PatchPart, Pieces, VisionEncoder, gelu_
from sglang.srt.towers.base.patch_places import ROW_BY_ROW, Grid, frame_starts, longest_frame, num_patches
from sglang.srt.towers.base.pieces import Cuts
from sglang.srt.towers.deepseek_v41.spec import ALIGNER, END, NEW_LINE, START, TOWER, DeepseekVitTower

AnyVit = TypeVar("AnyVit", bound=DeepseekVitTower)


class DeepseekVitEncoder(VisionEncoder[AnyVit]):
    """The encoder; patches come row by row."""

    def places(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        return self._neox_tables(grids, ROW_BY_ROW, self.tower.theta) | {"starts": frame_starts(grids)}

    def _stored(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape unchanged: checkpoints store the patch embedding as a matrix too."""
        return shape

    def _encoded(self, part: PatchPart, cuts: Cuts) -> Pieces[torch.Tensor]:
        tower = self.tower
        x = self._linear(TOWER + "patch_embed.proj", part.pixels.to(self.dtype))
        sight = PatchAttention(self._rotate(part.places), part.places["starts"], longest_frame(part.grids), cuts)
        yield
        for i in range(tower.num_layers):
            x = yield from self._block(f"{TOWER}blocks.{i}.", x, sight)
            yield
        x = self._rms_norm(TOWER + "norm", x, tower.norm_eps)
        frames = zip(x.split([num_patches([grid]) for grid in part.grids]), part.grids, strict=True)
        return torch.cat([self._span(patches, grid) for patches, grid in frames])

    def _block(self, name: str, x: torch.Tensor, sight: PatchAttention) -> Pieces[torch.Tensor]:
        eps = self.tower.norm_eps

        def project(rows: slice) -> Heads:
            normed = self._rms_norm(name + "norm1", x[rows], eps)
            return self._split(self._linear(name + "attn.wqkv", normed), sight, rows)

        def rest(rows: slice) -> None:
            patches = x[rows]
            patches += self._linear(name + "attn.wo", attended[rows])
            wide = self._linear(name + "mlp.w1", self._rms_norm(name + "norm2", patches, eps))
            gate, up = wide.chunk(2, dim=-1)
            patches += self._linear(name + "mlp.w2", F.silu(gate, inplace=True).mul_(up))

        attended = yield from self._attended(project, len(x), sight)
        yield from self._row_by_row(rest, len(x), sight)
        return x

    def _span(self, patches: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Returns tokens [tokens, out_size] of a frame's patches [P, hidden]."""
        seen = self._seen(patches, grid)
        line = self.params[NEW_LINE].tensor.expand(len(seen), 1, -1)
        lines = torch.cat((seen, line), dim=1).flatten(0, 1)
        start, end = (self.params[mark].tensor[None] for mark in (START, END))
        return torch.cat((start, lines, end))

    def _seen(self, patches: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Returns tokens [rows, columns, out_size] of the squares of a frame's patches [P, hidden]."""
        wide = gelu_(self._linear(ALIGNER + "w1", self._squares(patches, grid)))
        return self._linear(ALIGNER + "w2", wide).unflatten(0, self.tower.squares(grid))

    def _squares(self, patches: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Returns the patches [P, hidden] of each square of the merge, row by row, as [squares, hidden * merge^2],
        zero-padded at the right and lower side."""
        merge, (_, height, width) = self.tower.merge, grid
        x = F.pad(patches.view(height, width, -1), (0, 0, 0, -width % merge, 0, -height % merge))
        x = x.unflatten(1, (-1, merge)).unflatten(0, (-1, merge))
        return x.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)
