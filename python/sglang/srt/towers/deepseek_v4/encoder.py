"""The image encoder of DeepSeek-V4's vision edition, described by `spec`."""

from __future__ import annotations

import torch

from sglang.srt.towers.base.patch_places import Grid
from sglang.srt.towers.deepseek_v4.spec import ALIGNED, FILL, PAD, PairedRowsTower
from sglang.srt.towers.deepseek_v41.encoder import DeepseekVitEncoder
from sglang.srt.towers.deepseek_v41.spec import END, NEW_LINE, START


class PairedRowsEncoder(DeepseekVitEncoder[PairedRowsTower]):
    """V4.1's encoder; of two rows of tokens, those of a column come one after the other."""

    def _span(self, patches: torch.Tensor, grid: Grid) -> torch.Tensor:
        rows, columns = self.tower.squares(grid)
        pad, line = (self.params[mark].tensor[None] for mark in (PAD, NEW_LINE))
        lines = torch.cat((self._seen(patches, grid), line.expand(rows, 1, -1)), dim=1)
        odd = pad.expand(rows % 2, columns + 1, -1)
        pairs = torch.cat((lines, odd)).unflatten(0, (-1, 2)).transpose(1, 2).flatten(0, 2)
        start, end = (self.params[mark].tensor[None] for mark in (START, END))
        before, behind = pad.expand(FILL, -1), pad.expand(len(pairs) % ALIGNED, -1)
        return torch.cat((before, start, pairs, behind, end))
