"""Results of planning for one rank: what fits in its memory, and the decisions that this depends on. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.plan.adapters import AdapterPlan
from sglang.srt.plan.caches import CacheGroup
from sglang.srt.plan.draft_plan import DraftPlan
from sglang.srt.plan.expert_slot_plan import ExpertSlotPlan
from sglang.srt.plan.kernel_choice import KernelChoices
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.memory import MemoryPlan
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.pool_sizes import WindowSize
from sglang.srt.plan.rank_weights import RankWeights
from sglang.srt.plan.sizes import Sizes
from sglang.srt.plan.stages import Stage


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes of everything that fits in a rank's memory. With several pipeline stages `groups` and `memory` are
    those of a rank that has the most of what any stage has; all stages have pools of equally many tokens."""

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
    """The inputs and the outcome of planning with one set of flags: the user's, or others that advice may name."""

    of_rank: RankWeights
    parallel: ParallelConfig
    chosen: KernelChoices
    capacity: Capacity
    draft: DraftPlan | None = None
    expert_slots: ExpertSlotPlan | None = None
    """The experts in main memory; None: they are in GPU memory."""

    adapters: AdapterPlan | None = None

    @property
    def description(self) -> ModelDescription:
        return self.of_rank.model


def describe_capacity(capacity: Capacity) -> dict[str, Any]:
    """Returns the capacity in the form in which `Plan.describe` reports it."""
    sizes = capacity.sizes
    return {
        "max_total_num_tokens": capacity.max_total_num_tokens,
        **describe_pools(capacity.windows, sizes.checkpoints, capacity.states),
        "tokens_per_step": sizes.tokens_per_step,
        "max_running_requests": sizes.max_running_requests,
        "context_len": sizes.context_len,
        "page_size": sizes.page_size,
        "cuda_graph_bs": list(sizes.graph_batch_sizes),
        "cuda_graph_prefill_tokens": list(sizes.prefill_graph_tokens),
        "memory": capacity.memory.describe(),
    }


def describe_pools(windows: Sequence[WindowSize], checkpoints: int, states: str) -> dict[str, Any]:
    """Describes the pools: tokens of each window's pool, and where there are states the checkpoints, and why that
    many."""
    pools: dict[str, Any] = {}
    if windows:
        pools["window_tokens"] = {str(size.window): size.tokens for size in windows}
    if states:
        pools |= {"state_checkpoints": checkpoints, "states": states}
    return pools
