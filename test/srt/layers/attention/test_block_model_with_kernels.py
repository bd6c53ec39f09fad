"""A tiny MiniMax-M3 whose block-sparse layers run the Triton kernels: it computes what the torch kernels do, for
prompts in parts and decoded tokens that see more than is chosen, and for others that do not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import interpreter
import pytest

from sglang.srt.blocks.block_selection.indexer import TritonBlockIndexer
from sglang.srt.kernels.tile_configs import ANY, TileConfig
from sglang.srt.layers.attention.block_attention import TritonBlockAttention
from sglang.srt.layers.triton_ops import rope_store
from srt.layers.attention.test_block_kernels import NUM_SMS, tiles_of
from srt.layers.kernels_in_models import assert_as_with_torch
from srt.models.harness import random_tokens, save_tiny


def block_indexer() -> TritonBlockIndexer:
    (tile, *_) = tiles_of("block_indexer")
    fallbacks = SimpleNamespace(run=lambda launch: launch(tile))
    return TritonBlockIndexer(SimpleNamespace(fallbacks=lambda op: fallbacks, arch=SimpleNamespace(num_sms=NUM_SMS)))


def block_attention() -> TritonBlockAttention:
    configs = (TileConfig(ANY, "tiles", tuple((tile,) for tile in tiles_of("block_attention")), "kernels/tiles.py"),)
    return TritonBlockAttention(SimpleNamespace(tiles=lambda op: configs, arch=SimpleNamespace(num_sms=NUM_SMS)))


KERNELS = {
    "block_indexer": block_indexer(),
    "block_attention": block_attention(),
    "qk_norm_rope_store": rope_store.qk_norm_rope_store,
}


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="interpreted: test_in_interpreter")
def test_kernels_in_a_model(tmp_path: Path) -> None:
    save_tiny("minimax_m3_wide", tmp_path)
    assert_as_with_torch(tmp_path, KERNELS, random_tokens(110, seed=1), random_tokens(9, seed=2), (70, 104))


@pytest.mark.thorough
def test_in_interpreter() -> None:
    interpreter.run_file(__file__, interpreter.EVERY_CASE)
