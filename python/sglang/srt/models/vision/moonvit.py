"""MoonViT, the encoder of images of Kimi K2.5: `plan.towers.moonvit` describes it.

Source: the Kimi-VL report (arXiv 2504.07491), and the classes of transformers for Kimi K2.5 as the numeric reference.
Its form for videos, which pools over frames, is not here: an image is one frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from sglang.srt.models.vision.encoder import Layers, Turn, VisionEncoder, gelu_, write_turned
from sglang.srt.models.vision.patch_places import Grid, cubic, frame_starts, squares
from sglang.srt.plan.towers.moonvit import ROTARY_THETA, MoonViTTower

_ROW_BY_ROW = 1
"""The merge of patches that come in the order of an image's pixels."""


class MoonViTEncoder(VisionEncoder[MoonViTTower]):
    """Patches come row by row."""

    def _encoded(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> Layers[torch.Tensor]:
        tower, (prefix, projector) = self.tower, self.tower.prefixes
        x = self._linear(prefix + "patch_embed.proj", pixels.to(self.dtype))
        positions = self._weight(prefix + "patch_embed.pos_emb", "weight").flatten(0, 1)
        x = x + self._interpolated(positions, *cubic(grids, _ROW_BY_ROW, tower.side))
        rows, columns = self._angles(grids, _ROW_BY_ROW, ROTARY_THETA)
        cos, sin = self._cos_sin(np.stack((columns, rows), axis=-1).reshape(len(rows), -1))
        turn = partial(_turned, cos=cos, sin=sin)
        starts = self._on_device(frame_starts(grids))
        for i in range(tower.num_layers):
            x = self._block(f"{prefix}encoder.blocks.{i}.", x, turn, starts)
            yield len(x)
        x = self._norm(prefix + "encoder.final_layernorm", x, tower.norm_eps)
        x = self._norm(projector + "pre_norm", x[self._on_device(squares(grids, tower.merge))], tower.projector_eps)
        x = self._linear(projector + "proj.0", x.view(-1, tower.hidden_size * tower.merge**2))
        return self._linear(projector + "proj.2", gelu_(x))

    def _block(self, name: str, x: torch.Tensor, turn: Turn, starts: torch.Tensor) -> torch.Tensor:
        qkv = self._linear(name + "wqkv", self._norm(name + "norm0", x, self.tower.norm_eps))
        x += self._linear(name + "wo", self._attended(qkv, turn, starts))
        del qkv
        wide = self._linear(name + "mlp.fc0", self._norm(name + "norm1", x, self.tower.norm_eps))
        return x.add_(self._linear(name + "mlp.fc1", gelu_(wide, approximate="tanh")))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [P, heads, head_dim], in which two neighbours are a pair; cos, sin [P, 1, head_dim / 2] float32: even pairs by
    the column, odd ones by the row."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    write_turned(*x.unflatten(-1, (-1, 2)).unbind(-1), *result.unflatten(-1, (-1, 2)).unbind(-1), cos, sin)
    return result
