"""Selection of blocks of neighbouring tokens: where they lie, and the unfinished block that is read with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BlockSelection:
    """What each of T tokens attends to: whole blocks of `block` tokens, and the first tokens of one more.

    Tokens of a block lie at neighbouring slots: block b is slots b * block to (b + 1) * block - 1.
    """

    blocks: torch.Tensor  # [T, K] int32; from `counts` on not looked at
    counts: torch.Tensor  # [T] int32, blocks that were selected
    tails: torch.Tensor  # [T] int32, the unfinished block
    tail_counts: torch.Tensor  # [T] int32, its tokens up to the one that looks: 0 to block - 1
    block: int

    def token_slots(self, tokens: slice) -> torch.Tensor:
        """Returns the slots [t, K * block + block - 1] int64 of all that some of the tokens see; -1: nothing."""
        device, block = self.blocks.device, self.block
        place = torch.arange(block, device=device)
        wide = self.blocks.shape[1]
        chosen = torch.arange(wide, device=device) < self.counts[tokens, None]
        slots = self.blocks[tokens, :, None].long() * block + place
        slots = torch.where(chosen[..., None], slots, -1).flatten(1)
        tail = self.tails[tokens, None].long() * block + place[:-1]
        tail = torch.where(place[:-1] < self.tail_counts[tokens, None], tail, -1)
        return torch.cat((slots, tail), dim=1)
