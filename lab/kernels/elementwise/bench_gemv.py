"""Weight streaming rate of products with one row: ours against torch.nn.functional.linear (cuBLAS).

    python lab/kernels/elementwise/bench_gemv.py [--tune] [--json out.json]

Each row prints the rate at which the weight is read, as a share of the read ceiling. --tune tries the candidate tiles
and prints the best one of each shape. Then what logits cost, for several numbers of rows: in fp32 from the product, and
rounded to bf16 and widened. Takes under a minute without --tune.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmark" / "kernels"))
from timing import copies_for, read_ceiling, time_calls

from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.gemv import TILE, WHOLE_ROW_TILES, GemvTile, gemv, linear

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
    "30B-A3B router": (128, 2048),
    "GLM-4.7 router": (160, 5120),
    "DeepSeek-V3 router": (256, 7168),
    "GPT-OSS-20B router": (32, 2880),
}
LOGITS_ROWS = (1, 8, 64, 256)
TILES = [
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


class Product:
    """x @ w^T with one shape, over enough weights to miss the caches."""

    def __init__(self, cols: int, size: int, rows: int = 1) -> None:
        self.num_bytes = 2 * cols * size
        self.x = torch.randn(rows, size, dtype=torch.bfloat16, device="cuda")
        count = copies_for(self.num_bytes, maximum=96)
        self.weights = [torch.randn(cols, size, dtype=torch.bfloat16, device="cuda") for _ in range(count)]

    def seconds(self, product: Callable[[torch.Tensor, torch.Tensor], object]) -> float:
        return time_calls([lambda w=w: product(self.x, w) for w in self.weights])

    def seconds_of_tile(self, tile: GemvTile) -> float:
        return self.seconds(lambda x, w: gemv(x, w, tile))


def measure(cols: int, size: int, tune: bool) -> dict:
    product = Product(cols, size)
    seconds = {"cublas": product.seconds(F.linear), "ours": product.seconds(gemv)}
    result = {"cols": cols, "size": size, "seconds": seconds}
    pdl.enable(True)
    seconds["ours+pdl"] = product.seconds(gemv)
    pdl.enable(False)
    if tune:
        result["tile"] = min([TILE, *WHOLE_ROW_TILES, *TILES], key=product.seconds_of_tile)
        seconds["tuned"] = product.seconds_of_tile(result["tile"])
    return result


def measure_logits(cols: int, size: int, rows: int) -> dict[str, float]:
    """Seconds."""
    product = Product(cols, size, rows)
    return {
        "fp32": product.seconds(lambda x, w: linear(x, w, out_dtype=torch.float32)),
        "bf16, widened": product.seconds(lambda x, w: linear(x, w).float()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    ceiling = read_ceiling()
    print(f"{torch.cuda.get_device_name()}: read {ceiling / 1e9:.0f} GB/s; us and share of it")
    results: dict[str, dict] = {}
    for name, (cols, size) in SHAPES.items():
        if args.only not in name:
            continue
        result = results[name] = measure(cols, size, args.tune)
        share = {k: f"{v * 1e6:8.2f} {2 * cols * size / v / ceiling:4.0%}" for k, v in result["seconds"].items()}
        best = f"   best {result['tile']}" if args.tune else ""
        print(f"{name:18s} " + "   ".join(f"{k} {v}" for k, v in share.items()) + best, flush=True)
    for name, (cols, size) in SHAPES.items():
        if "lm_head" not in name or args.only not in name:
            continue
        for rows in LOGITS_ROWS:
            seconds = results[f"{name}, logits of {rows}"] = measure_logits(cols, size, rows)
            print(f"{name}, logits of {rows:3d}: " + "   ".join(f"{k} {v * 1e6:8.2f}" for k, v in seconds.items()))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
