"""What fits in a rank's memory, and what that rests on. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.plan.caches import CacheGroup
from sglang.srt.plan.kernel_choice import KernelChoices
from sglang.srt.plan.layer_spec import Serving
from sglang.srt.plan.memory import MemoryPlan, Sizes
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.pool_sizes import WindowSize
from sglang.srt.plan.rank_weights import RankWeights
from sglang.srt.plan.stages import Stage


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits in a rank's memory. With several stages `groups` and `memory` are those of a rank that has the most of
    everything that some stage has: all have as many tokens."""

    sizes: Sizes
    groups: tuple[CacheGroup, ...]
    stages: tuple[Stage, ...]
    memory: MemoryPlan
    max_total_num_tokens: int
    windows: tuple[WindowSize, ...]  # page 0 of a pool is padding, and is not counted
    chunk: int  # -1: whole prompts
    states: str
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Trial:
    """What a plan rests on: with the flags that were given, or with others that advice might name."""

    of_rank: RankWeights
    serving: Serving
    chosen: KernelChoices
    capacity: Capacity

    @property
    def description(self) -> ModelDescription:
        return self.of_rank.model
