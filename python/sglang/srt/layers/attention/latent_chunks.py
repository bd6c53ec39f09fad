"""The cached prefixes of a step, cut into runs of equal size that latent attention expands one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.distributed.parallel_state import ALONE, Group
from sglang.srt.layers.attention.token_shares import GatheredTokens, Tokens


@dataclass(frozen=True, slots=True)
class LatentChunk:
    """`slots` [C] int64: cache slots of consecutive prefix tokens, sequence after sequence. The keys of sequence i are
    its rows key_start[i] to key_start[i + 1] (int32, [B + 1]); none for a sequence that lies in other chunks. `shared`:
    where ranks share out the tokens. `key_start_cpu`: the same numbers on the host."""

    slots: torch.Tensor
    key_start: torch.Tensor
    shared: GatheredTokens | None = None
    key_start_cpu: tuple[int, ...] = ()

    def of(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a cache with the entries of the tokens, and where they lie in it [C] int64."""
        return (cache, self.slots) if self.shared is None else (self.shared.entries(cache), self.shared.index)


def cut_prefixes(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: Sequence[int],
    chunk_tokens: int,
    context: Group = ALONE,
) -> tuple[LatentChunk, ...]:
    """Cuts the cached prefixes, the first prefix_lens[i] tokens of each request (rows req_pool_indices [B] of
    req_to_token), into chunks of at most `chunk_tokens`. The lengths come from the host, so nothing waits for the
    device. `context`: the ranks that share out the tokens.

    Example: prefixes of 5 and 3 tokens in chunks of 4 -> key_start [0, 4, 4], then [0, 1, 4].
    """
    total = sum(prefix_lens)
    if total == 0:
        return ()
    tokens = Tokens.first(prefix_lens, req_to_token.device)
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
