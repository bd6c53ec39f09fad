"""The image and video encoder of Gemma 4, described by `spec`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from sglang.srt.towers.base.encoder import Heads, PatchAttention, PatchPart, Pieces, VisionEncoder, cos_sin, gelu_
from sglang.srt.towers.base.patch_places import (
    ROW_BY_ROW,
    Grid,
    frame_starts,
    longest_frame,
    rows_and_columns,
    squares,
)
from sglang.srt.towers.base.pieces import Cuts
from sglang.srt.towers.gemma4.spec import Gemma4Tower


class Gemma4Encoder(VisionEncoder[Gemma4Tower]):
    """The encoder; patches come row by row, with values from 0 to 1."""

    def places(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        rows, columns = rows_and_columns(grids, ROW_BY_ROW)
        by_row, by_column = self._angles(grids, ROW_BY_ROW, self.tower.theta)
        # The first half of a head turns by the column, the second by the row: [P, 2, head_dim / 4].
        rotation = cos_sin(np.stack((by_column, by_row), axis=1))
        order = squares(grids, self.tower.merge)
        return rotation | {"rows": rows, "columns": columns, "squares": order, "starts": frame_starts(grids)}

    def _encoded(self, part: PatchPart, cuts: Cuts) -> Pieces[torch.Tensor]:
        tower, (prefix, projector), places = self.tower, self.tower.prefixes, part.places
        x = self._linear(prefix + "patch_embedder.input_proj", (2 * part.pixels - 1).to(self.dtype))
        of_column, of_row = self._weight(prefix + "patch_embedder", "position_embedding_table")
        x = x + of_column[places["columns"]] + of_row[places["rows"]]
        sight = PatchAttention(self._rotate(places), places["starts"], longest_frame(part.grids), cuts)
        yield
        for i in range(tower.num_layers):
            x = yield from self._block(f"{prefix}encoder.layers.{i}.", x, sight)
            yield
        pooled = x[places["squares"]].unflatten(0, (-1, tower.merge**2)).float().mean(1)
        pooled = pooled * tower.hidden_size**0.5
        if tower.standardized:
            shift, scale = (self._weight(prefix.removesuffix("."), f"std_{name}") for name in ("bias", "scale"))
            pooled = (pooled - shift.float()) * scale.float()
        normed = F.rms_norm(pooled.to(self.dtype).float(), (tower.hidden_size,), eps=tower.norm_eps)
        return self._linear(projector + "embedding_projection", normed.to(self.dtype))

    def _block(self, name: str, x: torch.Tensor, sight: PatchAttention) -> Pieces[torch.Tensor]:
        eps, mlp = self.tower.norm_eps, name + "mlp."

        def project(rows: slice) -> Heads:
            normed = self._rms_norm(name + "input_layernorm", x[rows], eps)
            return self._heads(name + "self_attn.", normed, sight, rows)

        def rest(rows: slice) -> None:
            patches, out = x[rows], self._bounded(name + "self_attn.o_proj", attended[rows])
            patches += self._rms_norm(name + "post_attention_layernorm", out, eps)
            del out
            normed = self._rms_norm(name + "pre_feedforward_layernorm", patches, eps)
            gate = gelu_(self._bounded(mlp + "gate_proj", normed), approximate="tanh")
            down = self._bounded(mlp + "down_proj", gate.mul_(self._bounded(mlp + "up_proj", normed)))
            patches += self._rms_norm(name + "post_feedforward_layernorm", down, eps)

        attended = yield from self._attended(project, len(x), sight, scale=1.0)
        yield from self._row_by_row(rest, len(x), sight)
        return x

    def _heads(self, name: str, x: torch.Tensor, sight: PatchAttention, rows: slice) -> Heads:
        """Returns queries, keys and values of x [N, hidden], a slice of the patches."""
        heads, eps = (self.tower.rank_heads, self.tower.head_dim), self.tower.norm_eps
        q, k, v = (self._bounded(f"{name}{part}_proj", x).unflatten(-1, heads) for part in "qkv")
        q, k = self._rms_norm(name + "q_norm", q, eps), self._rms_norm(name + "k_norm", k, eps)
        sight.rotate(q, rows)
        sight.rotate(k, rows)
        return q, k, F.rms_norm(v.float(), (heads[1],), eps=eps).to(self.dtype)

    def _bounded(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Computes a linear layer, whose inputs and outputs are clamped if the checkpoint has bounds."""
        if not self.tower.bounded:
            return self._linear(name + ".linear", x)
        x = x.clamp(self._weight(name, "input_min"), self._weight(name, "input_max"))
        return self._linear(name + ".linear", x).clamp(
            self._weight(name, "output_min"), self._weight(name, "output_max")
        )
