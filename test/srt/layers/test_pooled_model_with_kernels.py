"""Tiny models of Qwen3.8-Flash-Next and GLM-5.3-Flash whose layers run the Triton kernels: they compute what the torch
kernels do, also for prompts in parts, padding, and draft tokens that are taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import interpreter
import pytest
import torch

from sglang.srt.blocks.compressed import reference as compressed_ops
from sglang.srt.blocks.compressed.kernels import compressor, tail_rotation
from sglang.srt.blocks.gated_streams import reference as native_streams
from sglang.srt.blocks.gated_streams.kernels import gated_streams
from sglang.srt.blocks.kimi_delta.kernels import channel_recurrence
from sglang.srt.blocks.ngram_embedding import reference as ngram_ops
from sglang.srt.blocks.ngram_embedding.kernels import ngram_embedding
from sglang.srt.blocks.pooled_sparse.kernels.selected_blocks import selected_block_attention_fwd
from sglang.srt.blocks.recurrent_state.kernels.gated_norm import gated_rmsnorm
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.attention.triton_ops.index_logits import index_logits
from sglang.srt.layers.attention.triton_ops.select_entries import select_entries
from sglang.srt.layers.attention.triton_ops.sparse_records import attention_fwd
from sglang.srt.layers.triton_ops import index_rope, index_store, latent_records
from sglang.srt.model_executor.graph_runner import GraphSizes
from srt.layers.kernels_in_models import assert_as_with_torch, with_both
from srt.model_executor import test_compressed_steps as steps
from srt.model_executor.graph_stand_ins import in_graphs
from srt.model_executor.known_texts import KnownTexts, verifying_scheduler
from srt.models.harness import random_tokens, save_tiny

TILE = {"BLOCK_H": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2, "ctas_per_sm": 1}
SCORES = {"BLOCK_M": 64, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2, "ctas_per_sm": 1}


def attention(*tensors: Any, **rest: float) -> None:
    selected_block_attention_fwd(*tensors, **rest, tile=TILE, num_sms=8)


def indexer(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor | None, rows: EntryRows, top_k: int
) -> Selection:
    slots = torch.empty((len(q), top_k), dtype=torch.int32)
    chosen = torch.empty(len(q), dtype=torch.int32)
    logits = torch.empty((len(q), -(-rows.max_count // 16) * 16), dtype=torch.float32)
    index_logits(q, weights, keys, scales, rows, top_k, logits, tile=SCORES, num_sms=1)
    select_entries(logits, rows, top_k, slots, chosen)
    return Selection(slots, chosen)


KERNELS = {
    "kv_compressor": compressor.KV_COMPRESSOR,
    "tail_rotation": tail_rotation.tail_rotation,
    "gated_streams": gated_streams.GATED_STREAMS,
    "ngram_embedding": ngram_embedding.NGRAM_EMBEDDING,
    "gated_rmsnorm": gated_rmsnorm,
    "sparse_indexer": indexer,
    "selected_block_attention": attention,
}


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="interpreted: test_in_interpreter")
def test_kernels_in_a_model(tmp_path: Path) -> None:
    """The indexer drops blocks: four of up to twelve are selected."""
    save_tiny("qwen4_exp_wide", tmp_path)
    tokens = random_tokens(50, seed=1)
    tokens[20] = tokens[33] = 7  # where n-grams end
    assert_as_with_torch(tmp_path, KERNELS, tokens, random_tokens(9, seed=2), (29, 42))


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="interpreted: test_in_interpreter")
def test_kernels_in_graphs_with_draft_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of prompts, of decoding and of draft tokens, all as graphs have them: with rows of padding. Every third
    guess is wrong, and the tokens are those of plain torch without draft tokens and graphs."""
    save_tiny("qwen4_exp_small", tmp_path)
    args = steps.server_args(tmp_path)
    want = steps.run(steps.plain(args), steps.prompts())
    monkeypatch.setattr(compressed_ops, "KV_COMPRESSOR", compressor.KV_COMPRESSOR)
    monkeypatch.setattr(compressed_ops, "tail_rotation", tail_rotation.tail_rotation)
    monkeypatch.setattr(native_streams, "GATED_STREAMS", gated_streams.GATED_STREAMS)
    monkeypatch.setattr(ngram_ops, "NGRAM_EMBEDDING", ngram_embedding.NGRAM_EMBEDDING)
    outputs = {tuple(ids): tokens for ids, tokens in zip(steps.prompts(), want, strict=True)}
    scheduler = verifying_scheduler(args, KnownTexts(4, 3), outputs)
    with in_graphs(scheduler.runner, GraphSizes((1, 4), (16,), (0, 4))) as replays:
        assert steps.run(scheduler, steps.prompts()) == want
    assert {step.prompts is None for step in replays} == {True, False}


def sparse_attention(q: torch.Tensor, sources: Any, out: torch.Tensor, **rest: Any) -> None:
    attention_fwd(q, sources, out, **rest, tile=TILE, num_sms=8)


OF_LATENTS = {
    "kv_compressor": compressor.KV_COMPRESSOR,
    "shared_kv_norm_rope_store": tail_rotation.shared_kv_norm_rope_store,
    "index_norm_rope": index_rope.index_norm_rope,
    "index_queries": index_store.index_queries,
    "kimi_delta_rule": channel_recurrence.CHANNEL_RECURRENCE,
    "gated_rmsnorm": gated_rmsnorm,
    "sparse_indexer": indexer,
    "sparse_attention": sparse_attention,
}
PACKING = {
    "index_key_store": index_store.index_key_store,
    "latent_record_store": latent_records.latent_record_store,
}


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="interpreted: test_in_interpreter")
def test_kernels_of_pooled_latents_in_a_model(tmp_path: Path) -> None:
    """The indexer drops runs: three of up to twelve are selected."""
    save_tiny("glm5_next_wide", tmp_path)
    tokens, other = random_tokens(50, seed=1), random_tokens(9, seed=2)
    assert_as_with_torch(tmp_path, OF_LATENTS, tokens, other, (29, 42), atol=2e-3)


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="interpreted: test_in_interpreter")
@pytest.mark.parametrize(
    ("name", "kv_dtype", "kernels"),
    [
        ("qwen4_exp_wide", "fp8_e4m3", KERNELS | PACKING | {"index_queries": index_store.index_queries}),
        ("glm5_next_wide", "fp8_e4m3", OF_LATENTS | PACKING),
        ("glm5_next_wide", "fp4_e2m1", OF_LATENTS | PACKING),
    ],
)
def test_kernels_over_caches_of_fewer_bits(name: str, kv_dtype: str, kernels: dict[str, Any], tmp_path: Path) -> None:
    """What is stored may differ in its last bit, and that may decide between two numbers: of few tokens."""
    save_tiny(name, tmp_path, **({"index_topk": 64} if name == "glm5_next_wide" else {"indexer_budget": 64}))
    tokens, other = random_tokens(50, seed=1), random_tokens(9, seed=2)
    want, got = with_both(tmp_path, kernels, tokens, other, (29, 42), kv_dtype)
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert errors.median() < 1e-2 and errors.max() < 0.1


@pytest.mark.thorough
def test_in_interpreter() -> None:
    interpreter.run_file(__file__, interpreter.EVERY_CASE)
