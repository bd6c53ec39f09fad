"""Experts with four-bit weights and few rows: tiles that read 64 bytes of a row in a step beside tiles that read 128.

    SGLANG_FORCE_ARCH=sm_120 python bench_row_bytes.py [EXPERTS,INTERMEDIATE,HIDDEN,TOP_K,SCHEME ...]

Any GPU; with the variable another one takes the products of SM120. Prints microseconds of a layer's experts, of as many
calls with other routings, and how far each is from reading the chosen experts once.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from moe_problem import Problem
from timing import read_ceiling

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.layers.moe.fused_moe_triton.config_format import TilePair
from sglang.srt.layers.moe.fused_moe_triton.tiles import tile
from sglang.tuning.cost_model import used_blocks
from sglang.tuning.search_space import MoeShape

SHAPES = ("384,256,7168,8,int4_g32", "128,2880,2880,4,mxfp4", "128,1440,2880,4,mxfp4", "128,2880,2880,4,mxfp4_mxfp8")
TOKENS = (16, 64, 256, 1024)
TILES = ((64, 128, 128, 4), (64, 128, 256, 2), (64, 128, 256, 3), (64, 256, 256, 2), (32, 256, 256, 2))
"""BLOCK_N of gate and up, and of down, BLOCK_K and stages; the first are the tiles that read 64 bytes."""


def pair(rows: int, gate_up: int, down: int, columns: int, stages: int) -> TilePair:
    return TilePair(tile(rows, gate_up, columns, 1, 4, stages), tile(rows, down, columns, 1, 4, stages))


def main() -> None:
    read = read_ceiling()
    names = ", ".join(f"{gate_up}/{down} x {columns} x {stages}" for gate_up, down, columns, stages in TILES)
    print(f"read {read / 1e12:.2f} TB/s; BLOCK_N of gate and up / of down x BLOCK_K x stages: {names}")
    for text in sys.argv[1:] or SHAPES:
        *sizes, scheme = text.split(",")
        experts, inter, hidden, top_k = map(int, sizes)
        problem = Problem(MoeShape(experts, inter, hidden, top_k, scheme))
        each = 3 * inter * hidden * SCHEMES[scheme].bytes_per_weight()
        for tokens in TOKENS:
            rows = 16 if tokens * top_k <= 12 * experts else 32
            floor = used_blocks(tokens, experts, top_k, rows)[0] * each / read
            times = [problem.time_layer(tokens, pair(rows, *one)) for one in TILES]
            cells = "  ".join(f"{1e6 * time:7.0f} ({time / floor:.2f})" for time in times)
            print(f"{text:32} {tokens:5} tokens  {cells}  floor {1e6 * floor:.0f}", flush=True)


if __name__ == "__main__":
    main()
