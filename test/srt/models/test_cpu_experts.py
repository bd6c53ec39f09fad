"""Models some of whose experts CPUs compute give the logits of resident ones, but for rounding to bfloat16."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from sglang.srt.hardware.cpu_cores import ThreadPlaces
from sglang.srt.layers import parameter
from sglang.srt.layers.moe.cpu_experts import shared
from sglang.srt.mem_cache.node_memory import RowNodes
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


def test_rows_on_two_nodes_give_the_same_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bank and threads of a machine with two nodes, which this one is not."""
    save_tiny("qwen3_moe", tmp_path)
    model = plan_for(tmp_path, dtype="bfloat16").model
    few = offloaded(tmp_path, 2, 1)
    placed: list[RowNodes] = []
    make = parameter.map_on_nodes

    def remember(shape: tuple[int, ...], dtype: torch.dtype, nodes: RowNodes) -> torch.Tensor:
        placed.append(nodes)
        return make(shape, dtype, nodes)

    monkeypatch.setattr(parameter, "map_on_nodes", remember)
    logits = []
    for places in (ThreadPlaces((-1, -1)), ThreadPlaces((-1, -1), (0, 1), (0, 1))):
        monkeypatch.setattr(shared, "place_beside_others", lambda threads, places=places: places)
        logits.append(played(WithCpus(model, kv_cache_dtype=few.kv_cache_dtype, counts=few.counts), 1))
    assert all(torch.equal(*pair) for pair in zip(*logits, strict=True))
    assert {(nodes.nodes, nodes.parts) for nodes in placed} == {((), 2), ((), 1), ((0, 1), 2), ((0, 1), 1)}
