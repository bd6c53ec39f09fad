"""The encoder of images and videos of Qwen3-VL and Qwen3.5: `plan.tower` describes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from sglang.srt.layers.parameter import Init, Param, Part
from sglang.srt.models.vision.patch_places import (
    Grid,
    frame_starts,
    interpolated,
    parts_of_frames,
    rows_and_columns,
)
from sglang.srt.plan.media import PATCHES_A_STEP
from sglang.srt.plan.tower import NORM_EPS, ROTARY_THETA, Tower
from sglang.srt.plan.weight_names import PartKey, WeightMap

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan


class Qwen3VLTower:
    """Every rank has all of it and encodes by itself. Implements Loadable and MediaEncoder."""

    base_prefix = ""

    def __init__(self, plan: Plan, tower: Tower) -> None:
        self.tower, self.device, self.dtype = tower, plan.device, getattr(torch, plan.dtype)
        self.finish: list[Callable[[], None]] = []
        self.params = {name: self._param(name, shape) for name, shape in tower.shapes()}
        modules = {name.rpartition(".")[0] for name in self.params}
        self.weights = WeightMap({name: name for name in modules}, {})
        self.attention = plan.entry("prefill_attention")
        self.ladder = plan.ladder("prefill_attention") if plan.tiles("prefill_attention") else None

    def _param(self, name: str, shape: tuple[int, ...]) -> Param:
        """A patch is a vector here; checkpoints have the weight of a convolution of as many values."""
        init = Init.NORMAL
        if name.endswith(".bias") or "norm" in name:
            init = Init.ZEROS if name.endswith(".bias") else Init.ONES
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        return Param(name, tensor, {PartKey(): Part(self._stored(name, shape))}, init)

    def _stored(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not name.endswith("patch_embed.proj.weight"):
            return shape
        return (shape[0], *self.tower.patch_shape)

    def ignored_weight(self, name: str) -> bool:
        return not name.startswith(self.tower.prefix)

    @torch.inference_mode()
    def encode(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """pixels [P, values of a patch] of items one after the other. Returns of each item [tokens, out_size * (1 +
        deepstack levels)]. Frames see themselves alone, so a long video is computed in parts."""
        parts, first = [], 0
        for frames in parts_of_frames(grids, PATCHES_A_STEP):
            last = first + sum(rows * columns for _, rows, columns in frames)
            parts.append(self._encoded(pixels[first:last], frames))
            first = last
        counts = [frames * rows * columns // self.tower.merge**2 for frames, rows, columns in grids]
        return list(torch.cat(parts).split(counts))

    def _encoded(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        tower = self.tower
        x = self._linear("patch_embed.proj", pixels.to(self.dtype)) + self._positions(grids)
        turn = self._rotary(grids)
        starts = self._on_device(frame_starts(grids))
        features = []
        for i in range(tower.num_layers):
            x = self._block(f"blocks.{i}.", x, turn, starts)
            if i in tower.deepstack:
                features.append(self._merged(f"deepstack_merger_list.{tower.deepstack.index(i)}.", x, wide_norm=True))
        return torch.cat((self._merged("merger.", x, wide_norm=False), *features), dim=-1)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _block(
        self, name: str, x: torch.Tensor, turn: Callable[[torch.Tensor], torch.Tensor], starts: torch.Tensor
    ) -> torch.Tensor:
        heads = (3, self.tower.num_heads, self.tower.head_dim)
        q, k, v = self._linear(name + "attn.qkv", self._norm(name + "norm1", x)).view(-1, *heads).unbind(1)
        q, k, v, out = turn(q), turn(k), v.contiguous(), torch.empty_like(x).view(-1, *heads[1:])
        attend = partial(self.attention, q, k, v, out, starts, is_causal=False)
        if self.ladder is None:
            attend(tile={})
        else:
            self.ladder.run(lambda tile: attend(tile=tile))
        x = x + self._linear(name + "attn.proj", out.view(x.shape))
        wide = F.gelu(self._linear(name + "mlp.linear_fc1", self._norm(name + "norm2", x)), approximate="tanh")
        return x + self._linear(name + "mlp.linear_fc2", wide)

    def _merged(self, name: str, x: torch.Tensor, wide_norm: bool) -> torch.Tensor:
        """[P, hidden] -> [tokens, out_size]: neighbours side by side, normed before that or behind."""
        size = self.tower.hidden_size * self.tower.merge**2
        x = self._norm(name + "norm", x.view(-1, size) if wide_norm else x).view(-1, size)
        return self._linear(name + "linear_fc2", F.gelu(self._linear(name + "linear_fc1", x)))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight(name, "weight"), self._weight(name, "bias"))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._weight(name, "weight")
        return F.layer_norm(x, weight.shape, weight, self._weight(name, "bias"), NORM_EPS)

    def _weight(self, name: str, leaf: str) -> torch.Tensor:
        return self.params[f"{self.tower.prefix}{name}.{leaf}"].tensor

    # --- places -------------------------------------------------------------------------------------------------------

    def _positions(self, grids: Sequence[Grid]) -> torch.Tensor:
        """[P, hidden] of the learned positions."""
        index, weights = map(self._on_device, interpolated(grids, self.tower.merge, self.tower.side))
        return (self._weight("pos_embed", "weight")[index] * weights[:, :, None]).sum(1).to(self.dtype)

    def _rotary(self, grids: Sequence[Grid]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns what turns [P, heads, head_dim]: the first quarter of the pairs by the row, the others by the
        column. Halves are pairs."""
        quarter = self.tower.head_dim // 4
        frequencies = (1.0 / ROTARY_THETA ** (np.arange(quarter) / quarter)).astype(np.float32)
        places = rows_and_columns(grids, self.tower.merge)
        angles = np.concatenate([place[:, None].astype(np.float32) * frequencies for place in places], axis=1)
        cos, sin = self._on_device(np.cos(angles)), self._on_device(np.sin(angles))
        return partial(_turned, cos=cos[:, None], sin=sin[:, None])

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [P, heads, head_dim]; cos, sin [P, 1, head_dim / 2] float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
