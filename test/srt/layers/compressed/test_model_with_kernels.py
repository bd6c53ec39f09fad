"""Tiny models of DeepSeek-V4 whose layers run the Triton kernels: they compute what the torch kernels do, also for
prompts in parts, padding, and draft tokens that are taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import interpreter
import pytest
import torch

from sglang.srt.blocks.compressed import reference as native
from sglang.srt.blocks.compressed.compressor_kernels import CompressorKernels
from sglang.srt.blocks.compressed.kernels import compressor, tail_rotation
from sglang.srt.model_executor.graph_runner import GraphSizes
from srt.layers.kernels_in_models import assert_as_with_torch
from srt.model_executor import test_compressed_steps as steps
from srt.model_executor.graph_stand_ins import in_graphs
from srt.model_executor.known_texts import KnownTexts, verifying_scheduler
from srt.models.harness import random_tokens, save_tiny

KERNELS = {
    "kv_compressor": compressor.KV_COMPRESSOR,
    "shared_kv_norm_rope_store": tail_rotation.shared_kv_norm_rope_store,
    "tail_rotation": tail_rotation.tail_rotation,
}
"""All but hyper-connections, which are for bfloat16: tiny models are exact in fp32."""


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="interpreted: test_in_interpreter")
@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v4_small"])
def test_kernels_in_a_model(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    assert_as_with_torch(tmp_path, KERNELS, random_tokens(50, seed=1), random_tokens(9, seed=2), (29, 42))


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="interpreted: test_in_interpreter")
def test_kernels_in_graphs_with_draft_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of prompts, of decoding and of draft tokens, all as graphs have them: with rows of padding. Every third
    guess is wrong, and the tokens are those of plain torch without draft tokens and graphs."""
    save_tiny("deepseek_v4_small", tmp_path)
    args = steps.server_args(tmp_path)
    want = steps.run(steps.plain(args), steps.prompts())
    calls: list[int] = []

    def counted(rows: torch.Tensor, *more: Any, **options: Any) -> None:
        calls.append(len(rows))
        compressor.compress(rows, *more, **options)

    monkeypatch.setattr(native, "KV_COMPRESSOR", CompressorKernels(counted, compressor.keep))
    monkeypatch.setattr(native, "shared_kv_norm_rope_store", tail_rotation.shared_kv_norm_rope_store)
    monkeypatch.setattr(native, "tail_rotation", tail_rotation.tail_rotation)
    outputs = {tuple(ids): tokens for ids, tokens in zip(steps.prompts(), want, strict=True)}
    scheduler = verifying_scheduler(args, KnownTexts(4, 3), outputs)
    with in_graphs(scheduler.runner, GraphSizes((1, 4), (16,), (0, 4))) as replays:
        assert steps.run(scheduler, steps.prompts()) == want
    assert {step.prompts is None for step in replays} == {True, False} and calls


@pytest.mark.thorough
def test_in_interpreter() -> None:
    interpreter.run_file(__file__, interpreter.EVERY_CASE)
