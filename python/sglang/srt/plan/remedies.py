"""What to advise where a model does not fit. No torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from sglang.srt.plan.layer_spec import Serving
from sglang.srt.plan.layout import next_layout
from sglang.srt.plan.rank_weights import RankWeights, rank_weights
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.stages import cut_stages
from sglang.srt.plan.weights import wide_bytes

LEAST_CACHE_SHARE = 0.1
"""Of the memory for weights and caches, that a layout which is advised leaves to caches."""


@dataclass(frozen=True, slots=True)
class Remedies:
    """`wide`: what a quantized checkpoint keeps in 16 bits (`wide_bytes`); `more_ranks`: the next layout of ranks that
    have at most so many bytes of weights each."""

    wide: Mapping[str, int]
    more_ranks: Callable[[int], RankLayout | None]

    def layout(self, room: int) -> RankLayout | None:
        """One that works with so many bytes for the weights and caches of a rank."""
        return self.more_ranks(int(room * (1 - LEAST_CACHE_SHARE)))


def remedies_of(of_rank: RankWeights, serving: Serving, fp8_cache: bool, features: Collection[str] | None) -> Remedies:
    """`fp8_cache`, `features`: as of `rank_weight_bytes`."""

    @functools.cache
    def weights(layout: RankLayout) -> int:
        other = rank_weights(of_rank.model, layout)
        return max(stage.weight_bytes for stage in cut_stages(other, serving.dtype, fp8_cache, features))

    def more_ranks(limit: int) -> RankLayout | None:
        return next_layout(of_rank.model, serving.ranks, lambda layout: weights(layout) <= limit)

    return Remedies(wide_bytes(of_rank, serving.dtype), more_ranks)
