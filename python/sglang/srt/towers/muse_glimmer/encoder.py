"""The image and video encoder of Muse-Glimmer and Muse-Spark, described by `spec`.

Source: the classes of transformers for Muse-Glimmer as the numeric reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from sglang.srt.towers.base.encoder import (
    BlockNames,
    PatchAttention,
    PatchPart,
    Pieces,
    VisionEncoder,
    cos_sin,
    gelu_,
    interpolation,
)
from sglang.srt.towers.base.patch_places import (
    ROW_BY_ROW,
    Grid,
    bilinear,
    frame_starts,
    longest_frame,
    squares,
    windows,
)
from sglang.srt.towers.base.pieces import Cuts
from sglang.srt.towers.muse_glimmer.spec import BLOCK_EPS, MuseGlimmerTower

_BLOCK = BlockNames(("norm1", "norm2"), "attn.{}_proj", "attn.proj")


class MuseGlimmerEncoder(VisionEncoder[MuseGlimmerTower]):
    """The encoder. Patches come row by row, each with its frames in order, and are reordered by attention window."""

    def places(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        tower = self.tower
        order, starts = windows(grids, ROW_BY_ROW, tower.side)
        # The models were trained with rows and columns exchanged here: of a frame that is not square, the patches take
        # the positions of one of its width in rows, in that one's order (transformers before 5.18 does not).
        exchanged = [(frames, columns, rows) for frames, rows, columns in grids]
        positions = interpolation(bilinear(exchanged, ROW_BY_ROW, tower.side, beyond=0.0))
        # The classes number rows and columns from 1 on, which turns queries and keys alike.
        rows, columns = self._angles(grids, ROW_BY_ROW, tower.theta)
        rotation = cos_sin(np.concatenate((columns, rows), axis=1))
        by_window = {name: array[order] for name, array in (positions | rotation).items()}
        merged = np.argsort(order)[squares(grids, tower.merge)]
        return by_window | {
            "order": order,
            "squares": merged,
            "window_starts": starts,
            "starts": frame_starts(grids),
        }

    def _stored(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape unchanged: checkpoints store the patch embedding as a matrix too."""
        return shape

    def _encoded(self, part: PatchPart, cuts: Cuts) -> Pieces[torch.Tensor]:
        tower, (prefix, adapter, projection), places = self.tower, self.tower.prefixes, part.places
        embedder = prefix + "patch_embedder."
        x = self._linear(embedder + "patch_embedding", part.pixels.to(self.dtype)[places["order"]])
        x = x + self._interpolated(self._weight(embedder + "position_embedding_table", "weight"), places)
        x = self._norm(prefix + "ln_pre", x, tower.norm_eps)
        rotate = self._rotate(places)
        of_windows, of_frames = (
            PatchAttention(rotate, places["window_starts"], tower.side**2, replace(cuts, queries=1)),
            PatchAttention(rotate, places["starts"], longest_frame(part.grids), cuts),
        )
        yield
        for i in range(tower.num_layers):
            sight = of_frames if tower.sees_whole_clips(i) else of_windows
            x = yield from self._plain_block(_BLOCK, f"{prefix}layers.{i}.", x, sight, BLOCK_EPS)
            yield
        x = self._norm(prefix + "ln_post", x, tower.norm_eps)[places["squares"]]
        # The patches of a token stand behind one another in each dim, not dim behind dim in each patch.
        x = x.unflatten(0, (-1, tower.merge**2)).transpose(1, 2).flatten(1)
        for name in ("fc1", "fc2"):
            x = gelu_(self._linear(adapter + name, x))
        x = self._linear(projection.removesuffix("."), x)
        return F.rms_norm(x.float(), (tower.out_size,), eps=tower.text_eps).to(self.dtype)
