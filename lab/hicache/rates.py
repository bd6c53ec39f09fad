"""Copies of cache pages to main memory and back, beside one large copy of page-locked memory. GB/s.

Pages are of random bytes; what was saved must come back as it was. `pieces`: pages that follow one another in main
memory, as a long prefix has them, or that lie apart. `way`: as the server copies whole prefixes (by buffers and the
copy engine, or where pieces are short by the kernel), and as it loads layer by layer.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

from sglang.srt.mem_cache.cache_tier import PageMoves
from sglang.srt.mem_cache.copy_engine import Copier, page_lock
from sglang.srt.mem_cache.layerwise_load import LayerwiseLoad
from sglang.srt.mem_cache.page_pool import PagePool

CACHES: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "Qwen3-8B, bf16": (72, 2048, (1, 16, 64)),
    "Qwen3-8B, fp8": (72, 1024, (1, 64)),
    "DeepSeek-V3 latents, bf16": (61, 1152, (1, 64)),
    "Qwen3.5-27B, bf16": (32, 2048, (16,)),
    "Qwen3.5-27B, states": (48, 48 * 128 * 128 * 4 + 3 * 10240 * 2, (1,)),
}
"""Parts, bytes of an entry in each, and page sizes: of keys and values 36 layers of 8 heads of 128; 61 latents of 576;
16 layers of 4 heads of 256, and 48 layers' matrices and convolutions."""


def seconds(copier: Copier, pool: PagePool, moves: PageMoves, to_host: bool, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        copier.copy(pool, moves, to_host)
        copier.finish()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def layer_seconds(copier: Copier, pool: PagePool, moves: PageMoves, repeats: int) -> float:
    """Of a load layer by layer."""
    times = []
    for _ in range(repeats + 1):
        arrivals = LayerwiseLoad(list(pool.by_layer), copier.device.type == "cuda")
        start = time.perf_counter()
        copier.load_layers([pool], [moves], arrivals)
        copier.finish()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def ceiling(device: str, size: int, repeats: int) -> dict[str, float]:
    there = torch.empty(size, dtype=torch.uint8, device=device)
    here = torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")
    rates = {}
    for name, target, source in (("save", here, there), ("load", there, here)):
        times = []
        for _ in range(repeats + 1):
            synchronize(device)
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            synchronize(device)
            times.append(time.perf_counter() - start)
        rates[name] = size / min(times[1:]) / 1e9
    return rates


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(name: str, page_size: int, options: dict[str, Any], copier: Copier) -> list[dict[str, Any]]:
    num_parts, entry, _ = CACHES[name]
    width = entry * page_size
    pages = max(4, options["bytes"] // (num_parts * width))
    device = options["device"]
    parts = [torch.randint(0, 256, (pages + 1, width), dtype=torch.uint8, device=device) for _ in range(num_parts)]
    before = [part.clone() for part in (parts[0], parts[-1])]
    pool = PagePool(parts, pages, layers=[part // 2 for part in range(num_parts)])
    if device == "cuda":
        page_lock([pool])
    rng = np.random.default_rng(0)
    on_device = rng.permutation(pages) + 1
    rows = []
    for pieces, in_host in (("together", np.arange(1, pages + 1)), ("apart", rng.permutation(pages) + 1)):
        for way in ("whole", "layers"):
            saves, loads = PageMoves(on_device, in_host), PageMoves(in_host, on_device)
            save = seconds(copier, pool, saves, True, options["repeats"])
            for part in (parts[0], parts[-1]):
                part[1:] = 0
            if way == "layers":
                load = layer_seconds(copier, pool, loads, options["repeats"])
            else:
                load = seconds(copier, pool, loads, False, options["repeats"])
            right = all(torch.equal(part[1:], old[1:]) for part, old in zip((parts[0], parts[-1]), before, strict=True))
            size = pages * pool.page_bytes / 1e9
            rows.append(
                {"cache": name, "page_size": page_size, "pieces": pieces, "way": way, "right": right,
                 "save": size / save, "load": size / load}
            )  # fmt: skip
    if pool.locked:
        torch.cuda.cudart().cudaHostUnregister(pool.host.data_ptr())
    return rows


def main() -> None:
    options = json.loads(sys.argv[1])
    device = options["device"]
    torch.zeros(1, device=device)
    found = {"ceiling": ceiling(device, options["bytes"], options["repeats"]), "rows": []}
    copier = Copier(torch.device(device))
    for name, (*_, page_sizes) in CACHES.items():
        for page_size in page_sizes:
            found["rows"] += measure(name, page_size, options, copier)
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
