"""Prompts of recurrent layers: chunks of 64 with the state in shared memory, and of 32 with the state in registers.

    python benchmark/kernels/recurrent/compare_chunks.py [--json out.json]

Each row: both launches for one prompt and for four, the first launch alone, and the errors of outputs and states
against the recurrence in fp64, relative to their norms, over prompts with and without a state before. The rows behind
"registers" have other tiles of `register_scan`: columns of a program / its warps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench_recurrent import Shape, inputs, randn
from timing import time_calls

from sglang.srt.layers.recurrent import native
from sglang.srt.layers.recurrent.rule import Rule, gated_delta_rule
from sglang.srt.layers.recurrent.step_kernels import RecurrenceExtend
from sglang.srt.layers.recurrent.triton_ops import chunk_scan, recurrence, register_scan

SHAPES = (
    Shape("gated delta, 32 heads", gated_delta_rule(128), 16, 32, 128, 128),
    Shape("gated delta, 16 heads", gated_delta_rule(128), 8, 16, 128, 128),
    Shape("mamba2, 64 heads", Rule(delta=False), 8, 64, 128, 64),
)
PROMPTS = ((8192, 1), (2048, 4))
TILES = {
    "64/4, one buffer": {"BLOCK_V": 64, "PART": 64, "num_warps": 4, "num_stages": 2},
    "32/2": {"BLOCK_V": 32, "PART": 32, "num_warps": 2, "num_stages": 3},
    "16/1": {"BLOCK_V": 16, "PART": 16, "num_warps": 1, "num_stages": 3},
    "32/4, by keys": {"BLOCK_V": 32, "PART": 128, "num_warps": 4, "num_stages": 3},
    "16/4, by keys": {"BLOCK_V": 16, "PART": 128, "num_warps": 4, "num_stages": 3},
}
"""By keys: each warp has a share of them, and the state goes through shared memory."""


class Nothing:
    """In place of a kernel."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def arguments(shape: Shape, length: int, count: int) -> tuple[Any, ...]:
    given = inputs(shape, length * count)
    states = randn(count + 1, shape.heads, shape.key_dim, shape.value_dim, dtype=torch.float32)
    slots = torch.arange(1, count + 1, device="cuda")
    prefix = torch.zeros(count, dtype=torch.int32, device="cuda")
    loc = torch.arange(count + 1, dtype=torch.int32, device="cuda") * length
    out = randn(length * count, shape.heads, shape.value_dim)
    return shape.rule, *given, states, slots, slots, prefix, loc, out


def microseconds(extend: RecurrenceExtend, shape: Shape, length: int, count: int) -> float:
    sets = [arguments(shape, length, count) for _ in range(3)]
    return 1e6 * time_calls([lambda given=given: extend(*given) for given in sets])  # type: ignore[misc]


def errors(extend: RecurrenceExtend, shape: Shape) -> tuple[float, float]:
    """Of outputs and of states."""
    small = Shape(shape.name, shape.rule, 2, 4, shape.key_dim, shape.value_dim)
    torch.manual_seed(0)
    rule, *given = arguments(small, 1001, 2)
    given[-3] = torch.tensor([0, 5], dtype=torch.int32, device="cuda")
    exact = [x.double() if x is not None and x.is_floating_point() else x for x in given]
    extend(rule, *given)
    native.recurrence_extend(rule, *exact)
    out, states = ((given[i].double(), exact[i]) for i in (-1, -6))
    return float((out[0] - out[1]).norm() / out[1].norm()), float((states[0] - states[1]).norm() / states[1].norm())


def first_launch(extend: RecurrenceExtend, shape: Shape) -> float:
    kernels = chunk_scan.chunk_scan_kernel, register_scan.register_scan_kernel
    chunk_scan.chunk_scan_kernel = register_scan.register_scan_kernel = Nothing()
    try:
        return microseconds(extend, shape, *PROMPTS[0])
    finally:
        chunk_scan.chunk_scan_kernel, register_scan.register_scan_kernel = kernels


def forms() -> Iterator[tuple[str, RecurrenceExtend]]:
    yield "shared memory", recurrence.RECURRENCE.extend
    yield "registers", recurrence.IN_REGISTERS.extend
    usual = register_scan.TILE
    for name, tile in TILES.items():
        register_scan.TILE = tile
        yield name, recurrence.IN_REGISTERS.extend
    register_scan.TILE = usual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[Mapping[str, Any]] = []
    print(torch.cuda.get_device_name())
    print("| shape | form | 1 x 8192 us | 4 x 2048 us | first launch us | error of outputs | of states |")
    print("|---" * 7 + "|")
    for shape in SHAPES:
        for name, extend in forms():
            found = errors(extend, shape)
            both = {f"{count} x {length}": microseconds(extend, shape, length, count) for length, count in PROMPTS}
            first = first_launch(extend, shape)
            times = " | ".join(f"{time:.1f}" for time in (*both.values(), first))
            print(f"| {shape.name} | {name} | {times} | {found[0]:.1e} | {found[1]:.1e} |", flush=True)
            rows.append({"shape": shape.name, "form": name, "us": both, "first_us": first, "errors": found})
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
