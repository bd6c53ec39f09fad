"""Weight streaming rate of products with few rows: ours against torch.nn.functional.linear (cuBLAS).

    python benchmark/kernels/elementwise/bench_skinny_gemm.py [--tune] [--rows 1,4,16] [--json out.json]

Each row prints the rate at which the weight is read, as a share of the read ceiling. --tune tries the candidate tiles
and prints the best one of each shape. Takes under a minute without --tune.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from timing import copies_for, read_ceiling, time_calls

from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.activation import silu_and_mul
from sglang.srt.layers.triton_ops.skinny_gemm import (
    DEFAULT_TILES,
    MAX_ROWS,
    SkinnyTiles,
    linear_silu_and_mul,
    skinny_linear,
    supports,
)

SHAPES = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (24576, 4096),
    "8B down": (4096, 12288),
    "8B lm_head": (151936, 4096),
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate_up": (6144, 1024),
    "0.6B down": (1024, 3072),
    "0.6B lm_head": (151936, 1024),
}
GEMV_TILES = [
    {"BLOCK_N": n, "BLOCK_K": k, "num_warps": w}
    for n, k, w in [
        (1, 1024, 4),
        (2, 512, 4),
        (4, 512, 4),
        (8, 512, 8),
        (16, 256, 4),
        (4, 1024, 8),
        (2, 1024, 4),
        (8, 256, 4),
        (4, 256, 2),
        (2, 512, 2),
    ]
]
SKINNY_TILES = [
    ({"BLOCK_N": n, "BLOCK_K": k, "num_warps": w, "num_stages": s}, programs)
    for (n, k, w, s), programs in itertools.product(
        [(64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 4, 4), (64, 256, 4, 3), (128, 128, 8, 3)], (264, 396, 792)
    )
]


def candidates(rows: int) -> Iterator[SkinnyTiles]:
    yield DEFAULT_TILES
    if rows == 1:
        for tile in GEMV_TILES:
            yield dataclasses.replace(DEFAULT_TILES, gemv=tile)
    else:
        for tile, programs in SKINNY_TILES:
            yield dataclasses.replace(DEFAULT_TILES, skinny=tile, programs=programs)


class Product:
    """x @ w^T with one shape, over enough weights to miss the caches."""

    def __init__(self, rows: int, cols: int, size: int) -> None:
        self.num_bytes = 2 * cols * size
        self.x = torch.randn(rows, size, dtype=torch.bfloat16, device="cuda")
        count = copies_for(self.num_bytes, most=96)
        self.weights = [torch.randn(cols, size, dtype=torch.bfloat16, device="cuda") for _ in range(count)]

    def seconds(self, product: Callable[[torch.Tensor, torch.Tensor], object]) -> float:
        return time_calls([lambda w=w: product(self.x, w) for w in self.weights])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    ceiling = read_ceiling()
    print(f"{torch.cuda.get_device_name()}: read {ceiling / 1e9:.0f} GB/s; us and share of it")
    results = []
    for name, (cols, size) in SHAPES.items():
        if args.only not in name:
            continue
        for rows in map(int, args.rows.split(",")):
            result = measure(name, rows, cols, size, args.tune)
            results.append(result)
            share = {k: f"{v * 1e6:8.2f} {2 * cols * size / v / ceiling:4.0%}" for k, v in result["seconds"].items()}
            print(f"{name:14s} M={rows:<3d} " + "   ".join(f"{k} {v}" for k, v in share.items()), flush=True)
            if "tile" in result:
                print(f"{'':21s}best {result['tile']}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


def measure(name: str, rows: int, cols: int, size: int, tune: bool) -> dict:
    product = Product(rows, cols, size)
    seconds = {"cublas": product.seconds(F.linear)}
    result = {"shape": name, "rows": rows, "cols": cols, "size": size, "seconds": seconds}
    if rows <= MAX_ROWS and supports(product.x, product.weights[0]):
        seconds["ours"] = product.seconds(skinny_linear)
        pdl.enable(True)
        seconds["ours+pdl"] = product.seconds(skinny_linear)
        pdl.enable(False)
        if "gate_up" in name and rows == 1:
            seconds["ours+silu"] = product.seconds(linear_silu_and_mul)
            seconds["cublas+silu"] = product.seconds(lambda x, w: silu_and_mul(F.linear(x, w)))
        if tune:
            tried = [(time_tiles(product, tiles), tiles) for tiles in candidates(rows)]
            best, tiles = min(tried, key=lambda entry: entry[0])
            seconds["tuned"] = best
            result["tile"] = tiles.gemv if rows == 1 else {**tiles.skinny, "programs": tiles.programs}
    return result


def time_tiles(product: Product, tiles: SkinnyTiles) -> float:
    """Infinite for a tile that does not serve the shape."""
    if not supports(product.x, product.weights[0], tiles):
        return float("inf")
    return product.seconds(lambda x, w: skinny_linear(x, w, tiles))


if __name__ == "__main__":
    main()
