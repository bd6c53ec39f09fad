"""The image and video encoder of MiMo-V2.5 and V2.6, described by `spec`.

transformers has no class for it. Written from descriptions of SGLang's, which is the publisher's own. The code that is
published with the checkpoints has another norm before the merger, with biases that no checkpoint has, and adds sinks to
the score of a frame's first patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sglang.srt.towers.base.encoder import Heads, PatchAttention, PatchPart, Pieces, cos_sin, gelu_
from sglang.srt.towers.base.patch_places import Grid, frame_starts, longest_frame
from sglang.srt.towers.base.pieces import Cuts
from sglang.srt.towers.mimo_v2.spec import BLOCKS_AT_ONCE, MiMoTower
from sglang.srt.towers.qwen2_5_vl.encoder import Qwen2_5VLEncoder
from sglang.srt.towers.qwen2_5_vl.spec import NORM_EPS, ROTARY_THETA


@dataclass(frozen=True, slots=True)
class NearPatches(PatchAttention):
    """Attention of patches to those at most `window` places away, in blocks of `window` queries [B, window], the last
    of which repeat the last patch of a frame, with all patches that these may see, `keys` [B, 3 * window]; -1: there is
    none. `sinks` [heads]: the score of one more key of each head, which has no value; None: there is none."""

    window: int
    queries: torch.Tensor
    keys: torch.Tensor
    sinks: torch.Tensor | None


class MiMoEncoder(Qwen2_5VLEncoder):
    """The encoder. Patches come in squares of the merge, row by row, and for some layers in columns of them."""

    tower: MiMoTower

    def places(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        columns = _by_column(grids, self.tower.merge)
        angles = np.concatenate(self._angles(grids, self.tower.merge, ROTARY_THETA), axis=1)
        of_columns = {f"column_{name}": array for name, array in cos_sin(self._squares(angles, columns)).items()}
        starts = frame_starts(grids)
        return {
            **cos_sin(angles),
            **of_columns,
            **_blocks(starts, self.tower.window),
            "columns": columns,
            "rows": np.argsort(columns),
            "starts": starts,
        }

    def _encoded(self, part: PatchPart, cuts: Cuts) -> Pieces[torch.Tensor]:
        tower, prefix, places = self.tower, self.tower.prefixes[0], part.places
        x = self._linear(prefix + "patch_embed.proj", part.pixels.to(self.dtype))
        of_columns = {name: places[f"column_{name}"] for name in ("cos", "sin")}
        rotations, by_column = (self._rotate(places), self._rotate(of_columns)), False
        yield
        for i in range(tower.num_layers):
            block = f"{prefix}blocks.{i}."
            if by_column != (i in tower.column_layers):
                by_column = not by_column
                x = self._squares(x, places["columns" if by_column else "rows"])
            sight = PatchAttention(rotations[by_column], places["starts"], longest_frame(part.grids), cuts)
            if not tower.sees_whole_clips(i):
                sight = self._near(block, sight, part)
            x = yield from self._block(block, x, sight)
            yield
        if by_column:
            x = self._squares(x, places["rows"])
        x = self._rms_norm(prefix + "merger.ln_q", x, NORM_EPS).view(-1, tower.hidden_size * tower.merge**2)
        return self._linear(prefix + "merger.mlp.2", gelu_(self._linear(prefix + "merger.mlp.0", x)))

    def _near(self, block: str, sight: PatchAttention, part: PatchPart) -> NearPatches:
        places, sinks, heads = part.places, None, self.tower.rank_heads
        if self.tower.sinks:
            sinks = self._weight(block + "attn", "sinks")[self.group.rank * heads :][:heads]
        return NearPatches(
            sight.rotate,
            sight.starts,
            sight.longest,
            replace(sight.cuts, queries=1),
            self.tower.window,
            places["queries"],
            places["keys"],
            sinks,
        )

    def _split(self, qkv: torch.Tensor, sight: PatchAttention, rows: slice) -> Heads:
        """Returns queries, keys and values of qkv [N, their rows] for a slice of the patches and this rank's heads,
        rotated; keys and values once for each head of queries."""
        tower, dim = self.tower, self.tower.head_dim
        shares = tower.rank_heads, tower.kv_heads // tower.ranks
        heads = qkv.view(len(qkv), -1, dim)
        sight.rotate(heads[:, : sum(shares)], rows)
        q, k, v = heads.split((shares[0], shares[1], shares[1]), dim=1)
        group = shares[0] // shares[1]
        return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        sight: PatchAttention,
        scale: float | None,
        share: tuple[int, int],
    ) -> None:
        if not isinstance(sight, NearPatches):
            super()._attend(q, k, v, out, sight, scale, share)
            return
        for first in range(0, len(sight.queries), BLOCKS_AT_ONCE):
            blocks = slice(first, first + BLOCKS_AT_ONCE)
            _attend_near(q, k, v, out, sight, blocks)


def _attend_near(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, sight: NearPatches, blocks: slice
) -> None:
    """Fills the rows of out [P, heads, head_dim] that some blocks have. Scores are those of float32 inputs."""
    rows, keys = sight.queries[blocks], sight.keys[blocks]
    near = keys.clamp(min=0)
    scores = torch.einsum("bqhd,bkhd->bhqk", q[rows].float(), k[near].float()) * q.shape[-1] ** -0.5
    unseen = (rows[:, :, None] - keys[:, None]).abs() > sight.window
    unseen |= (keys < 0)[:, None]
    scores.masked_fill_(unseen[:, None], -torch.inf)
    if sight.sinks is not None:
        sinks = sight.sinks.float().view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    attended = torch.einsum("bhqk,bkhd->bqhd", weights, v[near].float())
    out[rows] = attended.to(out.dtype)


def _by_column(grids: Sequence[Grid], merge: int) -> np.ndarray:
    """Returns the squares of the merge [P / merge^2] int64, column by column within their frame."""
    order, first = [], 0
    for frames, height, width in grids:
        shape = (frames, height // merge, width // merge)
        squares = np.arange(first, first + np.prod(shape)).reshape(shape)
        order.append(squares.transpose(0, 2, 1).ravel())
        first += squares.size
    return np.concatenate(order)


def _blocks(starts: np.ndarray, window: int) -> dict[str, np.ndarray]:
    """Returns `queries` and `keys` of NearPatches for frames that begin at `starts` [frames + 1]."""
    queries, keys = [], []
    for first, end in zip(starts[:-1].astype(np.int64), starts[1:].astype(np.int64), strict=True):
        begins = np.arange(first, end, window)[:, None]
        rows, near = begins + np.arange(window), begins + np.arange(-window, 2 * window)
        queries.append(np.minimum(rows, end - 1))
        keys.append(np.where((near >= first) & (near < end), near, -1))
    return {"queries": np.concatenate(queries), "keys": np.concatenate(keys)}
