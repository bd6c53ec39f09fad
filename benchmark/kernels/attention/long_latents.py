"""Decoding over latents behind long contexts, as ranks have it that share out heads (64 heads over all tokens) or
tokens (128 heads over half of them): the same products, and half of the bytes.

    python long_latents.py [--processes 12] [--seconds 100] [--cache bfloat16]

Each tile is compiled in a process of its own first. Prints for each load the microseconds of each tile with its TB/s of
latents and TFLOP/s, the best first; both launches count, pieces and what puts them together.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from latent_tiles import CACHES, DIM, RANK, calls, compile_one, grid, load_of
from timing import matmul_ceiling, read_ceiling, time_calls

SHOWN = 24
LOADS = ((1, 65536, 64), (1, 32768, 128), (8, 65536, 64), (8, 32768, 128), (1, 65536, 128), (1, 32768, 64))
"""Requests, tokens of each that a rank has, query heads."""
TILES = {
    "bfloat16": (
        (64, 64, 8, 2), (64, 32, 8, 3), (64, 32, 8, 2), (32, 32, 4, 3), (32, 32, 8, 3), (32, 64, 8, 3), (16, 32, 4, 3),
        (32, 16, 4, 3), (32, 16, 8, 3), (32, 32, 8, 2),
    ),
    "fp8_e4m3": ((64, 64, 8, 3), (64, 32, 8, 3), (32, 64, 8, 3), (32, 32, 4, 3), (16, 64, 8, 3), (16, 128, 8, 3)),
}  # fmt: skip
"""(heads, tokens, warps, stages). The last four of bfloat16 fit SM120."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=100.0, help="after which no further load is timed")
    parser.add_argument("--cache", choices=tuple(CACHES), default="bfloat16")
    args = parser.parse_args()
    started = time.monotonic()
    jobs = [(args.cache, tile) for tile in TILES[args.cache]]
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        errors = dict(zip(TILES[args.cache], pool.map(compile_one, jobs), strict=True))
    for tile, (value, message) in errors.items():
        print(f"{tile!s:18} error {'failed: ' + message if value is None else f'{value:.2e}'}")
    read, matmul = read_ceiling(), matmul_ceiling()
    name = torch.cuda.get_device_name()
    print(f"{name}: read {read / 1e12:.2f} TB/s, products {matmul / 1e12:.0f} TFLOP/s", flush=True)
    for batch, context, heads in LOADS:
        if time.monotonic() - started > args.seconds:
            break
        load, timed = load_of(args.cache, batch, context), []
        size, flops = batch * context * DIM * CACHES[args.cache].itemsize, 2 * batch * context * heads * (DIM + RANK)
        for tile in TILES[args.cache]:
            if errors[tile][0] is None:
                continue
            for choice in grid(tile, args.cache):
                seconds = time_calls(calls(load, heads, choice), least=4, budget_s=0.01)
                timed.append((seconds, f"{'x'.join(map(str, tile))} {choice['ctas_per_sm']} {choice['waves']}"))
        print(f"\n{batch} x {context:,} tokens, {heads} heads: tile, programs an SM, waves | us | TB/s | TFLOP/s")
        for seconds, tile in sorted(timed)[:SHOWN]:
            print(f"{tile:20} | {seconds * 1e6:7.1f} | {size / seconds / 1e12:5.2f} | {flops / seconds / 1e12:4.0f}")
        del load
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
