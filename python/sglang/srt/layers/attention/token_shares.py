"""Sharding of cached tokens over DCP ranks: which tokens a rank holds, and how to gather them on every rank.

Position p of a request belongs to rank p % size. A page holds a multiple of `size` tokens, so slots of the row table
tell the same: slot s belongs to rank s % size and lies at entry s // size of its cache. The host's view of slots,
prefixes and pages is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sglang.srt.distributed.groups import Group
from sglang.srt.layers.step_rows import DecodeRows, TokenSlots
from sglang.srt.mem_cache.memory_pool import CacheStore


def own_slots(slots: torch.Tensor, context: Group) -> torch.Tensor:
    """Converts slots [T] int64 of the row table to entries [T] of this rank's caches; 0, which is padding, for other
    ranks' tokens."""
    return torch.div(slots, context.size, rounding_mode="floor") * (slots % context.size == context.rank)


def own_rows(rows: DecodeRows, context: Group) -> DecodeRows:
    """Returns the same requests with this rank's tokens only, possibly none, and a row table of their own. Only
    launches work, so it may be captured."""
    return _own(rows, own_table(rows.token_slots, rows.req_pool_indices, context), context)


def own_lengths(rows: DecodeRows, context: Group) -> DecodeRows:
    """Does as `own_rows` for code that reads lengths only: the tables stay those of all ranks."""
    return _own(rows, rows.token_slots, context)


def _own(rows: DecodeRows, token_slots: tuple[TokenSlots, ...], context: Group) -> DecodeRows:
    lens = rows.seq_lens_cpu
    return DecodeRows(
        torch.arange(len(rows), device=rows.seq_lens.device),
        own_count(rows.seq_lens, context),
        token_slots,
        None if lens is None else [(length - context.rank + context.size - 1) // context.size for length in lens],
    )


def own_rows_before_replay(rows: DecodeRows, context: Group) -> DecodeRows:
    """Does as `own_rows` for a step that a graph is about to compute. The graph will write the new tokens' slots to the
    row table, so they are added here. The table has as many columns as the longest request needs."""
    assert rows.seq_lens_cpu is not None
    columns = -(-max(rows.seq_lens_cpu) // context.size)
    mine = _own(rows, own_table(rows.token_slots, rows.req_pool_indices, context, columns), context)
    table = mine.token_slots[-1].req_to_token
    position = rows.seq_lens.long()[:, None] - 1
    at = (position // context.size).clamp(max=table.shape[1] - 1)
    entry = (rows.token_slots[0].out_cache_loc[:, None] // context.size).to(table.dtype)
    table.scatter_(1, at, torch.where(position % context.size == context.rank, entry, table.gather(1, at)))
    return mine


def own_table(
    token_slots: tuple[TokenSlots, ...], requests: torch.Tensor, context: Group, columns: int | None = None
) -> tuple[TokenSlots, ...]:
    """Returns the slots with a row table [R, ceil(context_len / size)] of this rank's tokens of the requests [R];
    `columns` limits its width."""
    table = token_slots[0].req_to_token[:, context.rank :: context.size]
    return with_own_table(token_slots, table[:, :columns][requests] // context.size)


def own_count(lens: torch.Tensor, context: Group) -> torch.Tensor:
    """Returns how many of the first `lens` positions this rank holds."""
    return torch.div(lens - context.rank + context.size - 1, context.size, rounding_mode="floor")


@dataclass(frozen=True, slots=True)
class Tokens:
    """Cached tokens of R requests, one request after the other. `bounds` [R + 1]: where each request begins; `rows`,
    `positions` [C] int64: each token's request and position."""

    bounds: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor

    @staticmethod
    def of(lens: Sequence[int], device: torch.device, begins: Sequence[int] = ()) -> Tokens:
        """Returns lens[i] tokens of each request, from position begins[i] on, else from 0. Lengths come from the host,
        so nothing waits for the device."""
        numbers = torch.tensor([[0, *lens], [*(begins or [0] * len(lens)), 0]], dtype=torch.int64)
        numbers[0] = numbers[0].cumsum(0)
        numbers[1] -= numbers[0]
        if device.type == "cuda":
            numbers = numbers.pin_memory()
        bounds, shifts = numbers.to(device, non_blocking=True)
        total, each = sum(lens), bounds.diff()
        rows = torch.repeat_interleave(torch.arange(len(lens), device=device), each, output_size=total)
        return Tokens(bounds, rows, torch.arange(total, device=device) + shifts[rows])


@dataclass(frozen=True, slots=True)
class GatheredTokens:
    """Tokens whose entries are gathered on every rank: `local` [N] int64, entries that this rank sends, and `index` [C]
    int64, where each token lies among all ranks' entries. Ranks with fewer tokens send padding."""

    context: Group
    local: torch.Tensor
    index: torch.Tensor

    @staticmethod
    def of(slots: torch.Tensor, positions: torch.Tensor, num_runs: int, context: Group) -> GatheredTokens:
        """Plans the gathering of tokens with `slots` [C] of the row table and `positions` [C]; the positions form at
        most `num_runs` consecutive runs."""
        size, count = context.size, len(slots)
        most = min(count, count // size + num_runs)
        owner = positions % size
        before = (owner[:, None] == torch.arange(size, device=owner.device)).cumsum(0)
        order = before.gather(1, owner[:, None])[:, 0] - 1
        local = torch.zeros(most + 1, dtype=torch.int64, device=slots.device)
        local[torch.where(owner == context.rank, order, most)] = torch.div(slots, size, rounding_mode="floor").long()
        return GatheredTokens(context, local[:most], owner * most + order)

    def entries(self, cache: torch.Tensor) -> torch.Tensor:
        """Gathers this rank's cache [entries, ...] into [size * N, ...], which `index` addresses."""
        stored = cache.view(torch.uint8) if cache.element_size() == 1 else cache
        return self.context.all_gather(stored[self.local], dim=0).view(cache.dtype)

    def store(self, cache: CacheStore) -> CacheStore:
        """Returns a cache with the gathered tokens' keys and values that replaces `cache` for one layer."""
        gathered = CacheStore(cache.layer_id, cache.name)
        gathered.k_scale, gathered.v_scale = cache.k_scale, cache.v_scale
        keys = self.entries(cache.k)
        of_keys = cache.v.data_ptr() == cache.k.data_ptr()
        values = keys[..., : cache.v.shape[-1]] if of_keys else self.entries(cache.v)
        gathered.bind({"k": keys, "v": values}, cache.table)
        return gathered


def with_own_table(token_slots: tuple[TokenSlots, ...], table: torch.Tensor) -> tuple[TokenSlots, ...]:
    """Returns the slots with `table` as the row table of DCP-sharded caches."""
    return (*token_slots[:-1], replace(token_slots[-1], req_to_token=table))
