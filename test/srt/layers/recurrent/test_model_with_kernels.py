"""Tiny models with a recurrent state, whose layers run the Triton kernels on slices of products: they compute what the
torch kernels do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import interpreter
import pytest
import torch

from sglang.srt.layers.recurrent.triton_ops import causal_conv, channel_recurrence, gated_norm, recurrence
from srt.models.harness import NativePlan, TinyRunner, plan_for, random_tokens, save_tiny

KERNELS = {
    "causal_conv1d": causal_conv.CAUSAL_CONV,
    "gated_delta_rule": recurrence.RECURRENCE,
    "kimi_delta_rule": channel_recurrence.CHANNEL_RECURRENCE,
    "state_space_duality": recurrence.RECURRENCE,
    "gated_rmsnorm": gated_norm.gated_rmsnorm,
    "attention_output_gate": gated_norm.attention_output_gate,
}


@dataclass(frozen=True)
class KernelPlan(NativePlan):
    def entry(self, op: str) -> Any:
        return KERNELS[op] if op in KERNELS else super().entry(op)


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="interpreted: test_in_interpreter")
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "nemotron_h", "nemotron_h_latent", "kimi_linear"])
def test_kernels_in_a_model(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    native = plan_for(tmp_path)
    runners = [TinyRunner(native), TinyRunner(KernelPlan(native.model, kv_cache_dtype=native.kv_cache_dtype))]
    tokens, other = random_tokens(75, seed=1), random_tokens(9, seed=2)
    results = []
    for runner in runners:
        first = runner.extend({3: tokens[:70], 1: other[:4]})
        second = runner.extend({1: other[4:], 3: tokens[70:]})
        third = runner.decode({3: 5, 1: 6})
        results.append(torch.cat([*first, *second, third]))
    torch.testing.assert_close(results[1], results[0], rtol=0.0, atol=1e-3)


@pytest.mark.thorough
def test_in_interpreter() -> None:
    interpreter.run_file(__file__)
