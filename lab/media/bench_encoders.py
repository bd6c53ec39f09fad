#!/usr/bin/env python3
"""Throughput of the published encoders of images: square images of 448, 1,024 and 2,048 pixels, and a video of 64
frames of 448 x 448.

    python lab/media/bench_encoders.py [--only NAME,NAME] [--results FILE]

Weights are random bf16, made on the GPU; kernels are those that the plan chooses. Pixels are on the GPU already, as
patches. A time is the median of calls of the encoder with everything that it does on the host, each waited for. The
ceiling of a time: its products, counted while it runs, at the rate of a large product of matrices in bf16 that is
measured first. Behind the largest image: the slices in which a server computes it beside requests whose decode step
takes 9 ms, the longest of them and the sum. Takes about a minute on an H100, 90 s at most: what does not fit that is
left out by name.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tower_configs import TOWERS

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark" / "kernels")]

from timing import matmul_ceiling  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from sglang.srt.managers.scheduler.scheduler_setup import create_plan  # noqa: E402
from sglang.srt.model_executor.media_pace import SHARE, MediaPace  # noqa: E402
from sglang.srt.model_executor.media_timing import layer_times  # noqa: E402
from sglang.srt.model_loader.loader import load_tower  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.towers.base.encoder import VisionEncoder, whole  # noqa: E402

SIDES = (448, 1024, 2048)
VIDEO_FRAMES, VIDEO_SIDE = 64, 448
LIMIT_S = 90.0
DECODE_MS = 9.0
CALLS, CALLS_S = 7, 0.7
"""Most timed calls of a case, and the seconds after which no further one begins."""


@dataclass(frozen=True, slots=True)
class Row:
    """`tflop`: products of the case. `share`: of the ceiling's rate."""

    model: str
    case: str
    patches: int
    tokens: int
    ms: float
    tflop: float
    share: float

    def line(self) -> str:
        rate = self.patches / self.ms * 1e3
        return (
            f"| {self.model} | {self.case} | {self.patches:,} | {self.tokens:,} | {self.ms:.2f} | {rate:,.0f}"
            f" | {self.tflop:.2f} | {self.share:.2f} |"
        )


HEADER = (
    "| tower | input | patches | tokens | ms | patches/s | TFLOP | of the ceiling |\n|---|---|---|---|---|---|---|---|"
)


def with_layers(config: dict[str, Any], count: int) -> dict[str, Any]:
    """The config with so many layers of its encoder, at least 3 where there is deepstack."""
    fewer = dict.fromkeys(("depth", "vt_num_hidden_layers", "num_hidden_layers"), count)
    fewer |= {"deepstack_visual_indexes": [0, 1, 2], "fullatt_block_indexes": [1]}
    vision = {key: fewer.get(key, old) if old else old for key, old in config["vision_config"].items()}
    return config | {"vision_config": vision}


def args_of(config: dict[str, Any], folder: Path, device: str, **options: Any) -> ServerArgs:
    (folder / "config.json").write_text(json.dumps(config))
    return ServerArgs.from_kwargs(
        model_path=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        device=device,
        max_total_tokens=4096,
        max_running_requests=4,
        disable_cuda_graph=True,
        **options,
    )


def encoder_of(config: dict[str, Any], folder: Path, device: str, **options: Any) -> VisionEncoder[Any]:
    encoder = load_tower(create_plan(args_of(config, folder, device, **options)), load_format="dummy")
    assert encoder is not None
    return encoder


