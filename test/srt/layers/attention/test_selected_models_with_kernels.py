"""Small models of Naive-N0.5 and Step-5 whose indexers and sparse attention run the Triton kernels, and of Muse-Spark
whose residual sum and gates do: they compute what the torch kernels do, also for prompts in parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import interpreter
import pytest
import torch

from sglang.srt.blocks.compressed.kernels import compressor
from sglang.srt.blocks.gated_sum.kernels.gated_sum import gated_sum
from sglang.srt.blocks.recurrent_state.kernels.gated_norm import gated_rmsnorm
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.attention.triton_ops.block_attention import block_attention_fwd
from sglang.srt.layers.attention.triton_ops.index_logits import index_logits
from sglang.srt.layers.attention.triton_ops.select_entries import select_entries
from sglang.srt.layers.triton_ops import index_rope, index_store
from srt.layers.kernels_in_models import assert_as_with_torch
from srt.models import muse_spark_reference, naive_n05_reference, step5_reference
from srt.models.harness import random_tokens
from srt.models.ling3_reference import save

TILE = {"BLOCK_H": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2, "ctas_per_sm": 1}
SCORES = {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2, "ctas_per_sm": 1}


def indexer(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor | None, rows: EntryRows, top_k: int
) -> Selection:
    slots = torch.empty((len(q), top_k), dtype=torch.int32)
    chosen = torch.empty(len(q), dtype=torch.int32)
    logits = torch.empty((len(q), -(-rows.max_count // 16) * 16), dtype=torch.float32)
    index_logits(q, weights, keys, scales, rows, top_k, logits, tile=SCORES, num_sms=1)
    select_entries(logits, rows, top_k, slots, chosen)
    return Selection(slots, chosen)


def attention(*tensors: Any, **rest: float) -> None:
    block_attention_fwd(*tensors, **rest, tile=TILE, num_sms=8)


KERNELS = {
    "kv_compressor": compressor.KV_COMPRESSOR,
    "index_norm_rope": index_rope.index_norm_rope,
    "index_queries": index_store.index_queries,
    "sparse_indexer": indexer,
    "block_attention": attention,
    "gated_sum": gated_sum,
    "gated_rmsnorm": gated_rmsnorm,
}
NAIVE = naive_n05_reference.CONFIG | {"head_dim": 48, "swa_head_dim": 48, "v_head_dim": 32, "swa_v_head_dim": 32}
NAIVE |= {"num_hidden_layers": 2, "hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 0]}
STEP = step5_reference.CONFIG | {"head_dim": 48, "num_hidden_layers": 2, "moe_layers_enum": "1"}
STEP |= {key: value[:2] for key, value in STEP.items() if isinstance(value, list) and len(value) == 5}
STEP["num_nextn_predict_layers"] = 0


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="interpreted: test_in_interpreter")
@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (NAIVE, naive_n05_reference.weights),
        (STEP, step5_reference.weights),
        (muse_spark_reference.CONFIG, muse_spark_reference.weights),
    ],
    ids=["naive", "step", "muse"],
)
def test_kernels_in_a_model(config: Mapping[str, Any], weights: Any, tmp_path: Path) -> None:
    """Heads of 48 dims are read in two parts, as those of 192 are; of up to 40 tokens some are selected."""
    save(tmp_path, config, weights(config))
    assert_as_with_torch(tmp_path, KERNELS, random_tokens(40, seed=1), random_tokens(9, seed=2), (27, 36))


@pytest.mark.thorough
def test_in_interpreter() -> None:
    interpreter.run_file(__file__, interpreter.EVERY_CASE)
