"""Products with few rows: ours against torch.nn.functional.linear (cuBLAS), behind a norm as in a step.

    python lab/kernels/elementwise/bench_skinny_gemm.py [--tune] [--only 8B] [--rows 1 2 4 8 16] [--json out.json]

Each line prints microseconds of a norm and the product behind it, and the share of the read ceiling at which the weight
is read in that time; "alone" is the product without a norm. With one row `gemv` is timed besides. Then the sum over the
layers of Qwen3-8B. --tune compiles the candidate tiles in many processes, tries them with --tune-rows rows and
prints the best of each shape. Takes about 30 seconds, with --tune 80.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmark" / "kernels"))
from timing import copies_for, read_ceiling, time_calls

from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.gemv import gemv
from sglang.srt.layers.triton_ops.norm import rmsnorm
from sglang.srt.layers.triton_ops.skinny_gemm import MAX_ROWS, SkinnyTile, skinny_gemm, skinny_gemm_kernel, tile_for

SHAPES = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (24576, 4096),
    "8B down": (4096, 12288),
    "8B lm_head": (151936, 4096),
    "27B in_proj": (16384, 5120),
    "27B o": (5120, 6144),
    "27B gate_up": (34816, 5120),
    "27B down": (5120, 17408),
    "0.6B qkv": (4096, 1024),
    "0.6B down": (1024, 3072),
}
STEP = {"8B qkv": 36, "8B o": 36, "8B gate_up": 36, "8B down": 36, "8B lm_head": 1}
"""How often Qwen3-8B multiplies by each in a step."""
BLOCKS = [
    (16, 256, 2, 4),
    (16, 256, 4, 6),
    (16, 512, 4, 3),
    (32, 64, 4, 12),
    (32, 128, 2, 7),
    (32, 128, 4, 5),
    (32, 128, 4, 7),
    (32, 256, 4, 4),
    (64, 64, 4, 6),
    (64, 64, 4, 9),
    (64, 128, 4, 4),
    (64, 128, 4, 5),
    (64, 128, 8, 5),
    (128, 64, 4, 5),
    (128, 64, 8, 5),
]
"""Columns of y, columns of w, warps and stages; without wgmma all fit 101,376 bytes."""
AHEAD = [512, 128, 1024, 2048, 4096]
"""Columns that are asked for before the wait: the first with all blocks, the others with the best three."""
TUNE_BUDGET_S, BUDGET_S = 0.02, 0.05


def _tile(blocks: tuple[int, int, int, int], ahead: int) -> SkinnyTile:
    keys = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages", "AHEAD")
    return dict(zip(keys, (*blocks, ahead), strict=True))


def _text(tile: SkinnyTile) -> str:
    return "{BLOCK_N}x{BLOCK_K}, {AHEAD} ahead, {num_warps} warps, {num_stages} stages".format(**tile)


class Product:
    """x @ w^T with one shape, over enough weights to miss the caches."""

    def __init__(self, cols: int, size: int) -> None:
        self.x = torch.randn(MAX_ROWS, size, dtype=torch.bfloat16, device="cuda")
        self.gain = torch.ones(size, dtype=torch.bfloat16, device="cuda")
        count = copies_for(2 * cols * size, maximum=96)
        self.weights = [torch.randn(cols, size, dtype=torch.bfloat16, device="cuda") for _ in range(count)]

    def seconds(
        self, product: Callable[[torch.Tensor, torch.Tensor], object], rows: int, norm: bool, budget_s: float = BUDGET_S
    ) -> float:
        x = self.x[:rows]

        def call(w: torch.Tensor) -> None:
            product(rmsnorm(x, self.gain, 1e-6) if norm else x, w)

        pdl.enable(True)
        try:
            return time_calls([lambda w=w: call(w) for w in self.weights], budget_s=budget_s)
        finally:
            pdl.enable(False)

    def seconds_of_tile(self, tile: SkinnyTile, rows: int) -> float:
        try:
            return self.seconds(lambda x, w: skinny_gemm(x, w, tile), rows, True, TUNE_BUDGET_S)
        except OutOfResources:
            return float("inf")


def measure(product: Product, rows: int) -> dict[str, float]:
    """Seconds."""
    seconds = {
        "cublas": product.seconds(F.linear, rows, True),
        "ours": product.seconds(skinny_gemm, rows, True),
        "cublas alone": product.seconds(F.linear, rows, False),
        "ours alone": product.seconds(skinny_gemm, rows, False),
    }
    if rows == 1:
        seconds |= {"gemv": product.seconds(gemv, 1, True), "gemv alone": product.seconds(gemv, 1, False)}
    return seconds


def best_tiles(product: Product, rows: int) -> list[tuple[float, SkinnyTile]]:
    """The fastest five, with their seconds."""
    by_blocks = {blocks: product.seconds_of_tile(_tile(blocks, AHEAD[0]), rows) for blocks in BLOCKS}
    best = heapq.nsmallest(3, by_blocks, key=by_blocks.__getitem__)
    times = [(seconds, _tile(blocks, AHEAD[0])) for blocks, seconds in by_blocks.items()]
    more = [_tile(blocks, ahead) for blocks in best for ahead in AHEAD[1:]]
    times += [(product.seconds_of_tile(tile, rows), tile) for tile in more]
    return heapq.nsmallest(5, times, key=lambda pair: pair[0])


def compile_tiles(tiles: Sequence[SkinnyTile]) -> None:
    """Into Triton's cache on disk, for shapes that all blocks divide."""
    operand = torch.empty(16, 4096, dtype=torch.bfloat16, device="cuda")
    for tile in tiles:
        try:
            skinny_gemm_kernel.warmup(
                operand, operand, operand, operand, 4, 4096, 4096, 4096,
                **tile, BLOCK_M=MAX_ROWS, EVEN_K=True, HAS_BIAS=False, PDL=True, launch_pdl=True, grid=(1,),
            )  # fmt: skip
        except Exception as error:  # what does not compile is named, and raises again where it is timed
            print(f"{tile}: {str(error)[-200:]}", flush=True)


