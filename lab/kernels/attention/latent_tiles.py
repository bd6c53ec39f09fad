"""Tiles of latent decoding on the GPU at hand: error against fp32, then time over a grid. This is where the rows of
`kernels/tiles.py` for (576, 512) come from.

    python latent_tiles.py [--processes 12] [--out DIR]        # about two minutes

Every tile is compiled in a process of its own first. Prints the best tiles by cache type, heads and load; every time
goes to DIR/latent_tiles.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmark" / "kernels"))
from timing import read_ceiling, time_calls

from sglang.srt.layers.attention.triton_ops.decode_attention import DecodeWorkspace, decode_attention_fwd, plan_decode

RANK, DIM = 512, 576
SCALE = 192**-0.5
CACHES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
LOADS = {(16, 8192): (8, 16, 32, 64, 128), (64, 2048): (16, 128), (1, 8192): (16, 128)}
"""(requests, tokens of each) -> query heads."""
MAX_SHARED_BYTES = 232_448
TILES = {
    "bfloat16": (
        (16, 32, 4, 3), (16, 32, 8, 3), (16, 32, 4, 4), (16, 64, 4, 3), (16, 64, 8, 3), (16, 16, 4, 3),
        (32, 32, 4, 3), (32, 32, 8, 3), (32, 64, 8, 3), (32, 64, 4, 3), (64, 32, 8, 3), (64, 32, 8, 2),
    ),
    "fp8_e4m3": (
        (16, 32, 4, 3), (16, 32, 8, 3), (16, 32, 4, 4), (16, 64, 4, 3), (16, 64, 8, 3), (16, 64, 8, 4), (16, 128, 8, 3),
        (32, 32, 4, 3), (32, 32, 8, 3), (32, 64, 8, 3), (32, 64, 8, 4), (64, 32, 8, 3), (64, 64, 8, 3),
    ),
}  # fmt: skip
"""(BLOCK_H, BLOCK_N, warps, stages)."""


@dataclass(frozen=True)
class Load:
    """Buffers of one batch, with several copies of the cache so that no copy stays in the L2."""

    batch: int
    context: int
    caches: list[torch.Tensor]
    table: torch.Tensor
    lens: torch.Tensor


def load_of(cache: str, batch: int, context: int, most_bytes: int = 600 << 20) -> Load:
    size = batch * context * DIM * CACHES[cache].itemsize
    count = max(1, min(8, most_bytes // size))
    slots = batch * context
    caches = [torch.randn(slots, 1, DIM, device="cuda", dtype=torch.bfloat16).to(CACHES[cache]) for _ in range(count)]
    runs = torch.randperm(slots // 64, device="cuda")
    table = (runs[:, None] * 64 + torch.arange(64, device="cuda")).view(batch, context).int()
    return Load(batch, context, caches, table, torch.full((batch,), context, dtype=torch.int32, device="cuda"))


def named(tile: tuple[int, ...], ctas: int = 1, waves: int = 2) -> dict[str, int]:
    names = ("BLOCK_H", "BLOCK_N", "num_warps", "num_stages")
    return dict(zip(names, tile, strict=True)) | {"ctas_per_sm": ctas, "waves": waves}


def calls(load: Load, heads: int, tile: dict[str, int]) -> list[Callable[[], None]]:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    workspace = DecodeWorkspace.allocate(load.batch, heads, 1, RANK, sms, tile, "cuda")
    plan = plan_decode(load.lens, workspace, tile)
    q = torch.randn(load.batch, heads, DIM, device="cuda", dtype=torch.bfloat16)
    o = torch.empty(load.batch, heads, RANK, device="cuda", dtype=torch.bfloat16)
    rows = torch.arange(load.batch, device="cuda")

    def call(cache: torch.Tensor) -> None:
        decode_attention_fwd(
            q, o, cache, cache[..., :RANK], load.table, rows, load.lens, plan, scale=SCALE, tile=tile
        )  # fmt: skip

    return [lambda cache=cache: call(cache) for cache in load.caches]


def error(cache_name: str, tile: dict[str, int], heads: int = 20) -> float:
    """Root mean square of the difference to fp32, over that of the fp32 result."""
    torch.manual_seed(0)
    lens = torch.tensor([1, 37, 64, 513, 1024, 2048, 3000, 700], dtype=torch.int32, device="cuda")
    batch, context = len(lens), 3008
    cache = torch.randn(batch * context, 1, DIM, device="cuda").to(CACHES[cache_name])
    table = torch.randperm(batch * context, device="cuda").view(batch, context).int()
    q = torch.randn(batch, heads, DIM, device="cuda", dtype=torch.bfloat16)
    o = torch.empty(batch, heads, RANK, device="cuda", dtype=torch.bfloat16)
    rows = torch.arange(batch, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    workspace = DecodeWorkspace.allocate(batch, heads, 1, RANK, sms, tile, "cuda")
    plan = plan_decode(lens, workspace, tile)
    decode_attention_fwd(
        q, o, cache, cache[..., :RANK], table, rows, lens, plan, scale=SCALE, tile=tile, k_scale=0.5, v_scale=0.5
    )  # fmt: skip
    wanted = torch.empty(batch, heads, RANK, device="cuda")
    for i, n in enumerate(lens.tolist()):
        keys = cache[table[i, :n].long(), 0].float() * 0.5
        wanted[i] = torch.softmax(q[i].float() @ keys.T * SCALE, -1) @ keys[:, :RANK]
    return float((o.float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def compile_one(job: tuple[str, tuple[int, ...]]) -> tuple[Any, Any]:
    """Fills Triton's cache on disk: (error, None) or (None, message)."""
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return error(job[0], named(job[1])), None
    except Exception as failure:  # a tile that does not fit is a result
        return None, f"{type(failure).__name__}: {str(failure)[:80]}"


