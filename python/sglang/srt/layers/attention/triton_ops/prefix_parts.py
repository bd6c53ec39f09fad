"""Splitting of cached prefixes between programs, for short prompts that have too few blocks of queries to fill the GPU:
the number of parts, and the buffers of their partial results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton

WHOLE = ((80, 80), (96, 96))
"""Head dims (keys, values) whose prefixes are not split, because their tile has no registers left for it."""
MAX_PARTS = 16
MIN_PART = 4096
"""Smallest part in tokens: writing and reading its partial result is then below 1% of the keys and values it reads."""
MIN_GAIN = 1.1
"""Smallest predicted gain for which a prefix is split, because merging costs a launch."""
PART_BYTES = 32 << 20
"""Most bytes of a step's partial results. Only steps with few tokens have any, and their other activations are smaller
than the largest step's, for which the plan leaves room, by more than that."""


def count_parts(
    new_lens: Sequence[int],
    prefix_lens: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    v_head_dim: int,
    num_sms: int,
    tile: Mapping[str, int],
) -> int:
    """Returns the number of parts of each prefix: the fewest that bring the longest program's time within 5% of the
    minimum, or 1 if that gains little. Lengths are the host's."""
    group = num_heads // num_kv_heads
    blocks = sum(triton.cdiv(new * group, tile["BLOCK_M"]) for new in new_lens) * num_kv_heads
    slots = num_sms * max(1, 8 // tile["num_warps"])
    row_bytes = sum(new_lens) * num_heads * (v_head_dim + 1) * 4
    most = min(MAX_PARTS, max(prefix_lens, default=0) // MIN_PART, PART_BYTES // max(1, row_bytes))
    times = [triton.cdiv(blocks * parts, slots) / parts for parts in range(1, most + 1)]
    if len(times) < 2 or times[0] < MIN_GAIN * min(times):
        return 1
    return 1 + next(i for i, time in enumerate(times) if time <= 1.05 * min(times))


@dataclass(frozen=True, slots=True)
class PrefixParts:
    """Partial results of one step; all layers of a shape fill the same buffers."""

    count: int
    pieces: torch.Tensor  # [T, 2] int32: first part of each token's, and how many there are; 1 where nothing is merged
    part_o: torch.Tensor  # [T * count, Hq, Dv] fp32
    part_lse: torch.Tensor  # [T * count, Hq] fp32, base 2

    @classmethod
    def allocate(
        cls, count: int, num_tokens: int, first_token: torch.Tensor, num_heads: int, v_head_dim: int
    ) -> PrefixParts:
        """Allocates buffers for `count` parts. first_token [1] int32: tokens before it are not in prompts and not
        merged."""
        token = torch.arange(num_tokens, dtype=torch.int32, device=first_token.device)
        pieces = torch.stack((token * count, torch.where(token >= first_token, count, 1).to(torch.int32)), dim=1)
        rows, options = num_tokens * count, {"dtype": torch.float32, "device": first_token.device}
        part_o = torch.empty((rows, num_heads, v_head_dim), **options)  # type: ignore[call-overload]
        return cls(count, pieces, part_o, torch.empty((rows, num_heads), **options))  # type: ignore[call-overload]