def compile_all() -> None:
    start, count = time.monotonic(), min(14, os.cpu_count() or 1)
    tiles = [_tile(blocks, ahead) for blocks in BLOCKS for ahead in AHEAD]
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        list(pool.map(compile_tiles, [tiles[i::count] for i in range(count)]))
    print(f"{len(tiles)} tiles compiled in {time.monotonic() - start:.0f} s", flush=True)


def text_of(seconds: dict[str, float], num_bytes: int, ceiling: float) -> str:
    return "  ".join(f"{name} {s * 1e6:7.1f} {num_bytes / s / ceiling:4.0%}" for name, s in seconds.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--tune-rows", type=int, default=4)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    if args.tune:
        compile_all()
    ceiling = read_ceiling()
    print(f"{torch.cuda.get_device_name()}: read {ceiling / 1e9:.0f} GB/s; us and share of it")
    results: dict[str, dict] = {}
    for name, (cols, size) in SHAPES.items():
        if args.only not in name:
            continue
        product = Product(cols, size)
        for rows in args.rows:
            seconds = results[f"{name} {rows}"] = measure(product, rows)
            print(f"{name:12} {rows:2}  {text_of(seconds, 2 * cols * size, ceiling)}", flush=True)
        if args.tune:
            best = best_tiles(product, args.tune_rows)
            results[f"{name} tuned"] = {_text(tile): seconds for seconds, tile in best}
            tiles = "; ".join(f"{s * 1e6:.1f} us {_text(tile)}" for s, tile in best)
            print(f"  now {_text(tile_for(cols, size))}; best {tiles}", flush=True)
    for rows in args.rows:
        if all(f"{name} {rows}" in results for name in STEP):
            sums = {
                kind: sum(results[f"{name} {rows}"][kind] * times for name, times in STEP.items())
                for kind in results[f"8B qkv {rows}"]
            }
            print(f"Qwen3-8B, {rows} rows: " + "  ".join(f"{kind} {s * 1e3:.2f} ms" for kind, s in sums.items()))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
