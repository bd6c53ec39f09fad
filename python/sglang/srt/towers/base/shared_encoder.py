"""A data-parallel encoder, whose ranks each compute some frames of an encoder step (`--mm-enable-dp-encoder`).

Every rank has all weights of the encoder and receives the features of all frames. Frames, and clips of frames that
attend to one another, are never cut: it speeds up several images and videos, but not a single image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang.srt.distributed.groups import Group
from sglang.srt.towers.base.encoder import VisionEncoder
from sglang.srt.towers.base.patch_places import Grid, clips, num_patches


class SharedEncoder:
    """Implements MediaEncoder. Collective: all ranks of the group call it with the same items."""

    def __init__(self, encoder: VisionEncoder[Any], group: Group) -> None:
        self.encoder, self.group = encoder, group

    @torch.inference_mode()
    def encode(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """Takes and returns what `VisionEncoder.encode` does."""
        tower = self.encoder.tower
        parts = clips(grids, tower.clip_frames)
        shares = split_evenly([num_patches([part]) for part in parts], self.group.size)
        tokens = [sum(map(tower.num_tokens, parts[share])) for share in shares]
        width = tower.features_size
        mine = torch.zeros((max(tokens), width), dtype=self.encoder.dtype, device=self.encoder.device)
        share = shares[self.group.rank]
        if tokens[self.group.rank]:
            first = num_patches(parts[: share.start])
            last = first + num_patches(parts[share])
            mine[: tokens[self.group.rank]] = torch.cat(self.encoder.encode(pixels[first:last], parts[share]))
        gathered = self.group.all_gather(mine, dim=0).view(self.group.size, max(tokens), width)
        whole = torch.cat([part[:count] for part, count in zip(gathered, tokens, strict=True)])
        return [part.clone() for part in whole.split([tower.num_tokens(grid) for grid in grids])]


def split_evenly(sizes: Sequence[int], parts: int) -> list[slice]:
    """Returns a run of the sizes for each part, with about equal sums. A run may be empty."""
    total, done, number, shares = sum(sizes), 0, 0, []
    for part in range(1, parts + 1):
        first = number
        while number < len(sizes) and (done + sizes[number] / 2) * parts <= total * part:
            done += sizes[number]
            number += 1
        number = len(sizes) if part == parts else number
        shares.append(slice(first, number))
    return shares
