"""Models some of whose experts CPUs compute give the logits of resident ones, but for rounding to bfloat16."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.plan.cpu_experts import with_cpus
from sglang.srt.plan.model_description import ModelDescription

from .harness import NativePlan, TinyRunner, plan_for, save_tiny
from .test_expert_slots import OffloadedPlan, offloaded, played

BOUND = 2e-2
"""Of the median difference's norm, as a part of the logits'. In some rows rounding changes the choice of experts."""


class WithCpus(OffloadedPlan):
    @functools.cached_property
    def description(self) -> ModelDescription:
        return with_cpus(OffloadedPlan.description.func(self), 2)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_logits_are_those_of_the_resident_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain experts; biases and clamps; a shared expert among the routed ones' sums."""
    models: list[CausalLM] = []
    init = TinyRunner.__init__

    def remember(runner: TinyRunner, plan: NativePlan) -> None:
        init(runner, plan)
        models.append(runner.model)

    monkeypatch.setattr(TinyRunner, "__init__", remember)
    save_tiny(name, tmp_path)
    resident = plan_for(tmp_path, dtype="bfloat16")
    experts = resident.description.experts
    assert experts is not None
    want = played(resident, 1)
    few = offloaded(tmp_path, experts.top_k + experts.fused_shared, 1)
    plan = WithCpus(resident.model, kv_cache_dtype=resident.kv_cache_dtype, counts=few.counts)
    got = played(plan, 1)
    errors = torch.cat([(one - other).norm(dim=-1) / other.norm(dim=-1) for one, other in zip(got, want, strict=True)])
    assert float(errors.median()) < BOUND, errors
    without, with_some = (model.cpu_experts for model in models)
    assert without is not None and without.totals() is None
    assert with_some is not None and (done := with_some.totals()) is not None
    assert done.steps > 10 and done.experts > done.steps and done.num_bytes
    torch.testing.assert_close(with_some.gpu_share, 0.25)
