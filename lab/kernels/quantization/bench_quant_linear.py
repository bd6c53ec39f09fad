"""Products with quantized weights: ours against cuBLAS in bf16 and, for FP8, torch's scaled product.

    python lab/kernels/quantization/bench_quant_linear.py [--schemes fp8_block nvfp4] [--only 8B] [--tune]

Few rows: microseconds and the share of the read ceiling at which the weight is streamed. Many: TFLOP/s and the share of
what cuBLAS reaches in bf16 with 8,192 rows. Times include the quantization of the activations. --tune tries other tiles
and names the best. Weights rotate, so that caches are cold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmark" / "kernels"))
from timing import copies_for, read_ceiling, time_calls

from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import arch_by_name, current_arch
from sglang.srt.kernels.conditions import SCALED_MM_SCHEMES
from sglang.srt.kernels.spec import Need
from sglang.srt.layers.moe.expert_weights import ELEMENT_DTYPES, SCALE_DTYPES
from sglang.srt.layers.quantization.linear_weight import LinearWeight, held_scheme
from sglang.srt.layers.quantization.scaled_mm import ScaledWeight, problem_of, scaled_product, scaled_weight
from sglang.srt.layers.triton_ops import linear_tiles, pdl
from sglang.srt.layers.triton_ops.linear_products import PackedWeight, many_rows, operand, pack, packed_linear
from sglang.srt.layers.triton_ops.linear_tiles import FEW_ROWS

SHAPES = {
    "8B qkv": (6144, 4096),
    "8B gate_up": (24576, 4096),
    "8B down": (4096, 12288),
    "GLM-4.7 qkv TP8": (1792, 5120),
    "GLM-4.7 o TP8": (5120, 1536),
    "0.6B qkv": (4096, 1024),
    "30B-A3B qkv TP2": (2560, 2048),
    "30B-A3B o TP2": (2048, 2048),
    "DeepSeek-V3 q_a": (1536, 7168),
    "DeepSeek-V3 kv_a": (576, 7168),
    "GLM-4.7 qkv whole": (14336, 5120),
    "GLM-4.7 o whole": (5120, 12288),
    "DeepSeek-V3 q_b whole": (24576, 1536),
    "DeepSeek-V3 o whole": (7168, 16384),
    "DeepSeek-V3 gate_up whole": (36864, 7168),
}
ROWS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
FEW = 64
FEW_CANDIDATES = ((1024, 512, 1), (1024, 512, 2), (1024, 1024, 1), (1024, 1024, 2), (2048, 512, 2), (2048, 512, 4))
FEW_CANDIDATES += ((2048, 1024, 2), (2048, 1024, 4), (2048, 2048, 2), (4096, 512, 4), (4096, 1024, 4), (4096, 2048, 4))
"""(weights and columns a step, warps) to try for a row or two."""


def weight_of(name: str, rows: int, cols: int) -> LinearWeight:
    """Random codes with scales of about one."""
    quant = ModuleQuant(name, "compressed-tensors", name == "nvfp4")
    scheme = held_scheme(quant)
    data = torch.randint(0, 255, (rows, cols * scheme.bits // 8), dtype=torch.uint8, device="cuda")
    if scheme.element == "e4m3":
        data &= 0xF7  # no NaN
    scale = torch.ones(scheme.scale_shape(rows, cols), device="cuda")
    scale = torch.full_like(scale, 127, dtype=torch.uint8) if scheme.scale == "e8m0" else scale
    factor = torch.ones(rows, device="cuda") if scheme.global_scale else None
    input_scale = torch.ones(1, device="cuda") if quant.static_input else None
    held = scale.to(SCALE_DTYPES[scheme.scale])
    return LinearWeight(data.view(ELEMENT_DTYPES[scheme.element]), scheme, held, factor, input_scale)


def seconds(calls: list[Callable[[], object]]) -> float:
    pdl.enable("pdl" in current_arch().features)
    try:
        return time_calls(calls)
    finally:
        pdl.enable(False)


def ours(x: torch.Tensor, weights: list[PackedWeight], tile: dict[str, int] | None = None) -> float:
    """With the tiles of the tables, or for more than a few rows with `tile`."""
    if tile is not None:
        return seconds([lambda w=w: many_rows(x, w, tile) for w in weights])
    shape = (*weights[0].weight.data.shape[:1], weights[0].cols, False)
    configs = linear_tiles.tile_configs_of(weights[0].weight.scheme, shape, weights[0].arch)
    products = [packed_linear(weight, configs) for weight in weights]
    return seconds([lambda product=product: product(x) for product in products])


def cublas(x: torch.Tensor, rows: int) -> float:
    count = copies_for(2 * rows * x.shape[1], maximum=16)
    weights = [torch.randn(rows, x.shape[1], dtype=torch.bfloat16, device="cuda") for _ in range(count)]
    return time_calls([lambda w=w: F.linear(x, w) for w in weights])


def torch_scaled(x: torch.Tensor, weights: list[PackedWeight]) -> float:
    """torch's scaled product, x quantized by our kernel."""

    def call(held: PackedWeight, view: ScaledWeight) -> torch.Tensor:
        data, scale, _, _ = operand(x, held)
        return scaled_product(data, scale, view, None, x.dtype)

    views = [(weight, scaled_weight(weight.weight)) for weight in weights]
    return seconds([lambda w=w, v=v: call(w, v) for w, v in views])


