"""`bench_fused_moe.py --sweep`: a small space of tiles, timed within minutes, written as a tuning file for each shape.

The whole space is `tuning_fused_moe_triton.py`'s. Here are the tiles that a person would try: for each number of rows
that an expert gets, one or two block heights, with widths and depths that fill shared memory sensibly.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import triton
from moe_problem import Problem, compile_tiles, time_graph
from tuning_fused_moe_triton import about_run, output_path

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import ArchTraits, current_arch, device_name
from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.kernels.spec import TileRecord
from sglang.srt.layers.moe.fused_moe_triton.config_format import Content, TilePair, write_content
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import fused_moe
from sglang.srt.layers.moe.fused_moe_triton.search_space import KINDS, MoeShape, unfit, why_not
from sglang.srt.layers.moe.fused_moe_triton.tiles import MoeTiles, Tile, few_pairs, tile, tile_rows
from sglang.srt.layers.triton_ops.scaled_dot import product_of

if TYPE_CHECKING:
    from bench_fused_moe import Shape

BLOCK_M = (16, 32, 64, 128)
WIDTHS = {"gate_up": (32, 64, 128), "down": (64, 128, 256)}
DEPTHS = {16: (64, 128), 8: (128, 256), 4: (128,)}
"""BLOCK_K by bits of a weight."""
STAGES = (2, 3, 4, 5)
LARGE_BATCH = 1024
MIN_SHARED, MAX_ACCUMULATORS = 24 << 10, 128
SCHEMES_OF = {"bf16": None, "int4": "int4_g32"}


def sweep(shapes: Sequence[Shape], batches: Sequence[int], folder: Path, processes: int) -> None:
    arch = current_arch()
    for shape in shapes:
        scheme = SCHEMES_OF.get(shape.kind, shape.kind)
        own = MoeShape(shape.num_experts, shape.intermediate, shape.hidden, shape.top_k, scheme)
        grouped = [n for n in batches if not few_pairs(n * shape.top_k, shape.num_experts)]
        tiles = {kind: list(candidates(own, kind, grouped, arch)) for kind in KINDS}
        print(f"{own}: {len(tiles['gate_up'])} + {len(tiles['down'])} tiles, {len(grouped)} batch sizes", flush=True)
        best = dict(measured(own, tiles, grouped, arch, processes))
        version = triton.__version__
        path = output_path(own, folder, version, device_name())
        write_content(path, Content(about_run(own, arch, version) | {"source": "measured"}, best))
        print(f"  wrote {path}", flush=True)


def candidates(shape: MoeShape, kind: str, batches: Sequence[int], arch: ArchTraits) -> Iterator[Tile]:
    """Tiles for any of the batch sizes, those of the default rule among them."""
    scheme = SCHEMES[shape.scheme] if shape.scheme else None
    heights = {m for n in batches for m in heights_for(n * shape.top_k / shape.num_experts)}
    seen: set[str] = set()
    default = [getattr(row, kind) for row in tile_rows(product_of(scheme, arch.features).tile_kind, arch.features)]
    space = itertools.product(sorted(heights), WIDTHS[kind], DEPTHS[scheme.bits if scheme else 16], (4, 8), STAGES)
    made = (tile(m, n, k, 1 if m < 64 else 8, warps, stages) for m, n, k, warps, stages in space)
    for candidate in (*default, *(t for t in made if sensible(shape, kind, t, arch))):
        key = tile_key(candidate)
        if key not in seen and candidate["BLOCK_M"] in heights and why_not(shape, kind, candidate, arch) is None:
            seen.add(key)
            yield candidate


def heights_for(rows: float) -> tuple[int, ...]:
    """BLOCK_M: the mean number of rows of an expert, and twice that, because half of the experts have more."""
    if rows <= BLOCK_M[0] / 2:
        return (BLOCK_M[0],)
    at = next((i for i, m in enumerate(BLOCK_M) if m >= rows), len(BLOCK_M))
    at = min(at, len(BLOCK_M) - 2)
    return BLOCK_M[at : at + 2]


def sensible(shape: MoeShape, kind: str, candidate: Tile, arch: ArchTraits) -> bool:
    """Warps by the sums a thread holds; stages that fill the memory's pipe and leave room in shared memory."""
    m, n, k, warps = (candidate[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps"))
    width = 2 if kind == "gate_up" else 1
    sums = m * n * width / (32 * warps)
    bits = SCHEMES[shape.scheme].bits if shape.scheme else 16
    stage = k * (n * width * bits + m * (8 if bits == 8 else 16)) // 8
    shared = stage * candidate["num_stages"]
    return (sums > 32 or warps == 4) and sums <= MAX_ACCUMULATORS and MIN_SHARED <= shared <= arch.smem_per_block


def measured(
    shape: MoeShape, tiles: dict[str, list[Tile]], batches: Sequence[int], arch: ArchTraits, processes: int
) -> Iterator[tuple[int, TilePair]]:
    costs = compile_tiles(shape, tiles, processes)
    kept: dict[str, list[tuple[Tile, TileRecord]]] = {kind: [] for kind in KINDS}
    for kind in KINDS:
        for candidate in tiles[kind]:
            record = costs[kind, tile_key(candidate)]
            if isinstance(record, TileRecord) and unfit(record, arch) is None:
                kept[kind].append((candidate, record))
    problem = Problem(shape)
    for num_tokens in batches:
        heights = heights_for(num_tokens * shape.top_k / shape.num_experts)
        near = {kind: [entry for entry in kept[kind] if entry[0]["BLOCK_M"] in heights] for kind in KINDS}
        _, pair, _ = problem.fastest(near, num_tokens)
        before, after = problem.time_layer(num_tokens, None), problem.time_layer(num_tokens, pair)
        keys = " | ".join(tile_key(t) for t in (pair.gate_up, pair.down))
        if num_tokens >= LARGE_BATCH:
            print_column_limits(problem, num_tokens, pair)
        print(f"  {num_tokens:>5} tokens: {before * 1e6:.1f} -> {after * 1e6:.1f} us  {keys}", flush=True)
        yield num_tokens, pair


def print_column_limits(problem: Problem, num_tokens: int, pair: TilePair) -> None:
    """Times with `pair_out_bytes` of `fused_moe`: whether sums from the L2 cache pay on this GPU."""
    inputs, tiles = problem.inputs, MoeTiles(float("inf"), pair.gate_up, pair.down)
    cells = []
    for mib in (0, 16, 24, 32, 48, 64):
        calls = [
            functools.partial(
                fused_moe, inputs.x, problem.w13, problem.w2, inputs.topk_weights, ids, tiles=tiles,
                features=problem.features, pair_out_bytes=mib << 20 if mib else None,
            )
            for ids in inputs.topk_ids
        ]  # fmt: skip
        cells.append(f"{f'{mib} MiB' if mib else 'all'} {time_graph(calls) * 1e6:.1f} us")
    print(f"  {num_tokens:>5} tokens, columns summed at once: {', '.join(cells)}", flush=True)
