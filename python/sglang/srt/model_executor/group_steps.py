"""What is known on every rank of the steps of all attention groups, where each has requests of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang.srt.mem_cache.kv_table import TableUpdate
from sglang.srt.model_executor.step import PromptTokens, StepInput
from sglang.srt.sampling.logprobs import LogprobRequest


@dataclass(frozen=True, slots=True)
class GroupSteps:
    """The steps that A groups compute together, one of each. A group without work has the step of `idle_step`, of which
    no row is sampled."""

    steps: tuple[StepInput, ...]
    idle: tuple[bool, ...]
    only_largest: bool
    """True if all that is wanted of every row of logits is its largest entry."""

    @classmethod
    def of(cls, steps: Sequence[StepInput | None], only_largest: bool = False) -> GroupSteps:
        """None: the group has no work."""
        only_largest = only_largest and not any(step is not None and step.logprobs is not None for step in steps)
        idle = tuple(step is None for step in steps)
        return cls(tuple(idle_step() if step is None else step for step in steps), idle, only_largest)

    @property
    def num_tokens(self) -> list[int]:
        """Rows of each group."""
        return [len(step.out_cache_loc) for step in self.steps]

    @property
    def num_sampled(self) -> list[int]:
        """Sampled rows of each group."""
        return [0 if idle else len(step.sampled_slots) for step, idle in zip(self.steps, self.idle, strict=True)]

    @property
    def num_decodes(self) -> int:
        """Most requests of a group that decode."""
        return max(step.num_decodes for step in self.steps)

    @property
    def num_prompts(self) -> int:
        """Most prompts of a group; 0 if no group has one."""
        return max(0 if step.prompts is None else len(step.prompts.extend_lens) for step in self.steps)

    @property
    def has_prompts(self) -> bool:
        return any(step.prompts is not None for step in self.steps)

    def padded_sampled(self, multiple: int) -> int:
        """Rows of logits of a group with padding: a multiple, and at least one row."""
        return -(-max(*self.num_sampled, 1) // multiple) * multiple

    @property
    def logprobs(self) -> LogprobRequest | None:
        """Returns what is asked of the sampled rows of all groups, one group behind the other."""
        if all(step.logprobs is None for step in self.steps):
            return None
        top_nums: list[int] = []
        token_ids: list[list[int]] = []
        for step, count in zip(self.steps, self.num_sampled, strict=True):
            asked = step.logprobs
            top_nums += [0] * count if asked is None else asked.top_nums
            token_ids += [[] for _ in range(count)] if asked is None else asked.token_ids
        return LogprobRequest(top_nums, token_ids)


def idle_step(update: TableUpdate | None = None) -> StepInput:
    """Returns the step of a group without work: the padding slot decodes."""
    return StepInput(np.zeros(1, np.int64), np.ones(1, np.int32), np.zeros(1, np.int32), table_update=update)


def no_prompts(idle: bool, num_decodes: int) -> PromptTokens:
    """Returns the prompts of a step that has none, for a graph with prompts."""
    empty = np.empty(0, np.int32)
    sampled = np.arange(0 if idle else num_decodes, dtype=np.int64)
    return PromptTokens(np.empty(0, np.int64), empty, empty, sampled)
