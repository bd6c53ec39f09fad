"""Prompts of recurrent layers: chunks as they were, and as they are with several tiles. Times and errors.

    python benchmark/kernels/recurrent/compare_chunks.py [--json out.json]

Each row: both launches, the first launch alone, and the largest of the errors of outputs and states against the
recurrence in fp64, over prompts with and without a state before.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import earlier_channels
import earlier_chunks
from bench_recurrent import Shape, inputs, randn
from timing import time_calls

from sglang.srt.layers.recurrent import native
from sglang.srt.layers.recurrent.rule import Rule, gated_delta_rule, kimi_delta_rule
from sglang.srt.layers.recurrent.triton_ops import (
    channel_local,
    channel_recurrence,
    chunk_local,
    chunk_scan,
    recurrence,
)

SHAPES = (
    Shape("gated delta, 32 heads", gated_delta_rule(128), 16, 32, 128, 128),
    Shape("gated delta, 16 heads", gated_delta_rule(128), 8, 16, 128, 128),
    Shape("kimi, 32 heads", kimi_delta_rule(128, 0.0), 32, 32, 128, 128),
    Shape("mamba2, 64 heads", Rule(delta=False), 8, 64, 128, 64),
    Shape("mamba2, 64 heads, 256 x 64", Rule(delta=False), 8, 64, 256, 64),
)
PROMPTS = ((8192, 1), (2048, 4))
TILES = {
    "64/4": {"BLOCK_V": 64, "PART": 64, "num_warps": 4, "num_stages": 3},
    "64/4 one buffer": {"BLOCK_V": 64, "PART": 64, "num_warps": 4, "num_stages": 2},
    "64/4 three buffers": {"BLOCK_V": 64, "PART": 64, "num_warps": 4, "num_stages": 4},
    "32/2": {"BLOCK_V": 32, "PART": 32, "num_warps": 2, "num_stages": 3},
    "32/2 one buffer": {"BLOCK_V": 32, "PART": 32, "num_warps": 2, "num_stages": 2},
    "16/1": {"BLOCK_V": 16, "PART": 16, "num_warps": 1, "num_stages": 3},
}
"""Columns of a program / its warps."""
TRIED = [(32, 4, name) for name in TILES if name != "64/4"]
TRIED += [(32, 2, "64/4"), (64, 4, "64/4 one buffer"), (64, 8, "32/2 one buffer")]
Extend = Callable[..., None]


class Nothing:
    """In place of a kernel."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def arguments(shape: Shape, length: int, count: int) -> tuple[Any, ...]:
    given = list(inputs(shape, length * count))
    if shape.rule.by_channel:
        given[3] = randn(length * count, shape.heads, shape.key_dim)
        given[6] = randn(shape.heads, shape.key_dim, dtype=torch.float32)
    states = randn(count + 1, shape.heads, shape.key_dim, shape.value_dim, dtype=torch.float32)
    slots = torch.arange(1, count + 1, device="cuda")
    prefix = torch.zeros(count, dtype=torch.int32, device="cuda")
    loc = torch.arange(count + 1, dtype=torch.int32, device="cuda") * length
    out = randn(length * count, shape.heads, shape.value_dim)
    return shape.rule, *given, states, slots, slots, prefix, loc, out


def seconds(extend: Extend, shape: Shape, length: int, count: int) -> float:
    sets = [arguments(shape, length, count) for _ in range(3)]
    return time_calls([lambda given=given: extend(*given) for given in sets])


def error(extend: Extend, shape: Shape) -> tuple[float, float]:
    """Of outputs and of states, relative to their norms."""
    keys = 4 if shape.rule.by_channel else 2
    small = Shape(shape.name, shape.rule, keys, 4, shape.key_dim, shape.value_dim)
    torch.manual_seed(0)
    rule, *given = arguments(small, 1001, 2)
    given[-3] = torch.tensor([0, 5], dtype=torch.int32, device="cuda")
    exact = [x.double() if x is not None and x.is_floating_point() else x for x in given]
    extend(rule, *given)
    native.recurrence_extend(rule, *exact)
    pairs = ((given[-1], exact[-1]), (given[-6][1:], exact[-6][1:]))
    return tuple(float((mine.double() - right).norm() / right.norm()) for mine, right in pairs)  # type: ignore[return-value]


def row(name: str, extend: Extend, module: Any, shape: Shape, rows: list[Mapping[str, Any]]) -> None:
    try:
        errors = error(extend, shape)
        both = {f"{count} x {length}": 1e6 * seconds(extend, shape, length, count) for length, count in PROMPTS}
        scan = "channel_scan_kernel" if module is earlier_channels else "chunk_scan_kernel"
        kernel = getattr(module, scan)
        setattr(module, scan, Nothing())
        try:
            first = 1e6 * seconds(extend, shape, *PROMPTS[0])
        finally:
            setattr(module, scan, kernel)
    except Exception as reason:
        print(f"| {shape.name} | {name} | {type(reason).__name__}: {str(reason)[:80]} |", flush=True)
        return
    times = " | ".join(f"{time:.1f}" for time in (*both.values(), first))
    print(f"| {shape.name} | {name} | {times} | {errors[0]:.1e} | {errors[1]:.1e} |", flush=True)
    rows.append({"shape": shape.name, "tile": name, "us": both, "first_us": first, "errors": errors})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[Mapping[str, Any]] = []
    print(torch.cuda.get_device_name())
    print(
        "| shape | tile | 1 x 8192 us | 4 x 2048 us | first launch us | error of outputs | of states |\n" + "|---" * 7
    )
    for shape in SHAPES:
        if shape.rule.by_channel:
            extend, local = channel_recurrence.channel_recurrence_extend, channel_local
            row("earlier", earlier_channels.channel_recurrence_extend, earlier_channels, shape, rows)
        else:
            extend, local = recurrence.recurrence_extend, chunk_local
            row("earlier", earlier_chunks.recurrence_extend, earlier_chunks, shape, rows)
        row("now", extend, chunk_scan, shape, rows)
        warps = "SOLVE_TILE" if local is channel_local else "TILE"
        usual, usual_local = chunk_scan.scan_tile, getattr(local, warps)
        for chunk, count, name in TRIED:
            if shape.key_dim > 128 or (not shape.rule.delta and count == 2):
                continue
            local.CHUNK = chunk
            setattr(local, warps, {**usual_local, "num_warps": count})
            chunk_scan.scan_tile = lambda key_dim, tile=TILES[name]: tile  # type: ignore[misc]
            row(f"chunk {chunk}, local {count}, scan {name}", extend, chunk_scan, shape, rows)
        local.CHUNK, chunk_scan.scan_tile = 32, usual
        setattr(local, warps, usual_local)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