def candidates() -> list[dict[str, int]]:
    shapes = itertools.product((16, 32, 64, 128), (32, 64, 128, 256), (64, 128, 256), (4, 8), (2, 3, 4, 5))
    keys = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
    return [dict(zip(keys, shape, strict=True)) | {"GROUP_M": 8} for shape in shapes]


def best_tile(x: torch.Tensor, weights: list[PackedWeight]) -> tuple[float, dict[str, int]]:
    """Tiles that ask for more than the GPU has are left out."""
    from triton.runtime.errors import OutOfResources

    best: tuple[float, dict[str, int]] = (float("inf"), {})
    for tile in candidates():
        if tile["BLOCK_M"] > max(16, 2 * len(x)) or (weights[0].product.kind == "group128" and tile["BLOCK_K"] > 128):
            continue
        try:
            best = min(best, (ours(x, weights[:8], tile), tile), key=lambda found: found[0])
        except OutOfResources:
            continue
    return best


def best_few_tile(x: torch.Tensor, weights: list[PackedWeight]) -> tuple[float, dict[str, int]]:
    """As `best_tile`, of products without matrix instructions."""
    now = linear_tiles.few_tile(weights[0].product, weights[0].weight.scheme.bits)
    tiles = [now, *(replace(now, size=size, max_cols=cols, num_warps=warps) for size, cols, warps in FEW_CANDIDATES)]
    found = []
    for tile in tiles:
        with patch.object(linear_tiles, "few_tile", lambda *_, tile=tile: tile):
            found.append(ours(x, weights))
    seconds = min(found)
    return seconds, asdict(tiles[found.index(seconds)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=list(SCHEMES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--arch", help="lay weights out as for this GPU; products of --rows 1 and 2 run on any")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", help="write the results to this file")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    arch, ceiling = arch_by_name(args.arch) if args.arch else current_arch(), read_ceiling()
    peak = 2 * 8192**3 / cublas(torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda"), 8192)
    print(f"{torch.cuda.get_device_name()}: read {ceiling / 1e9:.0f} GB/s, cuBLAS bf16 {peak / 1e12:.0f} TFLOP/s")
    results = []
    for (shape, (rows, cols)), name in itertools.product(SHAPES.items(), args.schemes):
        if args.only not in shape:
            continue
        num_bytes = int(rows * cols * SCHEMES[name].bytes_per_weight())
        weights = [pack(weight_of(name, rows, cols), arch) for _ in range(copies_for(num_bytes, maximum=64))]
        for num_rows in args.rows:
            x = torch.randn(num_rows, cols, dtype=torch.bfloat16, device="cuda")
            found = {"ours": ours(x, weights), "cublas_bf16": cublas(x, rows)}
            if name in SCALED_MM_SCHEMES and num_rows >= 16 and not problem_of(Need("linear", quant=name)):
                found["torch_scaled_mm"] = torch_scaled(x, weights)
            line = {"shape": shape, "scheme": name, "rows": num_rows, "seconds": found}
            if args.tune:
                found["tuned"], line["tile"] = (best_few_tile if num_rows <= FEW_ROWS else best_tile)(x, weights)
            results.append(line)
            print(text(line, num_bytes, 2 * num_rows * rows * cols, ceiling, peak), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


def text(line: dict, num_bytes: int, operations: int, ceiling: float, peak: float) -> str:
    few = line["rows"] <= FEW
    cells = []
    for name, value in line["seconds"].items():
        quantized = name != "cublas_bf16"
        rate = f"{num_bytes / value / ceiling:4.0%} read" if few else f"{operations / value / peak:4.0%} of cuBLAS"
        cells.append(f"{name} {value * 1e6:8.1f} us" + (f" {rate}" if quantized else ""))
    speedup = line["seconds"]["cublas_bf16"] / line["seconds"]["ours"]
    tile = f"  {line['tile']}" if "tile" in line else ""
    return f"{line['shape']:16} {line['scheme']:13} {line['rows']:5}  {'  '.join(cells)}  {speedup:.2f}x{tile}"


if __name__ == "__main__":
    main()
