"""Data that compressed attention reads of a step beside its tokens: the request of each token, and the cache entries
that it sees.

It is the same for all layers of a rate, so the first one makes it and the others take it from the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from sglang.srt.configs.rope import RopeSpec
from sglang.srt.layers.attention.selection import EntryRows, Selection

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.layers.rotary_embedding import RotaryTable
    from sglang.srt.layers.step_rows import ExtendRows
    from sglang.srt.mem_cache.memory_pool import CacheStore


@dataclass(frozen=True, slots=True)
class TokenRequests:
    """Request slot and positions for each of T tokens; tokens of one request are neighbours in the order of their
    positions.

    Example: two requests with 3 new tokens behind 5 and 1 behind 9: firsts 5, 5, 5, 9; stops 8, 8, 8, 10.
    """

    slots: torch.Tensor  # [T] int64, of its request; 0 of padding
    positions: torch.Tensor  # [T] int64
    firsts: torch.Tensor  # [T] int64, the position of the request's first new token
    stops: torch.Tensor  # [T] int64, the position behind its last one

    def accepted(self, counts: torch.Tensor, width: int) -> TokenRequests:
        """Of a step that verifies `width` tokens of each request: the first B = len(counts) requests, whose first
        `counts` [B] tokens stand. Padding behind a request's own tokens says nothing of its position."""
        num = len(counts) * width
        token = torch.arange(num, device=counts.device) % width
        counts = counts.repeat_interleave(width, output_size=num)
        firsts = self.firsts[:num]
        return TokenRequests(self.slots[:num], firsts + token, firsts, firsts + counts)

    def copy(self) -> TokenRequests:
        """A copy of what `accepted` reads, which later steps leave as it is."""
        return replace(self, slots=self.slots.clone(), firsts=self.firsts.clone())


def token_requests(batch: ForwardBatch) -> TokenRequests:
    """Padding rows that decode lie over the tokens of prompts, to which these then belong."""
    positions = batch.positions
    if batch.extend is None:
        assert batch.decode is not None
        slots = batch.decode.req_pool_indices
        return TokenRequests(slots, positions, positions, positions + 1)
    of_prompts = _prompt_requests(batch.extend, positions)
    if batch.decode is None:
        return of_prompts
    count = len(batch.decode)
    decoding = torch.arange(count, device=positions.device) < batch.extend.start_loc[0]
    front = positions[:count]

    def joined(of_decodes: torch.Tensor, of_tokens: torch.Tensor) -> torch.Tensor:
        return torch.cat((torch.where(decoding, of_decodes, of_tokens[:count]), of_tokens[count:]))

    return TokenRequests(
        joined(batch.decode.req_pool_indices, of_prompts.slots),
        positions,
        joined(front, of_prompts.firsts),
        joined(front + 1, of_prompts.stops),
    )


def _prompt_requests(rows: ExtendRows, positions: torch.Tensor) -> TokenRequests:
    """Tokens before the first request's and behind the last one's belong to none."""
    token = torch.arange(len(positions), dtype=rows.start_loc.dtype, device=positions.device)
    request = torch.searchsorted(rows.start_loc, token, right=True) - 1
    inside = (request >= 0) & (token < rows.start_loc[-1])
    request = request.clamp(0, len(rows) - 1)
    return TokenRequests(
        torch.where(inside, rows.req_pool_indices[request], 0),
        positions,
        torch.where(inside, rows.prefix_lens[request].long(), positions),
        torch.where(inside, rows.seq_lens[request].long(), positions + 1),
    )


@dataclass(slots=True)
class CompressedStep:
    """Data of one step. Counts and selections are made when the first layer asks for them."""

    requests: TokenRequests
    longest: int
    """No request has more tokens, the new ones among them."""
    chosen: dict[int, Selection] = field(default_factory=dict)
    """What the indexers of layers chose that others take over, by the number of the layer."""
    candidates: dict[int, Selection] = field(default_factory=dict)
    """The runs of entries that layers chose, in which later indexers choose, likewise."""
    _counts: dict[int, torch.Tensor] = field(default_factory=dict)
    _windows: dict[int, Selection] = field(default_factory=dict)
    _all: dict[int, Selection] = field(default_factory=dict)
    _tails: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _angles: dict[RopeSpec, torch.Tensor] = field(default_factory=dict)

    def entries(self, batch: ForwardBatch, cache: CacheStore, rate: int) -> EntryRows:
        """Returns what tokens see of a cache with an entry for every `rate` tokens: the entries of complete runs up to
        the token itself."""
        if rate not in self._counts:
            self._counts[rate] = ((self.requests.positions + 1) // rate).to(torch.int32)
        table = batch.slots_of(cache).req_to_token
        return EntryRows(table, self.requests.slots, self._counts[rate], self.longest // rate, rate)

    def tails(self, batch: ForwardBatch, cache: CacheStore, rate: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the slot of the unfinished run of each token, and how many of its tokens there are up to this one,
        both [T] int32; of a complete run 0 tokens, and the slot is of no meaning. Such caches lie by the table of all
        tokens."""
        if rate not in self._tails:
            table, after = batch.slots_of(cache).req_to_token, self.requests.positions + 1
            first = after // rate * rate
            # What lies behind the last token of a full context is not looked at.
            slots = table[self.requests.slots, first.clamp(max=table.shape[1] - 1)] // rate
            self._tails[rate] = (slots, (after - first).to(torch.int32))
        return self._tails[rate]

    def rows_with_angles(self, batch: ForwardBatch, rotary: RotaryTable, dim: int) -> torch.Tensor:
        """Returns [T, 2, dim] fp32: zeros, and behind them the cosines and sines that turn each token, then zeros.
        Rows of all layers of one rotation begin as copies of these."""
        if rotary.spec not in self._angles:
            index, cos_sin = rotary.at(batch.rotary_positions)
            rows = torch.zeros((len(index), 2, dim), dtype=torch.float32, device=index.device)
            rows[:, 1, : rotary.spec.rot_dim] = cos_sin[index]
            self._angles[rotary.spec] = rows
        return self._angles[rotary.spec]

    def window(self, batch: ForwardBatch, cache: CacheStore, tokens: int) -> Selection:
        """A token and those before it, `tokens` in all. Caches of one window have one row table."""
        if tokens not in self._windows:
            self._windows[tokens] = self.entries(batch, cache, 1).last(tokens)
        return self._windows[tokens]

    def all(self, batch: ForwardBatch, cache: CacheStore, rate: int) -> Selection:
        """Every entry of a rate that tokens see. Such caches lie by the table of all tokens."""
        if rate not in self._all:
            self._all[rate] = self.entries(batch, cache, rate).all()
        return self._all[rate]


def compressed_step(batch: ForwardBatch) -> CompressedStep:
    """The batch's; made when it is first asked for."""
    if batch.compressed is None:
        batch.compressed = CompressedStep(token_requests(batch), _longest(batch))
    return batch.compressed


def _longest(batch: ForwardBatch) -> int:
    """Returns the largest length of the step. In a graph, and where the host does not know lengths, that is the width
    of a row of the table."""
    lens = [rows.seq_lens_cpu for rows in (batch.decode, batch.extend) if rows is not None]
    known = [max(of_rows) for of_rows in lens if of_rows is not None]
    return max(known) if len(known) == len(lens) else batch.token_slots[0].req_to_token.shape[1]
