"""The cached prefixes of a step, cut into runs of equal size that latent attention expands one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LatentChunk:
    """`slots` [C] int64: cache slots of consecutive prefix tokens, sequence after sequence. The keys of sequence i are
    its rows key_start[i] to key_start[i + 1] (int32, [B + 1]); none for a sequence that lies in other chunks."""

    slots: torch.Tensor
    key_start: torch.Tensor


def cut_prefixes(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, prefix_lens: Sequence[int], chunk_tokens: int
) -> tuple[LatentChunk, ...]:
    """Cuts the cached prefixes, the first prefix_lens[i] tokens of each request (rows req_pool_indices [B] of
    req_to_token), into chunks of at most `chunk_tokens`. The lengths come from the host, so nothing waits for the
    device.

    Example: prefixes of 5 and 3 tokens in chunks of 4 -> key_start [0, 4, 4], then [0, 1, 4].
    """
    device = req_to_token.device
    ends = [0]
    for length in prefix_lens:
        ends.append(ends[-1] + length)
    total = ends[-1]
    if total == 0:
        return ()
    bounds = torch.tensor(ends, dtype=torch.int64)
    if device.type == "cuda":
        bounds = bounds.pin_memory()
    bounds = bounds.to(device, non_blocking=True)
    lens = bounds.diff()
    rows = torch.repeat_interleave(req_pool_indices, lens, output_size=total)
    first = torch.repeat_interleave(bounds[:-1], lens, output_size=total)
    slots = req_to_token[rows, torch.arange(total, device=device) - first].long()
    return tuple(
        LatentChunk(
            slots[begin : begin + chunk_tokens], (bounds - begin).clamp(0, min(chunk_tokens, total - begin)).int()
        )
        for begin in range(0, total, chunk_tokens)
    )
