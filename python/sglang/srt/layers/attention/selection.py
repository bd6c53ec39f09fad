"""Selection of cache entries: those that the new tokens of a step may see, and those that attention reads.

An entry stands for one token, or for `rate` of them (caches of 1/rate entries a token). Everything here lies on the
device and has shapes that do not depend on lengths, so that it may be part of a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class EntryRows:
    """Entries that each of T new tokens sees of the caches of one row table: entries 0 .. counts - 1 of its request.

    Entry j lies at slot req_to_token[req_pool_indices, j * rate] // rate. Tokens of one request are neighbours, in
    ascending order. Example: a request whose tokens at positions 8 to 10 are new, rate 4: counts 2, 2, 2.
    """

    req_to_token: torch.Tensor  # [max_reqs + 1, context_len] int32
    req_pool_indices: torch.Tensor  # [T] int64, of each token's request
    counts: torch.Tensor  # [T] int32; 0: nothing, as for padding
    max_count: int
    """No count is larger. In a graph: what the context length allows."""
    rate: int = 1
    run: int = 1
    """New tokens of a request that are computed together: 1 for those that decode. Only the speed depends on it."""

    def __len__(self) -> int:
        return len(self.counts)

    def part(self, tokens: slice) -> EntryRows:
        """Returns the rows of some of the tokens."""
        return replace(self, req_pool_indices=self.req_pool_indices[tokens], counts=self.counts[tokens])

    def blocks(self, block: int, num_heads: int) -> EntryRows:
        """Of rows of tokens: the blocks of `block` tokens that each sees, its own included, once for each of H heads:
        T * H rows."""
        return EntryRows(
            self.req_to_token,
            self.req_pool_indices.repeat_interleave(num_heads),
            ((self.counts + (block - 1)) // block).repeat_interleave(num_heads),
            -(-self.max_count // block),
            block,
            self.run * num_heads,
        )

    def slots_of(self, entries: torch.Tensor) -> torch.Tensor:
        """entries [T, K] integers, of which negative ones are none -> their slots [T, K] int32, -1 for none."""
        at = entries.clamp(min=0).long() * self.rate
        slots = self.req_to_token[self.req_pool_indices[:, None], at] // self.rate
        return torch.where(entries < 0, -1, slots).to(torch.int32)

    def all(self) -> Selection:
        """Every entry that a token sees."""
        return self.since(torch.zeros_like(self.counts), self.max_count)

    def last(self, window: int) -> Selection:
        """The last `window` entries that a token sees."""
        return self.since((self.counts - window).clamp(min=0), min(window, self.max_count))

    def since(self, first: torch.Tensor, width: int) -> Selection:
        """Selects the entries from `first` [T] on, at most `width` of them."""
        entries = first[:, None] + torch.arange(width, dtype=torch.int32, device=first.device)
        slots = self.slots_of(torch.where(entries < self.counts[:, None], entries, -1))
        return Selection(slots, self.counts - first)


@dataclass(frozen=True, slots=True)
class Selection:
    """The slots of the entries that each of T tokens attends to. It may serve several layers, and several caches of one
    row table and rate."""

    slots: torch.Tensor  # [T, K] int32; -1: none
    counts: torch.Tensor  # [T] int32, at most K: slots from there on are not looked at

    def select_rank(self, rank: int, size: int) -> Selection:
        """Returns what `rank` of `size` has of the entries where they share out the tokens, by its own slots."""
        is_local = (self.slots >= 0) & (self.slots % size == rank)
        return replace(self, slots=torch.where(is_local, self.slots // size, -1))
