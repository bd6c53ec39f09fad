"""Selections of blocks of neighbouring tokens, with the unfinished block that is read as well."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BlockSelection:
    """The keys of each of T tokens: whole blocks of `block` tokens, and the first tokens of one unfinished block.

    Tokens of a block lie in neighbouring slots: block b is slots b * block to (b + 1) * block - 1.
    """

    blocks: torch.Tensor  # [T, K] int32; entries from `counts` on are not read
    counts: torch.Tensor  # [T] int32, blocks that were selected
    tails: torch.Tensor  # [T] int32, the unfinished block
    tail_counts: torch.Tensor  # [T] int32, its tokens up to the query: 0 to block - 1
    block: int

    def token_slots(self, tokens: slice) -> torch.Tensor:
        """Returns the slots [t, K * block + block - 1] int64 that the given tokens attend to; -1 fills the rest."""
        device, block = self.blocks.device, self.block
        place = torch.arange(block, device=device)
        wide = self.blocks.shape[1]
        chosen = torch.arange(wide, device=device) < self.counts[tokens, None]
        slots = self.blocks[tokens, :, None].long() * block + place
        slots = torch.where(chosen[..., None], slots, -1).flatten(1)
        tail = self.tails[tokens, None].long() * block + place[:-1]
        tail = torch.where(place[:-1] < self.tail_counts[tokens, None], tail, -1)
        return torch.cat((slots, tail), dim=1)
