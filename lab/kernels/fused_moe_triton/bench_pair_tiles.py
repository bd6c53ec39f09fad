"""Times of a layer's experts with few tokens for several tiles of PAIR_TILES, beside the grouped products.

python bench_pair_tiles.py 32,2880,2880,4,mxfp4 [numbers of tokens]
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmark" / "kernels" / "fused_moe_triton"))
from moe_problem import Problem

from sglang.srt.layers.moe.fused_moe_triton.fused_moe import product_for
from sglang.srt.layers.moe.fused_moe_triton.tiles import FEW, MANY, PAIR_TILES, PairTile
from sglang.tuning.search_space import MoeShape

UNROLLS = (1, 2)
ROWS = (1, 2, 4)
WARPS = (1,)


def main() -> None:
    sizes, counts = sys.argv[1].split(","), [int(text) for text in sys.argv[2:]] or [1, 2, 3, 4]
    experts, inter, hidden, top_k = map(int, sizes[:4])
    shape = MoeShape(experts, inter, hidden, top_k, sizes[4])
    problem = Problem(shape)
    kind = product_for(problem.w13).pair_kind
    default = PAIR_TILES[kind]

    def seconds_of(count: int, way: str) -> float:
        configs = tuple(config for config in problem.configs() if config.variant == way)
        return problem.time_configs(count, configs)

    for count in counts:
        print(f"{count} tokens: pairs {1e6 * seconds_of(count, FEW):.1f} us", end="")
        print(f", grouped {1e6 * seconds_of(count, MANY):.1f} us")
    found = []
    for rows, unroll, warps in itertools.product(ROWS, UNROLLS, WARPS):
        one = PairTile(1024 * rows * warps, 1024, unroll, warps, 1024)
        for place in (0, 1):
            tried = (one, default[1]) if place == 0 else (default[0], one)
            PAIR_TILES[kind] = tried  # type: ignore[index]
            seconds = seconds_of(1, FEW)
            found.append((seconds, ("gate_up", "down")[place], rows, unroll, warps))
    for seconds, which, rows, unroll, warps in sorted(found):
        print(f"{1e6 * seconds:.1f} us: {which} with {rows} rows a warp, {unroll} steps at once, {warps} warps")


if __name__ == "__main__":
    main()
