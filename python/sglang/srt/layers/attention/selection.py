"""Sets of cache entries: those that a step's new tokens may see, and those selected for attention.

An entry stands for one token, or for `rate` tokens in compressed caches. Everything here is on the device and has
shapes that do not depend on lengths, so that it may be part of a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class EntryRows:
    """The entries that each of T new tokens sees in caches of one row table: 0 .. counts - 1 of its request.

    Entry j lies at slot req_to_token[req_pool_indices, j * rate] // rate. Tokens of one request are neighbours, in
    ascending order. Example: a request whose tokens at positions 8 to 10 are new, rate 4: counts 2, 2, 2.
    """

    req_to_token: torch.Tensor  # [max_reqs + 1, context_len] int32
    req_pool_indices: torch.Tensor  # [T] int64, of each token's request
    counts: torch.Tensor  # [T] int32; 0: nothing, as for padding
    max_count: int
    """Upper bound of `counts`; in a graph the one that follows from the context length."""
    rate: int = 1
    run: int = 1
    """New tokens per request, 1 in decoding. Only a hint for speed."""

    def __len__(self) -> int:
        return len(self.counts)

    def part(self, tokens: slice) -> EntryRows:
        """Returns the rows of a slice of the tokens."""
        return replace(self, req_pool_indices=self.req_pool_indices[tokens], counts=self.counts[tokens])

    def blocks(self, block: int, num_heads: int) -> EntryRows:
        """Converts rows of tokens into rows of blocks: the blocks of `block` tokens that each token sees, its own
        included, repeated for each of H heads; T * H rows."""
        return EntryRows(
            self.req_to_token,
            self.req_pool_indices.repeat_interleave(num_heads),
            ((self.counts + (block - 1)) // block).repeat_interleave(num_heads),
            -(-self.max_count // block),
            block,
            self.run * num_heads,
        )

    def slots_of(self, entries: torch.Tensor) -> torch.Tensor:
        """Returns the slots [T, K] int32 of `entries` [T, K] integers; -1 for negative ones."""
        at = entries.clamp(min=0).long() * self.rate
        slots = self.req_to_token[self.req_pool_indices[:, None], at] // self.rate
        return torch.where(entries < 0, -1, slots).to(torch.int32)

    def all(self) -> Selection:
        """Selects every entry that a token sees. The slots are made in place, as `plan.memory.selection_bytes` counts
        them: T tokens of a long context have GiBs of numbers as wide as an index."""
        columns = self.req_to_token[:, : max(0, self.max_count * self.rate - self.rate + 1) : self.rate]
        slots = columns.index_select(0, self.req_pool_indices).floor_divide_(self.rate)
        number = torch.arange(self.max_count, dtype=torch.int32, device=slots.device)
        return Selection(slots.masked_fill_(number >= self.counts[:, None], -1), self.counts)

    def in_table(self) -> Selection:
        """Selects every entry that a token sees, as `all` does, without copies of the slots: of entries of one token
        each."""
        return Selection(self.req_to_token[:, : self.max_count], self.counts, self.req_pool_indices)

    def last(self, window: int) -> Selection:
        """Selects the last `window` entries that a token sees."""
        return self.since((self.counts - window).clamp(min=0), min(window, self.max_count))

    def since(self, first: torch.Tensor, width: int) -> Selection:
        """Selects the entries from `first` [T] on, at most `width` of them."""
        entries = first[:, None] + torch.arange(width, dtype=torch.int32, device=first.device)
        slots = self.slots_of(torch.where(entries < self.counts[:, None], entries, -1))
        return Selection(slots, self.counts - first)


@dataclass(frozen=True, slots=True)
class Selection:
    """The slots of the entries that each of T tokens attends to. It may serve several layers, and several caches with
    the same row table and rate."""

    slots: torch.Tensor  # [T, K] int32; -1: none
    counts: torch.Tensor  # [T] int32, at most K; slots from there on are not read
    rows: torch.Tensor | None = None
    """[T] int64, of tokens whose slots are rows of a table: those of token t are slots[rows[t]]."""

    def of(self, tokens: slice) -> torch.Tensor:
        """Returns the slots [t, K] of some tokens."""
        return self.slots[tokens] if self.rows is None else self.slots[self.rows[tokens]]

    def select_rank(self, rank: int, size: int) -> Selection:
        """Returns the selected entries that DCP rank `rank` of `size` holds, as slots of its own cache; others become
        -1."""
        is_local = (self.slots >= 0) & (self.slots % size == rank)
        return replace(self, slots=torch.where(is_local, self.slots // size, -1))
