"""Two-batch overlap: steps with many prompt tokens run as two microbatches, so that the all-reduces of one travel while
the other computes (`distributed/ping_pong`).

Each microbatch is a step of its own. The second continues where the first ends, as the next chunk of a chunked prefill
does; decoding requests are in the first. A prompt is cut only if no prompt ends near the middle of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from sglang.srt.distributed.groups import Groups
from sglang.srt.distributed.ping_pong import CpuSideStream, CudaSideStream, PingPong, SideStream
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.row_exchange import RowExchange
from sglang.srt.mem_cache.layerwise_load import LayerWaits
from sglang.srt.model_executor.device_state import DeviceState, shape_of
from sglang.srt.model_executor.step import GroupSteps, PromptTokens, StepInput, step_arrays
from sglang.srt.plan.plan import Plan
from sglang.srt.utils.device_arrays import send

ALIGNMENT = 64
"""A prompt is cut at a multiple of this position, if it is long enough, so that tiles and quantization groups of tokens
stay whole."""
OFF_MIDDLE = 32
"""A step is cut at the end of a prompt that lies at most 1/32 of the step's tokens from its middle. Unequal
microbatches cost time: if all-reduces take as long as computing, a cut at 3/8 takes a fifth longer than one at 1/2,
because the shorter microbatch finishes before the all-reduce of the longer one."""


Microbatches = tuple[StepInput, StepInput]


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a step is cut: the first `prompts` prompts and the first `tokens` tokens of the next one are in the first
    microbatch."""

    prompts: int
    tokens: int