def grid(tile: tuple[int, ...], cache: str) -> Iterator[dict[str, int]]:
    """Programs an SM as far as shared memory may allow it, and waves."""
    item = CACHES[cache].itemsize
    shared = tile[0] * DIM * 2 + (tile[3] - 1) * tile[1] * DIM * item + 1024
    for ctas in (1, 2, 3):
        if ctas == 1 or ctas * shared <= MAX_SHARED_BYTES:
            for waves in (1, 2):
                yield named(tile, ctas, waves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=140.0, help="after which no further time is taken")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    start = time.monotonic()
    jobs = [(cache, tile) for cache, tiles in TILES.items() for tile in tiles]
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        errors = dict(zip(jobs, pool.map(compile_one, jobs), strict=True))
    read = read_ceiling()
    print(f"compiled in {time.monotonic() - start:.0f} s")
    print(f"{torch.cuda.get_device_name()}: read {read / 1e12:.2f} TB/s")
    for (cache, tile), (value, message) in errors.items():
        print(f"{cache:8} {tile!s:16} error {'failed: ' + message if value is None else f'{value:.2e}'}")
    results: list[dict[str, Any]] = []
    for (batch, context), all_heads in LOADS.items():
        for cache, tiles in TILES.items():
            load = load_of(cache, batch, context)
            size = batch * context * DIM * CACHES[cache].itemsize
            for heads in all_heads:
                timed: list[tuple[float, dict[str, int]]] = []
                for tile in tiles:
                    # Blocks of twice the heads are half idle; a group of blocks shares what it reads.
                    if errors[cache, tile][0] is None or tile[0] > max(16, heads):
                        continue
                    if time.monotonic() - start > args.seconds:
                        break
                    for choice in grid(tile, cache):
                        seconds = time_calls(calls(load, heads, choice), minimum=2, budget_s=0.004)
                        timed.append((seconds, choice))
                        results.append(
                            {"batch": batch, "context": context, "cache": cache, "heads": heads, "us": seconds * 1e6}
                            | choice
                        )
                if not timed:
                    continue
                timed.sort(key=lambda pair: pair[0])
                best: dict[str, str] = {}
                for seconds, choice in timed:
                    *tile_numbers, ctas, waves = choice.values()
                    best.setdefault("x".join(map(str, tile_numbers)), f"{seconds * 1e6:.0f} ({ctas} {waves})")
                print(
                    f"{batch:2}x{context} {cache:8} {heads:3} heads"
                    f" | {size / timed[0][0] / read:4.0%} of read | us (programs an SM, waves) | "
                    + "; ".join(f"{name} {value}" for name, value in best.items()),
                    flush=True,
                )
    if args.out is not None:
        (args.out / "latent_tiles.json").write_text(
            json.dumps({"errors": [str(e) for e in errors.items()], "times": results})
        )


if __name__ == "__main__":
    main()
