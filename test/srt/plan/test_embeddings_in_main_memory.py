"""Embeddings in main memory: what is planned and refused, and tokens that are those of embeddings in GPU memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sglang.srt.errors import UserError
from sglang.srt.plan.host_tables import host_table_bytes, with_embeddings
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.rank_weights import rank_weights
from sglang.srt.plan.ranks import ONE_RANK
from sglang.srt.plan.weights import rank_weight_bytes
from sglang.srt.server_args import ServerArgs

from ..models.harness import NativePlan, TinyRunner, plan_for, random_tokens, save_tiny
from .test_expert_slots import plan, refusal

GIB = 1024**3
IMAGES = "Qwen3-VL-8B-Instruct"


@pytest.mark.parametrize("tp", [1, 2])
def test_the_embedding_of_the_vocabulary_leaves_gpu_memory(tp: int) -> None:
    of_gpu = plan("Qwen3-8B", tp_size=tp)
    of_host = plan("Qwen3-8B", tp_size=tp, embed_in_main_memory=True)
    size = 151936 // tp * 4096 * 2
    assert of_gpu.memory.weights - of_host.memory.weights == size
    assert of_host.max_total_num_tokens > of_gpu.max_total_num_tokens
    assert of_host.choices["embedding_rows"].name == "triton"
    assert f"embeddings lie in pinned host memory, {size / GIB:.2f} GiB" in " ".join(of_host.warnings)


def test_per_layer_embeddings_leave_gpu_memory_where_the_vocabulary_stays(tmp_path: Path) -> None:
    save_tiny("gemma4_small", tmp_path)
    made = plan_for(tmp_path)
    model, parallel = made.description, ParallelConfig(made.dtype, made.dtype)
    of_host, per_layer = with_embeddings(model), model.per_layer_inputs
    assert per_layer is not None and model.tie_embeddings and not of_host.embedding.on_host
    sizes = [rank_weight_bytes(rank_weights(each, ONE_RANK), parallel.dtype) for each in (model, of_host)]
    assert sizes[0] - sizes[1] == host_table_bytes(of_host, parallel) == per_layer.table_elements(1) * 4 > 0


def test_experts_count_the_embedding_beside_them() -> None:
    """Main memory that has just room for the experts has none for both."""
    args = {"enable_paged_experts": True, "main": 130}
    assert plan(**args).expert_slots is not None
    assert "of main memory, and" in refusal(**args | {"main": 129.5}, embed_in_main_memory=True)


def test_what_stays_in_gpu_memory_is_refused_by_name() -> None:
    assert "the output head of" in refusal(name="Gemma-3-1B", embed_in_main_memory=True)
    with pytest.raises(UserError, match="--embed-in-main-memory: stages of a pipeline"):
        ServerArgs.from_kwargs(model_path="x", embed_in_main_memory=True, pp_size=2)


@dataclass(frozen=True)
class OnHost(NativePlan):
    @functools.cached_property
    def description(self) -> ModelDescription:
        return with_embeddings(NativePlan.description.func(self))


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma4_small"])
def test_logits_are_equal(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    logits = []
    for planned in (made := plan_for(tmp_path), OnHost(made.model, kv_cache_dtype=made.kv_cache_dtype)):
        runner = TinyRunner(planned)
        logits.append([*runner.extend({1: random_tokens(9, 1)}), runner.decode({1: 5})])
    for one, other in zip(*logits, strict=True):
        assert torch.equal(one, other)


def test_the_layers_of_an_encoder_leave_gpu_memory_but_for_two() -> None:
    of_gpu, of_host = (plan(IMAGES, "rtx-pro-6000", encoder_in_main_memory=on) for on in (False, True))
    media = of_host.description.media
    assert media is not None and len(sizes := media.tower.layer_sizes()) == media.tower.num_layers
    assert of_gpu.memory.weights - of_host.memory.weights == 2 * (sum(sizes) - 2 * max(sizes)) > GIB // 2
    assert f"the layers of the encoder lie in pinned host memory, {2 * sum(sizes) / GIB:.2f} GiB" in " ".join(
        of_host.warnings
    )
    assert of_host.max_total_num_tokens > of_gpu.max_total_num_tokens
    assert "no images are read here" in refusal(name="Qwen3-8B", encoder_in_main_memory=True)
    assert "gb10 is main memory" in refusal(name=IMAGES, gpu="gb10", encoder_in_main_memory=True)
    on_cpu = plan(IMAGES, "cpu", free=200, encoder_in_main_memory=True)
    assert any("--encoder-in-main-memory has no effect" in note for note in on_cpu.warnings)
