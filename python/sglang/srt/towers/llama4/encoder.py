"""The image encoder of Llama 4, described by `spec`.

Source: the classes of transformers for Llama 4 as the numeric reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from sglang.srt.towers.base.encoder import (
    BlockNames,
    PatchAttention,
    PatchPart,
    Pieces,
    VisionEncoder,
    cos_sin,
    gelu_,
    rotate_interleaved,
)
from sglang.srt.towers.base.patch_places import ROW_BY_ROW, Grid, squares
from sglang.srt.towers.base.pieces import Cuts
from sglang.srt.towers.llama4.spec import NORM_EPS, Llama4Tower

_BLOCK = BlockNames(("input_layernorm", "post_attention_layernorm"), "self_attn.{}_proj", "self_attn.o_proj")


class Llama4Encoder(VisionEncoder[Llama4Tower]):
    """The encoder. The frames of a grid are the tiles of an image and the whole of it, which do not attend to one
    another. Patches come row by row; each tile's extra (class) token comes after its patches."""

    def places(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        side, tiles = self.tower.side, sum(frames for frames, _, _ in grids)
        assert all(grid[1:] == (side, side) for grid in grids), "tiles have one size"
        rows, columns = self._angles([(1, side, side)], ROW_BY_ROW, self.tower.theta, first=1)
        # The last token is not turned: as where a row and a column of number 0 would be.
        angles = np.pad(np.concatenate((columns, rows), axis=1), ((0, 1), (0, 0)))
        rotation = cos_sin(np.tile(angles, (tiles, 1)))
        starts = np.arange(tiles + 1, dtype=np.int32) * np.int32(side**2 + 1)
        return rotation | {"squares": squares(grids, self.tower.merge), "starts": starts}

    def _encoded(self, part: PatchPart, cuts: Cuts) -> Pieces[torch.Tensor]:
        tower, (prefix, projector), places = self.tower, self.tower.prefixes, part.places
        patches = self._linear(prefix + "patch_embedding.linear", part.pixels.to(self.dtype))
        patches = patches.view(-1, tower.side**2, tower.hidden_size)
        last = self.params[prefix + "class_embedding"].tensor.expand(len(patches), 1, -1)
        x = torch.cat((patches, last), dim=1) + self.params[prefix + "positional_embedding_vlm"].tensor
        x = self._norm(prefix + "layernorm_pre", x.flatten(0, 1), NORM_EPS)
        rotate = partial(rotate_interleaved, cos=places["cos"], sin=places["sin"])
        sight = PatchAttention(rotate, places["starts"], tower.side**2 + 1, cuts)
        yield
        for i in range(tower.num_layers):
            x = yield from self._plain_block(_BLOCK, f"{prefix}model.layers.{i}.", x, sight, NORM_EPS)
            yield
        x = self._norm(prefix + "layernorm_post", x, NORM_EPS).unflatten(0, (-1, tower.side**2 + 1))
        x = x[:, :-1].flatten(0, 1)[places["squares"]].view(-1, tower.hidden_size * tower.merge**2)
        for name in ("fc1", "fc2"):
            x = gelu_(self._linear(f"{prefix}vision_adapter.mlp.{name}", x))
        return self._linear(projector + "linear_1", x)