def cases(encoder: VisionEncoder[Any], scale: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """The name and the grid of each. scale: by which sides are divided."""
    _, frames_of_patch, patch, _ = encoder.tower.patch_shape
    merge = encoder.tower.merge

    def grid(side: int, frames: int) -> tuple[int, int, int]:
        patches = max(1, side // scale // (patch * merge)) * merge
        return frames, patches, patches

    for side in SIDES:
        yield f"image {side}", grid(side, 1)
    yield f"video of {VIDEO_FRAMES} x {VIDEO_SIDE}", grid(VIDEO_SIDE, VIDEO_FRAMES // frames_of_patch)


def flops_of(encoder: VisionEncoder[Any], pixels: torch.Tensor, grid: tuple[int, int, int]) -> float:
    """FLOPs of the encoder. Its attention may be a kernel that torch does not count, and is left out of the run: it
    has two products for every pair of patches that see one another."""
    attention, attend = 0.0, encoder._attend

    def counting(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *rest: Any) -> None:
        nonlocal attention
        attention += 4.0 * float((rest[0].starts.diff().double() ** 2).sum()) * v.shape[1] * v.shape[2]
        out.copy_(v)

    encoder._attend = counting  # type: ignore[method-assign]
    try:
        with FlopCounterMode(display=False) as counter:
            encoder.encode(pixels, [grid])
    finally:
        encoder._attend = attend  # type: ignore[method-assign]
    return attention + float(counter.get_total_flops())


def seconds_of(encoder: VisionEncoder[Any], pixels: torch.Tensor, grid: tuple[int, int, int]) -> float:
    times: list[float] = []
    while len(times) < 2 or (len(times) < CALLS and sum(times) < CALLS_S):
        began = time.perf_counter()
        encoder.encode(pixels, [grid])
        if pixels.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@torch.inference_mode()
def slices_of(encoder: VisionEncoder[Any], pixels: torch.Tensor, grid: tuple[int, int, int]) -> str:
    """A line about the slices of an image beside decode steps, timed on the GPU."""
    pace = MediaPace(layer_times(encoder), {1: DECODE_MS})
    slices = pace.slices(encoder.tower, [grid], 1)
    pieces, events = encoder.encoding(encoder.sent(pixels, [grid]), [grid], slices.cuts), [_event()]
    for count in slices.pieces[:-1]:
        for _ in range(count):
            next(pieces)
        events.append(_event())
    whole(pieces)
    events.append(_event())
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for begin, end in pairwise(events)]
    cut = f"attention of a layer cut in {slices.cuts.queries}, its products in {slices.cuts.rows}"
    return (
        f"  in {len(times)} slices of at most {SHARE * DECODE_MS:.2f} ms, {cut}: the longest {max(times):.2f} ms,"
        f" the median {statistics.median(times):.2f}, all {sum(times):.1f}"
    )


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def rows_of(name: str, config: dict[str, Any], ceiling: float, device: str, scale: int, ends: float) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        encoder = encoder_of(config, Path(folder), device)
        for case, grid in cases(encoder, scale):
            if time.monotonic() > ends:
                print(f"| {name} | {case} | left out: the time is over |", flush=True)
                continue
            patches = grid[0] * grid[1] * grid[2]
            pixels = torch.rand(patches, encoder.tower.patch_values, device=device)
            flops = flops_of(encoder, pixels, grid)
            encoder.encode(pixels, [grid])  # compiles
            seconds = seconds_of(encoder, pixels, grid)
            tokens = encoder.tower.num_tokens(grid)
            yield Row(name, case, patches, tokens, seconds * 1e3, flops / 1e12, flops / seconds / ceiling)
            if pixels.is_cuda and case == f"image {SIDES[-1]}":
                slices_of(encoder, pixels, grid)  # smaller calls of attention than before may compile
                print(slices_of(encoder, pixels, grid), flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TOWERS), help="towers, by name")
    parser.add_argument("--results", type=Path, help="a file for the rows as JSON")
    parser.add_argument("--limit-seconds", type=float, default=LIMIT_S)
    parser.add_argument("--layers", type=int, help="so many layers of each tower, to try the script without a GPU")
    args = parser.parse_args(argv)
    ends = time.monotonic() + args.limit_seconds
    on_gpu = torch.cuda.is_available()
    device, scale = ("cuda", 1) if on_gpu else ("cpu", 8)
    ceiling = matmul_ceiling() if on_gpu else 1e11
    what = torch.cuda.get_device_name() if on_gpu else "no GPU: sides are divided by 8, and shares mean nothing"
    print(f"{what}; bf16 products at {ceiling / 1e12:.0f} TFLOP/s\n{HEADER}", flush=True)
    rows, failed = [], 0
    for name in filter(None, args.only.split(",")):
        config = TOWERS[name]
        if args.layers:
            config = with_layers(config, args.layers)
        try:
            for row in rows_of(name, config, ceiling, device, scale, ends):
                rows.append(row)
                print(row.line(), flush=True)
        except Exception:
            failed += 1
            print(f"{name} failed:\n{traceback.format_exc()[-2000:]}", flush=True)
        if on_gpu:
            torch.cuda.empty_cache()
    if args.results:
        args.results.write_text(json.dumps({"gpu": what, "ceiling": ceiling, "rows": [asdict(row) for row in rows]}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
