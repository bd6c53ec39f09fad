#!/usr/bin/env python3
"""Attention of long prompts: Triton's kernels of this project beside FlashInfer's, which serve them where the tables
say so (docs/kernels.md, "Attention of long prompts").

    python bench_long_prompts.py                                # with this GPU's tiles and FlashInfer's kernels for it
    SGLANG_FORCE_ARCH=sm_120 python bench_long_prompts.py       # with those of SM120: FA2

One row for each shape: microseconds of a layer of both, TFLOP/s, and how many times as fast the library is. Heads of
their own over pages of one token, and latents over keys and values that are made of them, which counts in the time.
What a step is planned with, once for all layers, does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmark" / "kernels"))
from bench_attention import Data, Shape, ours
from bench_latent import CHUNK, RANK, SCALE, V_DIM, randn, scattered, tile
from timing import matmul_ceiling, time_calls

from sglang.srt.blocks.mla.flashinfer_prompt import FlashInferLatentPrompt
from sglang.srt.blocks.mla.kernels.latent_prompt import latent_prompt_attention
from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.hardware.arch import current_arch
from sglang.srt.layers.attention.flashinfer_backend import WORKSPACE_BYTES, library_kernels
from sglang.srt.layers.attention.latent_chunks import cut_prefixes
from sglang.srt.plan.ranks import RankLayout

HEADS = {"Qwen3-8B": (32, 8, 128), "GLM-4.7, eight ranks": (12, 1, 128), "Qwen3.5-397B, four ranks": (8, 1, 256)}
SEQUENCES = ((1, 0, 8192), (8, 0, 1024), (1, 57_344, 8192))
"""Sequences, cached tokens and new ones of each."""
LATENT_HEADS = (8, 64)
LATENT_SEQUENCES = ((0, 8192), (57_344, 8192))


def library(data: Data) -> Callable[[], None]:
    """The first rotation's sequences by the wrapper that `flashinfer_backend` has."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    shape, total = data.shape, data.shape.prefix + data.shape.new
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=library_kernels(current_arch()))
    counts = torch.arange(shape.batch + 1, dtype=torch.int32)
    pages = torch.randperm(shape.batch * total, device="cuda").int()
    last = torch.ones(shape.batch, dtype=torch.int32)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, 1)
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(counts * shape.new, counts * total, pages, last, *heads, causal=True, **types)
    cache = tuple(randn(shape.batch * total, 1, shape.num_kv_heads, shape.head_dim) for _ in range(2))
    return lambda: wrapper.run(data.q[0], cache, out=data.out)


def latent_calls(heads: int, new: int, prefix: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """(Triton's, the library's)"""
    spec = MLA(heads, 1536, RANK, 128, 64, V_DIM)
    plan = SimpleNamespace(dtype="bfloat16", ranks=RankLayout(1), arch=current_arch())
    table, rows = scattered(1, prefix + new), torch.zeros(1, dtype=torch.int64, device="cuda")
    given = (randn(new, heads, spec.qk_dim), randn(new, spec.latent_dim), randn(heads, 128, RANK))
    given = (*given, randn(heads, RANK, V_DIM), randn(new, heads, V_DIM))
    start = torch.tensor([0, new], dtype=torch.int32, device="cuda")
    cache, chunks = randn(prefix + new, 1, spec.latent_dim), cut_prefixes(table, rows, [prefix], CHUNK)
    chosen = tile("latent_prompt_attention", (spec.qk_dim, V_DIM))
    attend = FlashInferLatentPrompt(plan, spec, "cuda").build([new], chunks)  # type: ignore[arg-type]
    assert attend is not None
    return (
        lambda: latent_prompt_attention(*given, start, cache, chunks, scale=SCALE, tile=chosen),
        lambda: attend(*given, start, cache, chunks, scale=spec.softmax_scale),
    )


def main() -> None:
    print(f"{torch.cuda.get_device_name()}: matmul {matmul_ceiling() / 1e12:.0f} TFLOP/s; arch {current_arch().name}")
    print("heads | sequences x new over cached | Triton us, TFLOP/s | FlashInfer us, TFLOP/s | times as fast")
    for name, heads in HEADS.items():
        for batch, prefix, new in SEQUENCES:
            shape = Shape(name, "extend", batch, prefix, new, *heads, heads[2])
            data = Data(shape)
            calls = (ours(data)[:1], [library(data)])
            show(name, batch, prefix, new, shape.flops, *(time_calls(call, minimum=1) for call in calls))
    for count in LATENT_HEADS:
        for prefix, new in LATENT_SEQUENCES:
            flops = 2 * count * (prefix * new + new * (new + 1) // 2) * (128 + 64 + V_DIM)
            times = (time_calls([call], minimum=1) for call in latent_calls(count, new, prefix))
            show(f"latents, {count}", 1, prefix, new, flops, *times)


def show(name: str, batch: int, prefix: int, new: int, flops: int, ours_s: float, library_s: float) -> None:
    cells = " | ".join(f"{s * 1e6:9.1f} {flops / s / 1e12:5.0f}" for s in (ours_s, library_s))
    print(f"{name} | {batch} x {new} over {prefix} | {cells} | {ours_s / library_s:.2f}", flush=True)


if __name__ == "__main__":
    main()