def choose_cut(step: StepInput) -> Cut | None:
    """Returns where to cut the step; None if it has images, no prompts, or fewer than two prompt tokens."""
    prompts = step.prompts
    if prompts is None or prompts.media is not None:
        return None
    total = len(step.out_cache_loc)
    ends = step.num_decodes + np.cumsum(prompts.extend_lens)
    if total - step.num_decodes < 2:
        return None
    middle = max(total // 2, step.num_decodes + 1)
    nearest = int(np.argmin(np.abs(ends[:-1] - middle))) if len(ends) > 1 else -1
    if nearest >= 0 and abs(int(ends[nearest]) - middle) * OFF_MIDDLE <= total:
        return Cut(nearest + 1, 0)
    cut = int(np.searchsorted(ends, middle, side="right"))
    begin = int(ends[cut] - prompts.extend_lens[cut])
    tokens = middle - begin
    position = int(prompts.prefix_lens[cut]) + tokens
    aligned = tokens - position % ALIGNMENT
    return Cut(cut, aligned if aligned > 0 else tokens)


def cut_groups(steps: GroupSteps) -> tuple[GroupSteps, GroupSteps] | None:
    """Returns the two microbatches of all attention groups' steps; None if they cannot be cut. A group whose own step
    cannot be cut computes it in the first microbatch and has no work in the second."""
    if steps.has_media or any(step.widths is not None for step in steps.steps):
        return None
    first: list[StepInput | None] = []
    second: list[StepInput | None] = []
    for step, idle in zip(steps.steps, steps.idle, strict=True):
        cut = None if idle else choose_cut(step)
        one, other = (None if idle else step, None) if cut is None else cut_step(step, cut)
        first.append(one)
        second.append(other)
    return None if not any(second) else (GroupSteps.of(first), GroupSteps.of(second))


def cut_step(step: StepInput, cut: Cut) -> Microbatches:
    """Returns the two microbatches. They carry no sampling: the whole step is sampled after both."""
    prompts, count = step.prompts, step.num_decodes
    assert prompts is not None
    lens, prefixes = prompts.extend_lens, prompts.prefix_lens
    through = cut.prompts + (cut.tokens > 0)
    num_first = int(lens[: cut.prompts].sum()) + cut.tokens
    first_lens, first_seq_lens = lens[:through].copy(), step.seq_lens[: count + through].copy()
    second_lens, second_prefixes = lens[cut.prompts :].copy(), prefixes[cut.prompts :].copy()
    if cut.tokens:
        first_lens[-1] = cut.tokens
        first_seq_lens[-1] = prefixes[cut.prompts] + cut.tokens
        second_lens[0] -= cut.tokens
        second_prefixes[0] += cut.tokens
    none = np.empty(0, np.int64)
    first = StepInput(
        step.slots[: count + through],
        first_seq_lens,
        step.out_cache_loc[: count + num_first],
        PromptTokens(prompts.input_ids[:num_first], prefixes[:through], first_lens, none),
    )
    second = StepInput(
        step.slots[count + cut.prompts :],
        step.seq_lens[count + cut.prompts :],
        step.out_cache_loc[count + num_first :],
        PromptTokens(prompts.input_ids[num_first:], second_prefixes, second_lens, none),
    )
    return first, second


class TwoBatchOverlap:
    """Decides which steps run as two microbatches, cuts and computes them."""

    def __init__(self, state: DeviceState, groups: Groups, min_tokens: int | None, exact: bool = False) -> None:
        """min_tokens: steps with fewer tokens run as one; None: all do. exact: all-reduces of microbatches are never
        quantized."""
        on_gpu = torch.device(state.device).type == "cuda"
        side_stream: SideStream = CudaSideStream(state.device) if on_gpu else CpuSideStream()
        self.state, self.groups = state, groups
        self.min_tokens = min_tokens
        """None: no step is cut."""
        self.ping_pong = PingPong(side_stream)
        self.ping_pong.exact = exact
        for group in groups.layer_groups:
            group.alternate_in(self.ping_pong)

    @classmethod
    def from_plan(cls, plan: Plan, state: DeviceState, groups: Groups) -> TwoBatchOverlap | None:
        """Returns the plan's two-batch overlap; None if it has none."""
        rule = plan.two_batch_overlap
        return None if rule is None else cls(state, groups, rule.min_tokens, rule.exact)

    def split_step(self, step: StepInput) -> Microbatches | None:
        """Returns the two microbatches of a step; None if it runs as one. All ranks decide alike."""
        num_tokens = len(step.out_cache_loc) if step.groups is None else sum(step.groups.num_tokens)
        if self.min_tokens is None or num_tokens < self.min_tokens:
            return None
        if step.groups is None:
            cut = choose_cut(step)
            return None if cut is None else cut_step(step, cut)
        groups = cut_groups(step.groups)
        if groups is None:
            return None
        first, second = (replace(microbatch.steps[self.groups.dp.rank], groups=microbatch) for microbatch in groups)
        return first, second

    @contextmanager
    def with_min_tokens(self, minimum: int | None) -> Iterator[None]:
        """Cuts steps of at least `minimum` tokens inside the block; None: no step is cut."""
        before, self.min_tokens = self.min_tokens, minimum
        try:
            yield
        finally:
            self.min_tokens = before

    def compute(self, batch: ForwardBatch, microbatches: Microbatches, loads: LayerWaits | None) -> torch.Tensor:
        """Returns the model's final hidden states [T, H] of `batch`. loads: layerwise loads of the whole step, which
        the first microbatch waits for at each layer."""
        first, second = (self._batch(microbatch, loads) for microbatch in microbatches)
        return self.state.model.forward_microbatches(batch, (first, second), self.ping_pong)

    def _batch(self, microbatch: StepInput, loads: LayerWaits | None) -> ForwardBatch:
        arrays = send(self.state.device, **step_arrays(microbatch))
        shape = shape_of(microbatch, self.state.has_adapters(microbatch))
        batch = self.state.batch(arrays, shape, microbatch)
        batch.loads = loads
        if microbatch.groups is not None:
            batch.exchange = RowExchange.of_step(self.groups, microbatch.groups.num_tokens, self.state.device)
        return batch
