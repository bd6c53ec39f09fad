"""A tiny MiniMax-M3 whose block-sparse layers run the Triton kernels: it computes what the torch kernels do, for
prompts in parts and decoded tokens that see more than is chosen, and for others that do not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import interpreter
import pytest
import torch

from sglang.srt.kernels.bands import ANY, Band
from sglang.srt.layers.attention.block_groups import TritonBlockAttention, TritonBlockIndexer
from sglang.srt.layers.triton_ops import rope_store
from srt.layers.attention.test_block_kernels import NUM_SMS, tiles_of
from srt.models.harness import NativePlan, TinyRunner, plan_for, random_tokens, save_tiny


def block_indexer(plan: NativePlan) -> TritonBlockIndexer:
    (tile, *_) = tiles_of("block_indexer")
    ladder = SimpleNamespace(run=lambda launch: launch(tile))
    return TritonBlockIndexer(SimpleNamespace(ladder=lambda op: ladder, arch=SimpleNamespace(num_sms=NUM_SMS)))


def block_attention(plan: NativePlan) -> TritonBlockAttention:
    bands = (Band(ANY, "tiles", tuple((tile,) for tile in tiles_of("block_attention")), "kernels/tiles.py"),)
    return TritonBlockAttention(SimpleNamespace(tiles=lambda op: bands, arch=SimpleNamespace(num_sms=NUM_SMS)))


KERNELS = {
    "block_indexer": block_indexer,
    "block_attention": block_attention,
    "qk_norm_rope_store": rope_store.qk_norm_rope_store,
}


@dataclass(frozen=True)
class KernelPlan(NativePlan):
    def entry(self, op: str) -> Any:
        return KERNELS[op] if op in KERNELS else super().entry(op)


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="interpreted: test_in_interpreter")
def test_kernels_in_a_model(tmp_path: Path) -> None:
    save_tiny("minimax_m3_wide", tmp_path)
    native = plan_for(tmp_path)
    runners = [TinyRunner(native), TinyRunner(KernelPlan(native.model, kv_cache_dtype=native.kv_cache_dtype))]
    tokens, other = random_tokens(110, seed=1), random_tokens(9, seed=2)
    results = []
    for runner in runners:
        parts = [*runner.extend({3: tokens[:70], 1: other[:4]}), *runner.extend({1: other[4:], 3: tokens[70:104]})]
        parts += [runner.decode({3: token, 1: 6}) for token in tokens[104:]]
        results.append(torch.cat(parts))
    torch.testing.assert_close(results[1], results[0], rtol=0.0, atol=1e-3)


@pytest.mark.thorough
def test_in_interpreter() -> None:
    interpreter.run_file(__file__)
