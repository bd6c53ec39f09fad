"""Speed of the CPUs' kernels of experts, beside the rates at which threads read and copy main memory.

    python lab/cpu_experts.py --threads 1 2        # a minute a number of threads; --forms fp8_block mxfp4 for some

A layer of experts of 2048 x 768, one a token; banks are as large as `--gib`, so that weights come from main memory,
not from caches. Printed are gigabytes of weights a second, for one token and for four that choose the same experts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from sglang.srt.configs.activation import SILU
from sglang.srt.configs.quant_scheme import SCHEMES, Scheme, wants_planes
from sglang.srt.hardware.cpu_cores import place_threads
from sglang.srt.layers.moe.cpu_experts.pool import CpuExpertPool
from sglang.srt.layers.moe.expert_weights import ELEMENT_DTYPES, SCALE_DTYPES, ExpertWeights
from sglang.srt.mem_cache.main_memory import map_memory

HIDDEN, INTER, TOP_K = 2048, 768, 1
FORMS = ("bf16", "fp8_block", "mxfp4", "nvfp4 packed", "nvfp4", "int4_g32", "int4_g128")
SECONDS = 1.5


def weights_of(form: str, num_experts: int, rows: int, cols: int) -> ExpertWeights:
    """Returns random codes with scales near one."""
    name, _, packed = form.partition(" ")
    scheme: Scheme | None = SCHEMES.get(name)

    def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        piece = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8) & 0x77
        memory = map_memory(size)
        for start in range(0, size, len(piece)):
            memory[start : start + len(piece)] = piece[: size - start]
        return memory.view(dtype).view(shape)

    if scheme is None:
        return ExpertWeights(filled((num_experts, rows, cols), torch.bfloat16))
    scale = torch.ones((num_experts, *scheme.scale_shape(rows, cols)), dtype=torch.float32)
    dtype = SCALE_DTYPES[scheme.scale]
    scale = torch.full(scale.shape, 120, dtype=torch.uint8) if scheme.scale == "e8m0" else scale.to(dtype)
    factor = torch.ones(num_experts) if scheme.global_scale else None
    if scheme.bits == 8:
        return ExpertWeights(filled((num_experts, rows, cols), ELEMENT_DTYPES[scheme.element]), scheme, scale, factor)
    if packed or not wants_planes(scheme, ()):
        return ExpertWeights(filled((num_experts, rows, cols // 2), torch.uint8), scheme, scale, factor)
    data = filled((num_experts, rows, cols // 8), torch.int32)
    return ExpertWeights(data, scheme, scale, factor, plane_cols=cols)


def bytes_of(weights: ExpertWeights) -> int:
    """Returns the bytes of one expert."""
    scale = 0 if weights.scale is None else weights.scale[0].nbytes
    return weights.data[0].nbytes + scale


def rate_of(run: Callable[[int], Any], num_bytes: int) -> float:
    """Returns bytes a second of the fastest of some calls run(0), run(1), ..., each of which reads so many: other work
    on the machine disturbs it least."""
    fastest, end, call = float("inf"), time.perf_counter() + SECONDS, 0
    while call < 4 or time.perf_counter() < end:
        begin = time.perf_counter()
        run(call)
        fastest, call = min(fastest, time.perf_counter() - begin), call + 1
    return num_bytes / fastest


def memory_rates(threads: int, gib: float) -> dict[str, float]:
    """Returns the bytes a second that threads read, and those that they copy (read and written bytes both count)."""
    size = (64 << 20) // threads
    count = max(1, int(gib * (1 << 30)) // (128 << 20))
    parts = [
        (map_memory(size).view(torch.int64).fill_(1), map_memory(size).view(torch.int64))
        for _ in range(threads * count)
    ]
    with ThreadPoolExecutor(threads) as pool:

        def read(call: int) -> None:
            list(pool.map(lambda part: part[0].sum(), parts[call % count :: count]))

        def copy(call: int) -> None:
            list(pool.map(lambda part: part[1].copy_(part[0]), parts[call % count :: count]))

        return {"read": rate_of(read, size * threads), "copied": rate_of(copy, 2 * size * threads)}


def measure(form: str, threads: int, gib: float, avx2: bool) -> list[float]:
    """Returns bytes of weights a second for one token, and for four that choose the same experts."""
    one = weights_of(form, 1, 2 * INTER, HIDDEN), weights_of(form, 1, HIDDEN, INTER)
    of_expert = sum(map(bytes_of, one))
    num_experts = max(2 * TOP_K, int(gib * (1 << 30)) // of_expert // TOP_K * TOP_K)
    bank = weights_of(form, num_experts, 2 * INTER, HIDDEN), weights_of(form, num_experts, HIDDEN, INTER)
    pool = CpuExpertPool(place_threads(threads), 16, 128, avx2)
    layer = pool.add_layer(*bank, SILU)
    rates = []
    for tokens in (1, 4):
        x, weights = torch.randn(tokens, HIDDEN).bfloat16(), torch.full((tokens, TOP_K), 1 / TOP_K)

        def run(call: int, x: torch.Tensor = x, weights: torch.Tensor = weights) -> None:
            first = call * TOP_K % num_experts
            ids = torch.arange(first, first + TOP_K, dtype=torch.int32).repeat(len(x), 1)
            pool.run(layer, x, weights, ids)

        rates.append(rate_of(run, TOP_K * of_expert))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--forms", nargs="+", default=list(FORMS))
    parser.add_argument("--gib", type=float, default=2.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for threads in options.threads:
        rates = {name: f"{rate / 1e9:.1f}" for name, rate in memory_rates(threads, options.gib).items()}
        print(f"{threads} threads, GB/s: {rates}", flush=True)
        for form in options.forms:
            for avx2 in (False, True):
                found = ", ".join(f"{rate / 1e9:.1f}" for rate in measure(form, threads, options.gib, avx2))
                print(f"  {form}{' avx2' if avx2 else ''}: {found}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
