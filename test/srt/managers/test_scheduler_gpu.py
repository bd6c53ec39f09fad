"""Scheduler, graphs and kernels on a GPU, in bf16, against transformers in fp32 (`gpu_parity`)."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, request, run_to_end
from srt.managers.gpu_parity import error_over_bf16, gpu_scheduler
from srt.models.harness import VOCAB, save_tiny

pytestmark = pytest.mark.gpu

# name -> (server options, mean error over that of transformers in bf16)
VARIANTS: dict[str, tuple[dict[str, Any], float]] = {
    "graphs": ({}, 1.5),
    "eager": ({"disable_cuda_graph": True}, 1.5),
    "pages": ({"page_size": 16}, 1.5),
    "chunks": ({"chunked_prefill_size": 16}, 1.5),
    "retraction": ({"max_total_tokens": 345, "schedule_conservativeness": 0.01}, 1.5),
    "flashinfer": ({"attention_backend": "flashinfer", "page_size": 16}, 1.5),
    "fp8_kv": ({"kv_cache_dtype": "fp8_e4m3"}, 10.0),  # three bits of mantissa instead of seven
}


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """A scheduler's graphs go with the garbage collector, which must not find them while a later test captures one."""
    yield
    gc.collect()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "name",
    [
        *("qwen3_wide", "qwen3_moe_wide", "llama_wide", "deepseek_v3_wide", "qwen3_windows_wide", "llama4_wide"),
        *("gpt_oss_wide", "gemma4_moe_wide", "gemma4_small_wide", "qwen3_5_moe_wide", "nemotron_h_wide"),
        *("deepseek_v4_wide", "minimax_m3_wide", "qwen4_exp_wide"),
    ],
)
def test_against_transformers(name: str, variant: str, tmp_path: Path) -> None:
    if variant == "flashinfer" and any(part in name for part in ("windows", "gemma", "gpt_oss", "llama4")):
        pytest.skip("FlashInfer here has no windows")
    if variant == "fp8_kv" and "gemma4" in name:
        pytest.skip("its products of q and k are not scaled down: what rounding keys costs has no such bound")
    if variant == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")
    options, factor = VARIANTS[variant]
    if name in ("minimax_m3_wide", "qwen4_exp_wide") and variant in ("flashinfer", "retraction", "pages"):
        pytest.skip("one backend attends to blocks, whose size pages have; their requests never run short of slots")
    if name == "deepseek_v4_wide":
        if variant in ("flashinfer", "retraction"):
            pytest.skip("one backend computes its attention, and its requests never run short of slots here")
        options = options | ({"page_size": 64} if "page_size" in options else {})  # whole entries of its compressors
    reference = save_tiny(name, tmp_path).cuda()
    scheduler = gpu_scheduler(tmp_path, **options)
    assert error_over_bf16(scheduler, reference) < factor
    if variant == "retraction":
        assert scheduler.stats.num_retracted > 0


FURTHER = (
    *("hy_v3_wide", "inkling_wide", "kimi_linear_wide", "laguna_wide", "mimo_v2_wide", "mistral4_wide"),
    *("muse_glimmer_wide", "step3p7_wide"),
)
"""With the backend that each gets by default."""


@pytest.mark.parametrize("variant", ["graphs", "eager", "chunks"])
@pytest.mark.parametrize("name", FURTHER)
def test_further_families_against_transformers(name: str, variant: str, tmp_path: Path) -> None:
    reference = save_tiny(name, tmp_path).cuda()
    options, factor = VARIANTS[variant]
    assert error_over_bf16(gpu_scheduler(tmp_path, **options), reference) < factor


@pytest.mark.parametrize(
    ("top_k", "factor"),
    [(256, 1.5), (16, 4.0)],
    ids=["everything is selected", "keys in 8 bits select others than keys in 16"],
)
def test_sparse_attention_against_transformers(top_k: int, factor: float, tmp_path: Path) -> None:
    reference = save_tiny("glm_moe_dsa_wide", tmp_path, index_topk=top_k).cuda()
    for options in ({}, {"disable_cuda_graph": True}, {"page_size": 64, "chunked_prefill_size": 64}):
        assert error_over_bf16(gpu_scheduler(tmp_path, **options), reference) < factor


@pytest.mark.parametrize("name", ["qwen3_wide", "qwen3_moe_wide"])
def test_prefill_graphs_change_nothing(name: str, tmp_path: Path) -> None:
    """Ragged batches over cached prefixes, padded to a graph, against the same steps launched kernel by kernel.

    Without latent attention: graphs take its absorbed way, other steps the expanded one, which rounds otherwise."""
    save_tiny(name, tmp_path)
    outputs = []
    for in_graphs in (True, False):
        args = ServerArgs.from_kwargs(
            model_path=str(tmp_path), device="cuda", dtype="bfloat16", skip_tokenizer_init=True, max_total_tokens=4096,
            max_running_requests=16, cuda_graph_max_bs=8, mem_fraction_static=0.2,
        )  # fmt: skip
        runner = create_runner(args)
        assert runner.graphs is not None and runner.graphs.sizes.prompt_tokens
        if not in_graphs:
            runner.graphs.sizes = replace(runner.graphs.sizes, prompt_tokens=())
        scheduler = Scheduler(args, runner, StopChecker(None))
        generator = torch.Generator().manual_seed(1)
        shared = torch.randint(1, VOCAB, (40,), generator=generator).tolist()
        collector = Collector()
        for round_, lengths in enumerate([(50,), (3, 70, 1), (20, 20, 20, 20, 90)]):
            for i, length in enumerate(lengths):
                ids = shared + torch.randint(1, VOCAB, (length,), generator=generator).tolist()
                add(scheduler, request(f"{round_}-{i}", ids, 6, temperature=0.0, ignore_eos=True))
            run_to_end(scheduler, collector)
        outputs.append(collector.tokens)
    same = [outputs[0][rid] == outputs[1][rid] for rid in outputs[0]]
    assert sum(same) >= len(same) - 1, "bf16 products of another height may round one near-tie differently"
