"""The cached prefixes of a step, cut into chunks of equal size that latent attention expands one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.distributed.groups import ALONE, Group
from sglang.srt.layers.attention.token_shares import GatheredTokens, Tokens


@dataclass(frozen=True, slots=True)
class LatentChunk:
    """A chunk of cached prefix tokens. `slots` [C] int64: their cache slots, sequence after sequence. Sequence i has
    rows key_start[i] to key_start[i + 1] (int32, [B + 1]), none if it lies in other chunks; `key_start_cpu`: the same
    numbers on the host. `shared`: how to gather the tokens with DCP."""

    slots: torch.Tensor
    key_start: torch.Tensor
    shared: GatheredTokens | None = None
    key_start_cpu: tuple[int, ...] = ()

    def of(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a cache that holds the chunk's entries, and their slots [C] int64 in it."""
        return (cache, self.slots) if self.shared is None else (self.shared.entries(cache), self.shared.index)


def cut_prefixes(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: Sequence[int],
    chunk_tokens: int,
    context: Group = ALONE,
    begins: Sequence[int] = (),
) -> tuple[LatentChunk, ...]:
    """Cuts the cached prefixes, prefix_lens[i] tokens of each request (rows req_pool_indices [B] of req_to_token) from
    position begins[i] on, else from 0, into chunks of at most `chunk_tokens`. The lengths come from the host, so
    nothing waits for the device. `context`: the DCP ranks that shard the tokens.

    Example: prefixes of 5 and 3 tokens in chunks of 4 -> key_start [0, 4, 4], then [0, 1, 4].
    """
    total = sum(prefix_lens)
    if total == 0:
        return ()
    tokens = Tokens.of(prefix_lens, req_to_token.device, begins)
    slots = req_to_token[req_pool_indices[tokens.rows], tokens.positions].long()
    bounds = (0, *itertools.accumulate(prefix_lens))

    def chunk(begin: int) -> LatentChunk:
        run = slice(begin, min(begin + chunk_tokens, total))
        starts = (tokens.bounds - begin).clamp(0, run.stop - begin).int()
        known = tuple(min(max(bound - begin, 0), run.stop - begin) for bound in bounds)
        if context.size == 1:
            return LatentChunk(slots[run], starts, None, known)
        gathered = GatheredTokens.of(slots[run], tokens.positions[run], len(prefix_lens), context)
        return LatentChunk(slots[run], starts, gathered, known)

    return tuple(chunk(begin) for begin in range(0, total, chunk_tokens))
