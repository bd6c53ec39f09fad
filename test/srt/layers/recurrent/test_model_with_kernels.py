"""Tiny models with a recurrent state, whose layers run the Triton kernels on slices of products: they compute what the
torch kernels do."""

from __future__ import annotations

from pathlib import Path

import interpreter
import pytest

from sglang.srt.blocks.kimi_delta.kernels import channel_recurrence
from sglang.srt.blocks.recurrent_state.kernels import causal_conv, gated_norm, recurrence
from srt.layers.kernels_in_models import assert_as_with_torch
from srt.models.harness import random_tokens, save_tiny

KERNELS = {
    "causal_conv1d": causal_conv.CAUSAL_CONV,
    "gated_delta_rule": recurrence.RECURRENCE,
    "kimi_delta_rule": channel_recurrence.CHANNEL_RECURRENCE,
    "state_space_duality": recurrence.RECURRENCE,
    "gated_rmsnorm": gated_norm.gated_rmsnorm,
    "attention_output_gate": gated_norm.attention_output_gate,
}


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="interpreted: test_in_interpreter")
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "nemotron_h", "nemotron_h_latent", "kimi_linear"])
def test_kernels_in_a_model(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    assert_as_with_torch(tmp_path, KERNELS, random_tokens(76, seed=1), random_tokens(9, seed=2), (70, 75))


@pytest.mark.thorough
def test_in_interpreter() -> None:
    interpreter.run_file(__file__, interpreter.EVERY_CASE)
