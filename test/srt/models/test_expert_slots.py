"""Models whose experts lie in main memory give the logits of resident ones, in any number of slots.

A CPU adds up a token's experts wave by wave, so that logits of steps in waves differ in rounding; the kernels of GPUs
add them up in the order in which they were chosen (`layers/moe/test_expert_slots.py`)."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from matrix import KINDS, kinds
from pairs import some

from sglang.srt.layers.moe.expert_buffers import tensors_of
from sglang.srt.plan.expert_slot_plan import SlotCounts
from sglang.srt.plan.expert_slots import with_slots
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.rank_weights import rank_weights
from sglang.srt.plan.ranks import ONE_RANK
from sglang.srt.plan.weights import expert_bytes, rank_weight_bytes

from .harness import NativePlan, TinyRunner, plan_for, random_tokens, save_tiny

NAMES = sorted({KINDS[name].tiny for name in kinds("experts")} - {""})
QUICK = {"qwen3_moe", "gpt_oss", "deepseek_v3", "gemma4_moe"}


@dataclass(frozen=True)
class OffloadedPlan(NativePlan):
    counts: SlotCounts | None = None

    @functools.cached_property
    def description(self) -> ModelDescription:
        return with_slots(NativePlan.description.func(self), self.counts)


def offloaded(folder: Path, slots: int, buffered: int) -> OffloadedPlan:
    plan = plan_for(folder)
    return OffloadedPlan(plan.model, kv_cache_dtype=plan.kv_cache_dtype, counts=SlotCounts(slots, buffered))


def played(plan: NativePlan, schedule: int) -> list[torch.Tensor]:
    """The logits of a random schedule of prompts, chunks and batches that decode."""
    choose, runner, logits = random.Random(schedule), TinyRunner(plan), []
    running: list[int] = []
    for slot in range(1, 5):
        tokens = random_tokens(choose.randint(1, 24), slot)
        cut = choose.randint(1, len(tokens))
        for part in filter(None, (tokens[:cut], tokens[cut:])):
            logits += runner.extend({slot: part})
        running.append(slot)
        for _ in range(choose.randint(1, 4)):
            some = choose.sample(running, choose.randint(1, len(running)))
            logits.append(runner.decode({slot: choose.randrange(250) for slot in some}))
    return logits


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_slots_and_buffers_take_what_is_planned(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    for slots, buffered in ((2, 4), (3, 1)):
        plan = offloaded(tmp_path, slots, buffered)
        buffers = TinyRunner(plan).model.expert_buffers
        assert buffers is not None
        tensors = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for layer in buffers.layers
            for tensor in tensors_of(layer.weights[0])
        }
        resident = plan_for(tmp_path).description
        sizes = [rank_weight_bytes(rank_weights(each, ONE_RANK), plan.dtype) for each in (plan.description, resident)]
        experts = sum(expert_bytes(rank_weights(plan.description, ONE_RANK), plan.dtype))
        assert sum(tensors.values()) == sizes[0] - (sizes[1] - experts)


@pytest.mark.parametrize("name", some(NAMES, QUICK))
def test_logits_are_those_of_the_resident_model(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    resident = plan_for(tmp_path)
    experts = resident.description.experts
    assert experts is not None
    want = played(resident, 1)
    num_experts, fewest = experts.num_experts + experts.fused_shared, experts.top_k + experts.fused_shared
    for slots in range(fewest, num_experts):
        buffered = num_experts if slots % 2 else 1  # all of a step at once, or in waves
        got = played(offloaded(tmp_path, slots, buffered), 1)
        for one, other in zip(got, want, strict=True):
            rounding = 2e-6 if buffered == 1 else 0.0
            torch.testing.assert_close(one, other, rtol=0.0, atol=rounding, msg=f"{slots} slots: {one - other}")
            assert torch.equal(one.argmax(-1), other.argmax(-1))
