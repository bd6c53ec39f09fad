"""Bandwidth of the elementwise, sampling and expert kernels beside the device's copy rate.

    python lab/kernels/elementwise/bench.py [--only rmsnorm] [--json out.json]

Shapes are those of Qwen3-8B (elementwise), a vocabulary of 151,936 (sampling) and Qwen3-30B-A3B (experts).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmark" / "kernels"))
from timing import copies_for, copy_ceiling, read_ceiling, time_calls

from sglang.srt.blocks.moe.kernels import topk
from sglang.srt.configs.activation import SILU
from sglang.srt.hardware.arch import current_arch
from sglang.srt.kernels.scaled_product import product_of
from sglang.srt.layers.moe.expert_weights import ExpertWeights
from sglang.srt.layers.moe.fused_moe_triton.expert_tile_configs import ExpertLayer, tile_configs_of
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import fused_moe
from sglang.srt.layers.sampler import Sampler
from sglang.srt.layers.triton_ops import activation, norm, rope_store
from sglang.srt.layers.triton_ops.sampling import filter_thresholds
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.sampling_table import SamplingTable

TOKENS = (1, 16, 64, 1024, 8192)
HIDDEN, INTERMEDIATE, VOCAB = 4096, 12288, 151936
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


@dataclass(frozen=True, slots=True)
class Case:
    """`make()` returns a call on fresh buffers that moves `num_bytes`."""

    name: str
    num_bytes: int
    make: Callable[[], Callable[[], object]]
    flops: float = 0.0


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def elementwise(tokens: int) -> Iterator[Case]:
    weight, head_weight = randn(HIDDEN), randn(HEAD_DIM)

    def rmsnorm() -> Callable[[], object]:
        x = randn(tokens, HIDDEN)
        return lambda: norm.rmsnorm(x, weight, 1e-6)

    def add_norm() -> Callable[[], object]:
        x, residual = randn(tokens, HIDDEN), randn(tokens, HIDDEN)
        return lambda: norm.fused_add_rmsnorm(x, residual, weight, 1e-6)

    def silu() -> Callable[[], object]:
        x = randn(tokens, 2 * INTERMEDIATE)
        return lambda: activation.silu_and_mul(x)

    def rope() -> Callable[[], object]:
        qkv, cos_sin = randn(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM), torch.rand(8192, HEAD_DIM, device="cuda")
        k_cache, v_cache = randn(tokens + 1, KV_HEADS, HEAD_DIM), randn(tokens + 1, KV_HEADS, HEAD_DIM)
        positions, loc = torch.arange(tokens, device="cuda"), torch.randperm(tokens, device="cuda") + 1
        shape = (HEADS, KV_HEADS, HEAD_DIM)
        return lambda: rope_store.qk_norm_rope_store(
            qkv, positions, cos_sin, head_weight, head_weight, 1e-6, *shape, k_cache, v_cache, loc
        )

    def route() -> Callable[[], object]:
        logits = randn(tokens, 128)
        return lambda: topk.topk_softmax(logits, 8, True)

    def route_in_groups() -> Callable[[], object]:
        logits, bias = torch.randn(tokens, 256, device="cuda"), torch.randn(256, device="cuda")
        return lambda: topk.topk_sigmoid(logits, bias, 8, True, (8, 4), 2.5, True)

    row = 2 * tokens * HIDDEN
    yield Case(f"rmsnorm T={tokens}", 2 * row, rmsnorm)
    yield Case(f"fused_add_rmsnorm T={tokens}", 4 * row, add_norm)
    yield Case(f"silu_and_mul T={tokens}", 6 * tokens * INTERMEDIATE, silu)
    rope_bytes = 2 * tokens * HEAD_DIM * (2 * HEADS + 5 * KV_HEADS + 2)
    yield Case(f"qk_norm_rope_store T={tokens}", rope_bytes, rope)
    yield Case(f"topk_softmax T={tokens}", tokens * (256 + 64), route)
    yield Case(f"topk_sigmoid in groups T={tokens}", tokens * (1024 + 72), route_in_groups)


def sampling(batch_size: int) -> Iterator[Case]:
    kinds = {
        "greedy": SamplingParams(temperature=0.0),
        "temperature": SamplingParams(),
        "top_k=20 top_p=0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
        "top_p=0.9": SamplingParams(top_p=0.9),
        "penalties": SamplingParams(presence_penalty=0.5, repetition_penalty=1.1),
    }
    for name, params in kinds.items():

        def make(params: SamplingParams = params) -> Callable[[], object]:
            table = SamplingTable(batch_size + 1, VOCAB, "cuda")
            for slot in range(1, batch_size + 1):
                table.set(slot, params, slot, [1, 2, 3], [4, 5], ())
            slots = torch.arange(1, batch_size + 1, device="cuda")
            batch = table.view(np.arange(1, batch_size + 1), slots)
            logits, positions = torch.randn(batch_size, VOCAB, device="cuda"), slots.int()
            return lambda: Sampler(use_triton=True)(logits, batch, positions)

        yield Case(f"sample {name} B={batch_size}", 4 * batch_size * VOCAB, make)


def thresholds(batch_size: int) -> Iterator[Case]:
    """Logits as models give them, a few hundred tokens far above the others, and where a filter keeps thousands."""
    filters = {
        "top_k=20 top_p=0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
        "top_k=50": SamplingParams(top_k=50),
        "top_k=600": SamplingParams(top_k=600),
        "top_p=0.9": SamplingParams(top_p=0.9),
        "min_p=0.05": SamplingParams(min_p=0.05),
    }
    for (name, params), peaked in itertools.product(filters.items(), (True, False)):

        def make(params: SamplingParams = params, peaked: bool = peaked) -> Callable[[], object]:
            table = SamplingTable(batch_size + 1, VOCAB, "cuda")
            for slot in range(1, batch_size + 1):
                table.set(slot, params, slot, [], [], ())
            slots = torch.arange(1, batch_size + 1, device="cuda")
            batch = table.view(np.arange(1, batch_size + 1), slots)
            logits = 2 * torch.randn(batch_size, VOCAB, device="cuda")
            if peaked:
                likely = torch.randint(VOCAB, (batch_size, 300), device="cuda")
                logits.scatter_(1, likely, 8 + 3 * torch.randn(batch_size, 300, device="cuda"))
            return lambda: filter_thresholds(logits, batch.table, slots)

        shape = "peaked" if peaked else "flat"
        yield Case(f"threshold {name} {shape} B={batch_size}", 4 * batch_size * VOCAB, make)


def experts(tokens: int) -> Iterator[Case]:
    num_experts, top_k, hidden, inter = 128, 8, 2048, 768
    w13, w2 = randn(num_experts, 2 * inter, hidden), randn(num_experts, hidden, inter)
    torch.manual_seed(tokens)
    weights, ids = topk.topk_softmax(torch.randn(tokens, num_experts, device="cuda"), top_k, True)
    used = len(ids.unique())
    configs = tile_configs_of(
        ExpertLayer(product_of(None, ()), num_experts, top_k, hidden, inter), current_arch().features
    )

    def make() -> Callable[[], object]:
        x = randn(tokens, hidden)
        return lambda: fused_moe(x, ExpertWeights(w13), ExpertWeights(w2), weights, ids, SILU, configs)

    num_bytes = used * 3 * inter * hidden * 2
    yield Case(f"fused_moe T={tokens} ({used} experts)", num_bytes, make, 6.0 * tokens * top_k * inter * hidden)


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        yield from elementwise(tokens)
    for batch_size in (1, 64, 256):
        yield from sampling(batch_size)
        yield from thresholds(batch_size)
    for tokens in (1, 2, 4, 8, 16, 64, 512, 8192):
        yield from experts(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    ceiling = copy_ceiling()
    print(f"{torch.cuda.get_device_name()}: copy {ceiling / 1e9:.0f} GB/s, read {read_ceiling() / 1e9:.0f} GB/s")
    rows = []
    for case in cases():
        if args.only not in case.name:
            continue
        # Weights of experts are shared by the sets: 1.2 GB already exceed the caches.
        sets = copies_for(
            case.num_bytes, maximum=4 if case.name.startswith(("fused_moe", "sample", "threshold")) else 64
        )
        seconds = time_calls([case.make() for _ in range(sets)])
        rate = case.num_bytes / seconds
        tflops = f"  {case.flops / seconds / 1e12:6.1f} TFLOP/s" if case.flops else ""
        print(
            f"{case.name:44s} {seconds * 1e6:9.2f} us {rate / 1e9:8.1f} GB/s {rate / ceiling:6.1%}{tflops}", flush=True
        )
        row = {key: value for key, value in asdict(case).items() if key != "make"}
        rows.append(row | {"seconds": seconds, "of_copy_rate": rate / ceiling})
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
