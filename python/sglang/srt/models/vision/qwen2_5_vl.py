"""The encoder of images and videos of Qwen2.5-VL: `plan.towers.qwen2_5_vl` describes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.models.vision.encoder import Layers, Turn, VisionEncoder, gelu_
from sglang.srt.models.vision.patch_places import Grid, frame_starts, windows
from sglang.srt.plan.towers.qwen2_5_vl import NORM_EPS, ROTARY_THETA, Qwen2_5VLTower


class Qwen2_5VLEncoder(VisionEncoder[Qwen2_5VLTower]):
    """Patches come in squares of the merge, one after the other, and are put in the order of the windows."""

    def _encoded(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> Layers[torch.Tensor]:
        tower, prefix = self.tower, self.tower.prefixes[0]
        order, starts = windows(grids, tower.merge, tower.window)
        by_window, window_starts = self._on_device(order), self._on_device(starts)
        by_frame = self._on_device(frame_starts(grids))
        x = self._linear(prefix + "patch_embed.proj", self._squares(pixels.to(self.dtype), by_window))
        cos, sin = (self._squares(part, by_window) for part in self._halves(grids, tower.merge, ROTARY_THETA))
        for i in range(tower.num_layers):
            seen = by_frame if i in tower.full_layers else window_starts
            x = self._block(f"{prefix}blocks.{i}.", x, self._turn(cos, sin), seen)
            yield len(x)
        x = self._rms_norm(prefix + "merger.ln_q", x, NORM_EPS).view(-1, tower.hidden_size * tower.merge**2)
        x = self._linear(prefix + "merger.mlp.2", gelu_(self._linear(prefix + "merger.mlp.0", x)))
        merged = torch.empty_like(x)
        merged[by_window] = x
        return merged

    def _block(self, name: str, x: torch.Tensor, turn: Turn, starts: torch.Tensor) -> torch.Tensor:
        qkv = self._linear(name + "attn.qkv", self._rms_norm(name + "norm1", x, NORM_EPS))
        x += self._linear(name + "attn.proj", self._attended(qkv, turn, starts))
        del qkv
        return x.add_(self._gated(name + "mlp.", self._rms_norm(name + "norm2", x, NORM_EPS)))

    def _squares(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """x [P, ...], whose squares of the merge are put in the order [P / merge^2]."""
        return x.unflatten(0, (-1, self.tower.merge**2))[order].flatten(0, 1)
