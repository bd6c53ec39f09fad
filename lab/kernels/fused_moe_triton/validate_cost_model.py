"""Time the whole space of tiles on this GPU, and compare the tiles that the cost model chooses with the fastest ones.

    python lab/kernels/fused_moe_triton/validate_cost_model.py --output measured.json [--minutes 5]

Prints, for each shape and number of tokens, the time of the chosen tiles over the best time, and writes every time:
`fit_cost_model.py` fits the constants on them. The space is that of the tuner, but of the pipelines only the deepest
that one and two programs on an SM allow, and without tiles whose rows would be mostly padding. Each shape gets an equal
part of the time; what is missing when that is up is said.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmark" / "kernels" / "fused_moe_triton"))
import fit_cost_model
from moe_problem import Kept, Problem, compile_all
from tqdm import tqdm

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import ArchTraits, current_arch, device_name
from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.kernels.spec import TileRecord
from sglang.srt.layers.moe.fused_moe_triton.tiles import GroupedTile
from sglang.tuning.search_space import (
    KINDS,
    MoeShape,
    candidates,
    deepest_stages,
)

SHAPES = (
    MoeShape(128, 768, 2048, 8, None),
    MoeShape(256, 512, 2048, 8, None),
    MoeShape(128, 768, 2048, 8, "fp8_block"),
    MoeShape(256, 256, 7168, 8, "fp8_block"),
    MoeShape(161, 192, 5120, 9, "fp8_channel"),
    MoeShape(161, 384, 5120, 9, "fp8_channel"),
    MoeShape(384, 256, 7168, 8, "int4_g32"),
)
BATCH_SIZES = (1, 8, 32, 64, 256, 512, 1024, 4096)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0, help="for timing; compiling comes on top")
    parser.add_argument("--processes", type=int, default=14, help="that compile")
    parser.add_argument("--batch-size", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--only", default="", help="shapes whose description contains this")
    parser.add_argument(
        "--shape",
        type=parse_shape,
        nargs="+",
        default=SHAPES,
        help="others, as 64,1408,2048,6,fp8_block: E,N,H,top-k,scheme",
    )
    args = parser.parse_args(argv)
    arch = current_arch()
    shapes = [shape for shape in args.shape if args.only in str(shape)]
    kept = usable_tiles(shapes, arch, args.processes)
    content: dict[str, Any] = {"device": device_name(), "product": arch.product, "points": []}
    points = content["points"]
    for point in measure(shapes, kept, args.batch_size, args.minutes * 60):
        points.append(point)
        args.output.write_text(json.dumps(content) + "\n")  # an interruption leaves what was timed
    missing = len(shapes) * len(args.batch_size) - len(points)
    if missing:
        print(f"The time was up before {missing} points were timed.")
    judged_arch, measured = fit_cost_model.read_measured(args.output)
    choices = fit_cost_model.judge(measured, judged_arch, fit_cost_model.DEFAULT)
    print("Time of the chosen tiles over the best measured time:", *fit_cost_model.table(choices), sep="\n")
    return 0


def parse_shape(text: str) -> MoeShape:
    """ "64,1408,2048,6,fp8_block"; the scheme "bf16" is that of 16-bit weights."""
    *sizes, scheme = text.split(",")
    if len(sizes) != 4 or not all(size.isdecimal() for size in sizes) or scheme not in ("bf16", *SCHEMES):
        raise argparse.ArgumentTypeError(f"{text!r} is not E,N,H,top-k,scheme with one of bf16, {', '.join(SCHEMES)}")
    experts, intermediate, hidden, top_k = map(int, sizes)
    return MoeShape(experts, intermediate, hidden, top_k, None if scheme == "bf16" else scheme)


def narrow_space(shape: MoeShape, kind: str, arch: ArchTraits) -> list[GroupedTile]:
    """With the deepest pipelines only."""
    possible = candidates(shape, kind, arch, lambda product, arch: None).unknown
    return [tile for tile in possible if tile["num_stages"] in deepest_stages(shape.scheme, kind, tile, arch)]


def usable_tiles(shapes: Sequence[MoeShape], arch: ArchTraits, processes: int) -> dict[MoeShape, dict[str, list[Any]]]:
    """The tiles of every shape that can be used, with what they cost."""
    possible = {shape: {kind: narrow_space(shape, kind, arch) for kind in KINDS} for shape in shapes}
    kept: dict[MoeShape, dict[str, list[Any]]] = {}
    for shape, costs in compile_all(possible, processes).items():
        usable = {
            (k, key): cost for (k, key), cost in costs.items() if isinstance(cost, TileRecord) and not cost.spills
        }
        kept[shape] = {
            kind: [(t, usable[kind, tile_key(t)]) for t in tiles if (kind, tile_key(t)) in usable]
            for kind, tiles in possible[shape].items()
        }
        print(
            f"{shape}: "
            + ", ".join(f"{len(kept[shape][kind])} of {len(possible[shape][kind])} {kind}" for kind in KINDS)
        )
    return kept


def measure(
    shapes: Sequence[MoeShape], kept: Mapping[MoeShape, Kept], batch_sizes: Sequence[int], seconds: float
) -> Iterator[dict[str, Any]]:
    """Every point until the time is up; each shape gets an equal part of it, and what it leaves goes to the others."""
    end = time.monotonic() + seconds
    with tqdm(total=len(shapes) * len(batch_sizes), unit="point") as progress:
        for index, shape in enumerate(shapes):
            problem = Problem(shape)
            until = time.monotonic() + (end - time.monotonic()) / (len(shapes) - index)
            for tokens in batch_sizes:
                if time.monotonic() < until:
                    yield _point(problem, kept[shape], tokens)
                progress.update()
            del problem


def _point(problem: Problem, kept: Kept, tokens: int) -> dict[str, Any]:
    timings: dict[str, list[Any]] = {}
    for kind in KINDS:
        best = float("inf")
        timings[kind] = []
        for tile, record in kept[kind]:
            if mostly_padding(problem.shape, tokens, tile):
                continue
            seconds = problem.time(kind, tile, tokens, best)
            best = min(best, seconds)
            cost = [record.smem, record.registers, record.spills, record.stack, record.mma]
            timings[kind].append([tile, cost, seconds])
    return {"shape": asdict(problem.shape), "num_tokens": tokens, "timings": timings}


def mostly_padding(shape: MoeShape, num_tokens: int, tile: Mapping[str, int]) -> bool:
    """A block four times as high as what an expert has on average, and more than the smallest."""
    rows = max(1.0, num_tokens * shape.top_k / shape.num_experts)
    return tile["BLOCK_M"] > max(16, 4 * rows)


if __name__ == "__main__":
    raise SystemExit(main())
