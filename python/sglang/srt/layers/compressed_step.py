"""Per-step data of compressed attention: the request of each token, and the cache entries that it sees.

It is the same for all layers of a compression rate, so the first one computes it and the batch keeps it for the others.
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
    from sglang.srt.layers.step_rows import ExtendRows, ImageRuns
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
        """Returns, of a verify step with `width` tokens per request, the first B = len(counts) requests, with `stops`
        after their first `counts` [B] tokens. Positions are recomputed, because those of padding rows are
        meaningless."""
        num = len(counts) * width
        token = torch.arange(num, device=counts.device) % width
        counts = counts.repeat_interleave(width, output_size=num)
        firsts = self.firsts[:num]
        return TokenRequests(self.slots[:num], firsts + token, firsts, firsts + counts)

    def copy(self) -> TokenRequests:
        """Returns a copy, of what `accepted` reads, that later steps do not change."""
        return replace(self, slots=self.slots.clone(), firsts=self.firsts.clone())


def token_requests(batch: ForwardBatch) -> TokenRequests:
    """Returns the requests of a batch's tokens. Padding rows of decoding requests overlap prompt tokens, whose requests
    win."""
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
    """Returns the requests of prompt tokens; tokens before the first and after the last prompt get none."""
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
    """Data of one step, computed on first use."""

    requests: TokenRequests
    longest: int
    """Upper bound of the requests' lengths, new tokens included."""
    chosen: dict[int, Selection] = field(default_factory=dict)
    """Selections of layers with an indexer, which other layers reuse, by layer number."""
    candidates: dict[int, Selection] = field(default_factory=dict)
    """Runs of entries to which later indexers are limited, by the number of the layer that selected them."""
    _counts: dict[int, torch.Tensor] = field(default_factory=dict)
    _windows: dict[int, Selection] = field(default_factory=dict)
    _all: dict[int, Selection] = field(default_factory=dict)
    _tails: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _completed: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _angles: dict[RopeSpec, torch.Tensor] = field(default_factory=dict)

    def entries(self, batch: ForwardBatch, cache: CacheStore, rate: int) -> EntryRows:
        """Returns the entries that tokens see in a cache with one entry per `rate` tokens: those of complete runs up to
        the token itself."""
        if rate not in self._counts:
            self._counts[rate] = ((self.requests.positions + 1) // rate).to(torch.int32)
        table = batch.slots_of(cache).req_to_token
        return EntryRows(table, self.requests.slots, self._counts[rate], self.longest // rate, rate)

    def tails(self, batch: ForwardBatch, cache: CacheStore, rate: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns each token's unfinished run and the number of its tokens up to this one, both [T] int32; 0 tokens
        after a complete run, whose slot is meaningless. Only for caches of the full row table."""
        if rate not in self._tails:
            table, after = batch.slots_of(cache).req_to_token, self.requests.positions + 1
            first = after // rate * rate
            # What lies behind the last token of a full context is not looked at.
            slots = table[self.requests.slots, first.clamp(max=table.shape[1] - 1)] // rate
            self._tails[rate] = (slots, (after - first).to(torch.int32))
        return self._tails[rate]

    def completed(self, batch: ForwardBatch, cache: CacheStore, rate: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns for entries that are written to a row of each token first: the slot (of a token) of that row, and the
        slot of the entry that the token completes, -1 if it does not complete a run. Both [T] int64."""
        key = (rate, cache.table)
        if key not in self._completed:
            requests, loc = self.requests, batch.slots_of(cache).out_cache_loc
            ends = (requests.positions + 1) % rate == 0
            rows = torch.arange(len(loc), device=loc.device) * rate
            self._completed[key] = (rows, torch.where(ends, loc // rate, -1))
        return self._completed[key]

    def rows_with_angles(self, batch: ForwardBatch, rotary: RotaryTable, dim: int) -> torch.Tensor:
        """Returns [T, 2, dim] fp32: zeros, followed by the cosines and sines of each token's RoPE, then zeros. All
        layers with the same RoPE start from copies of these rows."""
        if rotary.spec not in self._angles:
            index, cos_sin = rotary.at(batch.rotary_positions)
            rows = torch.zeros((len(index), 2, dim), dtype=torch.float32, device=index.device)
            rows[:, 1, : rotary.spec.rot_dim] = cos_sin[index]
            self._angles[rotary.spec] = rows
        return self._angles[rotary.spec]

    def window(self, batch: ForwardBatch, cache: CacheStore, tokens: int) -> Selection:
        """Selects the last `tokens` tokens up to each token itself; for tokens of images that are seen both ways also
        the rest of the image. Caches of the same window share a row table."""
        if tokens not in self._windows:
            images = None if batch.extend is None else batch.extend.images
            entries = self.entries(batch, cache, 1)
            self._windows[tokens] = entries.last(tokens) if images is None else _with_images(entries, images, tokens)
        return self._windows[tokens]

    def all(self, batch: ForwardBatch, cache: CacheStore, rate: int) -> Selection:
        """Selects all entries of a rate that tokens see. Only for caches of the full row table."""
        if rate not in self._all:
            self._all[rate] = self.entries(batch, cache, rate).all()
        return self._all[rate]


def _with_images(entries: EntryRows, images: ImageRuns, tokens: int) -> Selection:
    """Selects as `EntryRows.last`, and the whole of its run for each of the images' tokens."""
    runs = images.rows
    lens = runs.start_loc.diff()  # not the lengths of the host, whose copy would wait for the GPU
    begins, ends = (
        of.repeat_interleave(lens, output_size=len(images.tokens)) for of in (runs.prefix_lens, runs.seq_lens)
    )
    first, counts = (entries.counts - tokens).clamp(min=0), entries.counts.clone()
    first[images.tokens] = torch.minimum(first[images.tokens], begins.to(first.dtype))
    counts[images.tokens] = ends.to(counts.dtype)
    width = min(tokens - 1 + max(runs.new_lens_cpu), entries.max_count)
    return replace(entries, counts=counts).since(first, width)


def compressed_step(batch: ForwardBatch) -> CompressedStep:
    """Returns the batch's data for compressed attention, created on first use."""
    if batch.compressed is None:
        batch.compressed = CompressedStep(token_requests(batch), _longest(batch))
    return batch.compressed


def _longest(batch: ForwardBatch) -> int:
    """Returns the largest length of the step; in a graph, or if the host does not know lengths, the context length."""
    lens = [rows.seq_lens_cpu for rows in (batch.decode, batch.extend) if rows is not None]
    known = [max(of_rows) for of_rows in lens if of_rows is not None]
    return max(known) if len(known) == len(lens) else batch.token_slots[0].req_to_token.shape[1]
